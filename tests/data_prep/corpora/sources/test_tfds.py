"""A real directory of TensorFlow Datasets: array_record and tfrecord give the same examples as TFDS itself."""

import io
import json
import shutil

import numpy as np
import pytest

from vitline.data_prep.archives.tfrecord import crc32c
from vitline.data_prep.config import CorpusRecipe, TfdsDirectory
from vitline.data_prep.decode import decode
from vitline.data_prep.sources import tfds as tfds_reader
from vitline.data_prep.sources.raw import WorkFolder
from vitline.data_prep.sources.tfds import TfdsCorpus
from vitline.infra.storage import open_store

from ....pictures import noise
from ....tars import framed

NAMES = ("tabby cat", "dog", "owl")
NO_HASHING = CorpusRecipe(val_fraction=0, test_fraction=0)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The directory that TFDS wrote as array_record, and its builder."""
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")
    f = tfds.features

    class Toy(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        url_infos = None  # nothing is downloaded; looking for a list of checksums next to this file would fail

        def _info(self):
            features = f.FeaturesDict(
                {
                    "image": f.Image(),
                    "label": f.ClassLabel(names=NAMES),
                    "number": np.int64,
                    "tags": f.Sequence(f.ClassLabel(num_classes=12)),
                    "objects": f.Sequence({"kind": f.ClassLabel(names=["a", "b"]), "crop": f.Image()}),
                    "text": f.Text(),
                    "depth": f.Image(shape=(None, None, 1), dtype=np.float32),
                }
            )
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(0, 7), "test": self._generate_examples(7, 10)}

        def _generate_examples(self, start, end):
            for i in range(start, end):
                yield (
                    f"key {i}",
                    {
                        "image": io.BytesIO(noise(i, (9, 8))),
                        "label": i % 3,
                        "number": i,
                        "tags": [11, i % 3],
                        "objects": [
                            {"kind": 0, "crop": io.BytesIO(noise(0, (9, 8)))},
                            {"kind": i % 2, "crop": io.BytesIO(noise(1, (9, 8)))},
                        ],
                        "text": "t" * i,
                        "depth": io.BytesIO(noise(2, (9, 8))),
                    },
                )

    folder = tmp_path_factory.mktemp("tfds")
    builder = Toy(data_dir=str(folder), file_format="array_record")
    with pytest.MonkeyPatch.context() as patch:
        # Only the float image needs arrays and so TensorFlow; any bytes will do here, because they are not decoded.
        patch.setattr(f.Image, "encode_example", lambda self, file: file.read())
        builder.download_and_prepare()
    return folder / "toy" / "1.0.0", builder


def payloads(folder, split):
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(str(folder / f"toy-{split}.array_record-00000-of-00001")).read_all()


@pytest.fixture
def as_tfrecord(written, tmp_path):
    """The same records as tfrecord, train in two shards."""
    folder, _ = written
    copy = tmp_path / "toy" / "1.0.0"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*array_record*"))
    info = json.loads((folder / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    train, test = payloads(folder, "train"), payloads(folder, "test")
    shards = {"train": (train[:4], train[4:]), "test": (test,)}
    for split in info["splits"]:
        parts = shards[split["name"]]
        split["shardLengths"] = [str(len(part)) for part in parts]
        for i, part in enumerate(parts):
            name = f"toy-{split['name']}.tfrecord-{i:05d}-of-{len(parts):05d}"
            (copy / name).write_bytes(framed(part, crc32c))
    (copy / "dataset_info.json").write_text(json.dumps(info))
    return copy


@pytest.fixture
def read(memory_root):
    """The parts and the examples of a directory."""

    def make(path, recipe=NO_HASHING, **source):
        corpus = TfdsCorpus(TfdsDirectory(path=str(path), **source), recipe)
        work = WorkFolder(open_store(memory_root), open_store(f"{memory_root}/work"), 100)
        parts = list(corpus.parts(work))
        fresh = TfdsCorpus(TfdsDirectory(path=str(path), **source), recipe)  # as on another worker
        return parts, [example for part in parts for example in fresh.examples(part, work)]

    return make


def bytes_at(example):
    return open_store(example.base).read(example.key, example.offset, example.offset + example.length)


def test_examples_equal_those_of_tfds_in_its_order(written, read):
    folder, builder = written
    parts, examples = read(folder)
    assert [part.num_examples for part in parts] == [7, 3]
    records = [*payloads(folder, "train"), *payloads(folder, "test")]
    as_stored = pytest.importorskip("tensorflow_datasets").decode.SkipDecoding()
    decoders = {"image": as_stored, "depth": as_stored}
    given = [builder.info.features.deserialize_example_np(record, decoders=decoders) for record in records]
    assert [e.example_id for e in examples] == [f"train/{i:08d}" for i in range(7)] + [
        f"test/{i:08d}" for i in range(3)
    ]
    for example, theirs in zip(examples, given, strict=True):
        assert example.data == bytes_at(example) == theirs["image"] == noise(int(theirs["number"]), (9, 8))
        assert example.labels == (f"00000{theirs['label']}",)
        assert example.split == example.example_id.split("/")[0]
        decode(example.data)


def test_tfrecord_gives_the_same_examples_with_ranges_in_its_files(written, as_tfrecord, read):
    _, from_array_record = read(written[0])
    parts, examples = read(as_tfrecord)
    assert [part.name for part in parts] == [
        "toy-train.tfrecord-00000-of-00002",
        "toy-train.tfrecord-00001-of-00002",
        "toy-test.tfrecord-00000-of-00001",
    ]
    assert {example.base for example in examples} == {f"file://{as_tfrecord}"}  # no copy was made in the work folder
    for example, other in zip(examples, from_array_record, strict=True):
        assert (example.example_id, example.labels, example.data) == (other.example_id, other.labels, other.data)
        assert bytes_at(example) == example.data


@pytest.mark.parametrize("fixture", ["written", "as_tfrecord"])
def test_directory_can_be_read_from_any_store(request, fixture, memory_root, read):
    folder = request.getfixturevalue(fixture)
    folder = folder[0] if fixture == "written" else folder
    store = open_store(f"{memory_root}-copy")
    for path in folder.iterdir():
        store.write(path.name, path.read_bytes())
    _, local = read(folder)
    _, remote = read(store.uri)
    assert [(e.example_id, e.labels, bytes_at(e)) for e in remote] == [(e.example_id, e.labels, e.data) for e in local]


def test_classes_have_their_names_in_order(as_tfrecord):
    corpus = TfdsCorpus(TfdsDirectory(path=str(as_tfrecord)), NO_HASHING)
    assert [corpus.class_info(f"{i:06d}").name for i in range(4)] == [*NAMES, "3"]


def test_sequences_give_several_labels(as_tfrecord, read):
    _, examples = read(as_tfrecord, label_feature="tags", single_label=False)
    assert {e.labels for e in examples} == {("000011", f"00000{i}") for i in range(3)}
    _, examples = read(as_tfrecord, label_feature="objects/kind", single_label=False)
    assert {e.labels for e in examples} == {("000000",), ("000000", "000001")}  # each class once
    _, examples = read(as_tfrecord, label_feature="number")
    assert sorted(e.labels[0] for e in examples) == [f"{i:06d}" for i in range(10)]


def test_splits_are_mapped_as_requested(as_tfrecord, read):
    parts, examples = read(as_tfrecord, splits={"train": "train", "validation": "val"})
    assert len(parts) == 2
    assert {e.split for e in examples} == {"train"}
    _, examples = read(as_tfrecord, splits={"test": "val", "train": "train"}, recipe=CorpusRecipe(val_fraction=0.5))
    assert [e.split for e in examples].count("val") == 3  # val exists, so nothing is drawn from train
    _, examples = read(as_tfrecord, recipe=CorpusRecipe(val_fraction=0.5))
    assert {e.split for e in examples if e.example_id.startswith("train/")} == {"train", "val"}


@pytest.mark.parametrize(
    ("damage", "refused"),
    [
        (lambda data: data[:-3], [3]),
        (lambda data: data[:2000], [1, 2, 3]),
        (lambda data: data[:2000] + bytes([data[2000] ^ 1]) + data[2001:], [1]),
        (lambda data: b"\1" + data[1:], [0, 1, 2, 3]),
    ],
)
def test_examples_lost_in_a_damaged_shard_are_refused(as_tfrecord, read, damage, refused):
    shard = as_tfrecord / "toy-train.tfrecord-00000-of-00002"
    records = shard.read_bytes()
    assert 4 * 1300 < len(records) < 4 * 1400
    shard.write_bytes(damage(records))
    _, examples = read(as_tfrecord)
    assert len({e.example_id for e in examples}) == 10
    assert [int(e.example_id[-8:]) for e in examples if e.refused] == refused
    assert {(e.refused[0], "toy-train.tfrecord-00000-of-00002" in e.refused[1]) for e in examples if e.refused} == {
        ("damaged_archive", True)
    }


def test_records_beyond_the_listed_number_are_refused(as_tfrecord, read):
    shard = as_tfrecord / "toy-train.tfrecord-00000-of-00002"
    whole = shard.read_bytes()
    for more in (framed([b"more"], crc32c), b"garbage"):
        shard.write_bytes(whole + more)
        _, examples = read(as_tfrecord)
        assert [e.example_id for e in examples if e.refused] == ["train/toy-train.tfrecord-00000-of-00002!00000004"]
        assert len(examples) == 11


def test_a_damaged_array_record_is_one_refusal(written, tmp_path, read):
    copy = shutil.copytree(written[0], tmp_path / "copy")
    shard = copy / "toy-train.array_record-00000-of-00001"
    data = bytearray(shard.read_bytes())
    data[data.index(b"IDAT")] ^= 1
    shard.write_bytes(data)
    _, examples = read(copy)
    assert [e.refused and e.refused[0] for e in examples].count("damaged_archive") == 1
    shard.write_bytes(data[:1000])
    _, examples = read(copy)
    assert sum(e.refused is not None for e in examples) == 7


def test_records_without_image_or_label_are_refused(as_tfrecord, read):
    from tensorflow_datasets.proto import tf_example_pb2

    def record(image, labels):
        example = tf_example_pb2.Example()
        example.features.feature["image"].bytes_list.value.extend(image)
        example.features.feature["label"].int64_list.value.extend(labels)
        return example.SerializeToString()

    wrong = [record([], [1]), record([noise(0, (9, 8))], [-1]), record([noise(0, (9, 8))], []), b"\xff"]
    (as_tfrecord / "toy-train.tfrecord-00000-of-00002").write_bytes(framed(wrong, crc32c))
    _, examples = read(as_tfrecord)
    reasons = [e.refused and e.refused[0] for e in examples[:4]]
    assert reasons == ["damaged_archive", "no_label", "no_label", "damaged_archive"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"label_feature": "tags"}, "'tags' is ClassLabel of int64 in a sequence; expected"),
        ({"label_feature": "text"}, "'text' is Text"),
        ({"label_feature": "none"}, "no feature 'none'; it has depth, image, label"),
        ({"image_feature": "text"}, "'text' is Text of bytes, which is not supported"),
        ({"image_feature": "depth"}, "'depth' is Image of float32"),
        ({"image_feature": "objects/crop"}, "'objects/crop' is Image of uint8 in a sequence"),
        ({"splits": {"all": "train"}}, "has the splits train, test, but none of all"),
    ],
)
def test_unsupported_directories_are_refused_before_reading(as_tfrecord, read, source, message):
    with pytest.raises(ValueError, match=message):
        read(as_tfrecord, **source)


def test_invalid_or_incomplete_folders_are_refused(as_tfrecord, read, monkeypatch, written):
    with pytest.raises(ValueError, match="Give the folder of one version"):
        TfdsCorpus(TfdsDirectory(path=str(as_tfrecord.parent)), NO_HASHING).fingerprint()
    monkeypatch.setattr(tfds_reader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install array-record"):
        read(written[0])
    info = (as_tfrecord / "dataset_info.json").read_text()
    for wrong, message in [
        (info.replace("tfrecord", "riegeli"), "holds riegeli files, which is not supported"),
        (info.replace('"3"', '"1000000000"'), "too few for the 1,000,000,000 examples"),
        (info.replace('"3"', '"many"'), "splits/0/shardLengths/1|splits/1/shardLengths/0"),
        (info.replace("toy", "../toy"), "is not a valid key"),
    ]:
        (as_tfrecord / "dataset_info.json").write_text(wrong)
        with pytest.raises(ValueError, match=message):
            read(as_tfrecord)
    (as_tfrecord / "dataset_info.json").write_text(info)
    (as_tfrecord / "toy-test.tfrecord-00000-of-00001").unlink()
    with pytest.raises(ValueError, match=r"toy-test\.tfrecord-00000-of-00001 is missing"):
        read(as_tfrecord)


def test_directories_of_old_tfds_versions_are_read(as_tfrecord, read):
    """TFDS 4.0 wrote features.json in another form; before it, there was none."""

    def old(kind, content):
        return {"type": f"tensorflow_datasets.core.features.{kind}", "content": content}

    sequence = {"feature": old("class_label_feature.ClassLabel", {"num_classes": 12}), "length": None}
    features = {
        "image": old("image_feature.Image", {"shape": [None, None, 3], "dtype": "uint8", "encoding_format": "png"}),
        "label": old("class_label_feature.ClassLabel", {"num_classes": 3}),
        "tags": old("sequence_feature.Sequence", sequence),
        "number": old("feature.Tensor", {"shape": [], "dtype": "int64"}),
    }
    (as_tfrecord / "features.json").write_text(json.dumps(old("features_dict.FeaturesDict", features)))
    assert len(read(as_tfrecord)[1]) == len(read(as_tfrecord, label_feature="number")[1]) == 10
    assert len(read(as_tfrecord, label_feature="tags", single_label=False)[1]) == 10
    with pytest.raises(ValueError, match="'tags' is ClassLabel"):
        read(as_tfrecord, label_feature="tags")
    (as_tfrecord / "features.json").unlink()
    assert not any(e.refused for e in read(as_tfrecord)[1])


def test_the_fingerprint_changes_with_the_files(as_tfrecord):
    corpus = TfdsCorpus(TfdsDirectory(path=str(as_tfrecord)), NO_HASHING)
    first = corpus.fingerprint()
    assert corpus.fingerprint() == first
    (as_tfrecord / "label.labels.txt").write_text("other\n")
    assert corpus.fingerprint() != first
