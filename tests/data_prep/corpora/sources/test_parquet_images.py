"""Parquet with images as written by `datasets`, pyarrow and this project."""

import io
import json
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.config import CorpusRecipe, ParquetImages
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.labels.classes import ClassInfo, ClassMap
from vitline.data_prep.shard_format import Counts, Manifest, SegmentInfo, ShardError, SplitInfo, shard_schema
from vitline.data_prep.sources.parquet_images import ParquetCorpus
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import StoreFailed, open_store
from vitline.infra.stores.file_store import FileStore

from ....pictures import noise
from ....shard_lists import with_shard_list


def corpus(folder, path="", **source):
    recipe = CorpusRecipe(**{name: source.pop(name) for name in ("val_fraction", "test_fraction") if name in source})
    uri = f"{folder.uri}/{path}" if path else folder.uri
    return ParquetCorpus(ParquetImages(path=uri, **source), recipe)


def write_parquet(folder, key, columns, **options):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    folder.write(key, sink.getvalue().to_pybytes())


def refusals(rows):
    return {row[0]: row[6] for row in rows if row[6]}


def test_folders_of_a_partitioned_table_are_columns(tmp_path, read):
    """As Spark and pyarrow write them with `partition_cols`; a folder of another column than split names no split."""
    labels = ["test", "a b/ä", "7", "10", None, "1.5"]
    table = {"image": [noise(i, (4, 4)) for i in range(6)], "label": labels, "split": ["train"] * 5 + ["test"]}
    pq.write_to_dataset(pa.table(table), tmp_path / "hive", partition_cols=["label", "split"])
    source = ParquetCorpus(ParquetImages(path=str(tmp_path / "hive")), CorpusRecipe(val_fraction=0))
    found = {row[5]: (row[1], row[4]) for row in read(source) if not row[6]}
    expected = ["test", "a b/ä", "000007", "000010", None, "1.5"]
    named = zip(table["image"], expected, table["split"], strict=True)
    assert found == {image: ((label,), split) for image, label, split in named if label}
    assert [refused[0] for refused in refusals(read(source)).values()] == ["no_label"]


def test_files_written_by_datasets_are_read_as_datasets_reads_them(tmp_path, monkeypatch, read):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    names = ["zebra", "ant", "monkey"]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})

    def encoded(seed):
        return {"bytes": noise(seed, (4, 4)), "path": f"{seed}.png"}

    paths = {"train-00000-of-00002": range(7), "train-00001-of-00002": range(7, 12), "validation-00000-of-00001": [12]}
    for name, seeds in paths.items():
        rows = {"image": [encoded(seed) for seed in seeds], "label": [seed % 3 for seed in seeds]}
        (tmp_path / "data").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "data" / f"{name}.parquet", batch_size=3)
    source = ParquetCorpus(ParquetImages(path=str(tmp_path)), CorpusRecipe())
    expected = [
        (f"data/{name}.parquet!{row}", (f"{seed % 3:06d}",), encoded(seed)["bytes"])
        for name, seeds in paths.items()
        for row, seed in enumerate(seeds)
    ]
    for examples_per_part in (1, 4, 512):
        rows = read(source, examples_per_part)
        assert [(row[0], row[1], row[5]) for row in rows] == expected
    assert [row[0] for row in rows if row[4] == "val"] == ["data/validation-00000-of-00001.parquet!0"]
    classes = ClassMap.of(source.class_info(label) for label in {row[1][0] for row in rows})
    assert [info.name for info in classes.classes] == names  # in declared order
    assert source.class_info("000001").name == "ant"


def test_plain_bytes_text_labels_label_lists_and_ids_are_read(folder, read):
    write_parquet(
        folder, "a.parquet", {"png": [b"1", b"2", b"3"], "tags": [["x", "y"], ["y"], ["z", "z"]], "key": [7, 8, 9]}
    )
    write_parquet(folder, "_temporary/b.parquet", {"other": [1]})
    write_parquet(folder, "._a.parquet", {"other": [1]})
    folder.write("README.md", b"about")
    source = corpus(folder, image_column="png", label_column="tags", id_column="key", single_label=False)
    assert [row[:2] for row in read(source)] == [("7", ("x", "y")), ("8", ("y",)), ("9", ("z",))]
    assert source.class_info("x") == ClassInfo(name="x", source_id="x")
    one = corpus(folder, "a.parquet", image_column="png", label_column="tags")
    assert [row[1] for row in read(one)] == [(), ("y",), ("z",)]
    assert "set source.single_label to false" in refusals(read(one))["a.parquet!0"][1]


def test_numbers_keep_their_order_without_declared_names(folder, read):
    write_parquet(folder, "a.parquet", {"image": [b"1", b"2", b"3"], "label": [10, 9, None]}, row_group_size=2)
    source = corpus(folder)
    rows = read(source)
    assert [row[1] for row in rows] == [("000010",), ("000009",), ()]
    assert source.class_info("000010").name == "10"
    assert refusals(rows)["a.parquet!2"][0] == "no_label"


def test_rows_without_image_or_label_are_refused_one_by_one(folder, read):
    declared = {"info": {"features": {"label": {"feature": {"names": ["a", "b"], "_type": "ClassLabel"}}}}}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", image), ("label", pa.list_(pa.int64()))], {"huggingface": json.dumps(declared)})
    rows = [
        {"image": {"bytes": b"1", "path": None}, "label": [0, 1]},
        {"image": {"bytes": None, "path": "far/away.jpg"}, "label": [0]},
        {"image": None, "label": [0]},
        {"image": {"bytes": b"2", "path": None}, "label": [2]},
        {"image": {"bytes": b"3", "path": None}, "label": [-1]},
        {"image": {"bytes": b"4", "path": None}, "label": []},
        {"image": {"bytes": b"5", "path": None}, "label": None},
    ]
    write_parquet(folder, "a.parquet", pa.Table.from_pylist(rows, schema))
    source = corpus(folder, single_label=False)
    found = read(source)
    assert found[0][1] == ("000000", "000001")
    assert source.class_info("000001").name == "b"
    reasons = refusals(found)
    assert [reason for reason, _ in reasons.values()] == ["unreadable"] * 2 + ["no_label"] * 4
    assert "far/away.jpg" in reasons["a.parquet!1"][1]
    assert "2 classes are declared" in reasons["a.parquet!3"][1]


def test_a_damaged_row_group_or_file_is_one_refusal(folder, read):
    table = {"image": [bytes([i]) * 1000 for i in range(9)], "label": list(range(9))}
    write_parquet(
        folder, "a.parquet", table, row_group_size=3, use_dictionary=False, compression="none", write_page_checksum=True
    )
    write_parquet(folder, "b.parquet", {"image": [b"1"], "label": [1]})
    data = folder.read("a.parquet")
    at = data.index(bytes([4]) * 1000)
    folder.write("a.parquet", data[:at] + b"\xff" + data[at + 1 :])
    folder.write("b.parquet", folder.read("b.parquet")[:-5])
    folder.write("c.parquet", b"")
    for examples_per_part in (1, 512):
        rows = read(corpus(folder), examples_per_part)
        refused = refusals(rows)
        assert [row[0] for row in rows if not row[6]] == [f"a.parquet!{i}" for i in (0, 1, 2, 6, 7, 8)]
        assert [*refused] == ["a.parquet!row group 1", "b.parquet.damaged!footer", "c.parquet.damaged!footer"]
        assert {reason for reason, _ in refused.values()} == {"uncounted_loss"}
        assert "a.parquet: row group 1" in refused["a.parquet!row group 1"][1]


def test_a_failing_store_is_not_reported_as_a_damaged_file(tmp_path, monkeypatch, read):
    folder = open_store(tmp_path)
    write_parquet(folder, "a.parquet", {"image": [b"1"], "label": [1]})

    class Failing(io.BytesIO):
        def read(self, size=-1):
            raise StoreFailed("503")

    monkeypatch.setattr(FileStore, "open", lambda self, key: Failing(b"x" * 100))
    with pytest.raises(StoreFailed, match="503"):
        read(corpus(folder))


def test_sources_that_cannot_be_read_are_errors_with_the_next_step(folder, read):
    with pytest.raises(ValueError, match="is neither a file nor a folder with files"):
        corpus(folder).fingerprint()
    write_parquet(folder, "a.parquet", {"image": ["a.jpg"], "label": [1]})
    with pytest.raises(ValueError, match=r"has no column 'target', or several; its columns are image, label"):
        read(corpus(folder, label_column="target"))
    with pytest.raises(ValueError, match=r"'image' of .* is string.*source kind 'table'"):
        read(corpus(folder))
    for name, classes in (("a", ["x", "y"]), ("b", ["y", "x"])):
        declared = {"info": {"features": {"label": {"names": classes, "_type": "ClassLabel"}}}}
        table = pa.table({"image": [b"1"], "label": [1]}).replace_schema_metadata({"huggingface": json.dumps(declared)})
        write_parquet(folder, f"{name}.parquet", table)
    with pytest.raises(ValueError, match="declares class names for 'label' that differ"):
        read(corpus(folder))


def splits_of(folder, keys, **source):
    """The splits of files with these names, and what is said about them."""
    place = open_store(f"{folder.uri}/{uuid.uuid4().hex}")
    for key in keys:
        write_parquet(place, key, {"image": [b"x"], "label": [0]})
    source = ParquetCorpus(ParquetImages(path=place.uri, **source), CorpusRecipe(val_fraction=0, test_fraction=0))
    work = WorkFolder(place, place, 10)
    found = {part.where["key"]: part.where["split"] for part in source.parts(work)}
    return found, source.structure(work)


def test_splits_are_those_that_the_names_of_all_files_say(folder):
    hub = {
        "data/train-00000-of-00002-b42c55aff497b4a3.parquet": "train",
        "data/train-00001-of-00002-0a1d7be1c6d7a1f2.parquet": "train",
        "data/validation-00000-of-00001-6cb5ab4b0a9b0e4c.parquet": "val",
    }
    folders = {"lab-test-photos/train/0.parquet": "train", "lab-test-photos/eval/0.parquet": "test"}
    named = {"bird_train.parquet": "train", "bird_dev2.parquet": "val"}
    for expected in (hub, folders, named):
        found, said = splits_of(folder, expected)
        assert found == expected
        assert "train: " in said
    for photos in (
        ["lab-test-photos.parquet"],
        ["lab-test-photos.parquet", "field.parquet"],
        ["lab-test/a.parquet", "b.parquet"],
    ):
        found, said = splits_of(folder, photos)
        assert {*found.values()} == {None}
        assert "no split is taken from names of files, although one is named 'lab-test" in said
    assert splits_of(folder, ["testament/contest.parquet"]) == ({"testament/contest.parquet": None}, "")


def test_names_that_are_no_certain_splits_are_asked_for(folder):
    for uncertain in (
        ["train.parquet", "test.parquet", "more.parquet"],
        ["test-0.parquet", "test-1.parquet"],
        ["test/0.parquet"],
    ):
        with pytest.raises(ValueError, match=r"--set 'source\.splits="):
            splits_of(folder, uncertain)
    found, _ = splits_of(
        folder, ["train.parquet", "test/0.parquet", "more.parquet"], splits={"t*": "test", "more*": "train"}
    )
    assert found == {"train.parquet": "test", "test/0.parquet": "test", "more.parquet": "train"}
    assert splits_of(folder, ["test-0.parquet", "b/more.parquet"], splits={"*": "train"})[0].keys() == {
        "test-0.parquet",
        "b/more.parquet",
    }
    assert splits_of(folder, ["test-0.parquet", "more.parquet"], splits={"more.*": "train"})[0] == {
        "more.parquet": "train"
    }
    with pytest.raises(ValueError, match="matches no file of"):
        splits_of(folder, ["test-0.parquet"], splits={"train": "train"})


def test_a_missing_split_is_drawn_from_train(folder, read):
    write_parquet(folder, "train.parquet", {"image": [bytes([i]) for i in range(200)], "label": [1] * 200})
    write_parquet(folder, "test.parquet", {"image": [b"t"], "label": [1]})
    rows = read(corpus(folder, val_fraction=0.3))
    splits = {row[0]: row[4] for row in rows}
    assert splits.pop("test.parquet!0") == "test"
    assert set(splits.values()) == {"train", "val"}


def vitline_corpus(folder):
    """Two splits of a multi-label corpus, one of them with rows outside of the split; and unrelated files."""
    classes = [ClassInfo(name="cat", source_id="n02"), ClassInfo(name="owl", source_id="n01", parents=("bird",))]
    folder.write_json("classes.json", ClassMap(classes=tuple(classes)).as_file())
    schema = shard_schema(single_label=False, has_weights=True)
    splits = {"train": 5, "val": 2}
    for split, stored in splits.items():
        for shard, first in enumerate(range(0, stored, 2)):
            rows = [
                {
                    **{field.name: b"" if pa.types.is_binary(field.type) else None for field in schema},
                    "image": {"bytes": f"{split}{i}".encode(), "path": None},
                    "labels": [1, 0] if i == 0 else [i % 2],
                    "weights": [0.5, 0.25] if i == 0 else [1.0],
                    "example_id": f"{split}/{i}.jpg",
                    "group": "g" if i == 1 else None,
                    "width_px": 1,
                    "height_px": 1,
                    "source": "here",
                }
                for i in range(first, min(first + 2, stored))
            ]
            key = f"{split}/s000/part-{shard:05d}-of-{-(-stored // 2):05d}.parquet"
            write_parquet(folder, key, pa.Table.from_pylist(rows, schema))

    def of(split, stored, left_out, owner=None):
        num_shards = -(-stored // 2)
        segment = SegmentInfo(
            split=owner or split, name="s000", num_rows=stored - left_out, num_shards=num_shards, rows_left_out=left_out
        )
        return SplitInfo(
            num_rows=stored - left_out, rows_per_row_group=2, row_groups_per_shard=1, segments=(segment,), digest="d"
        )

    manifest = Manifest(
        name="own",
        version="1",
        digest="abc",
        class_map_digest="c",
        num_classes=2,
        single_label=False,
        has_weights=True,
        order_seed=0,
        splits={"train": of("train", 5, 2), "val": of("val", 2, 0), "both": of("both", 2, 0, owner="val")},
        decode_policy=DecodePolicy(),
        counts=Counts(num_found=7, num_accepted=7, num_refused=0, num_bytes=1, refused={}),
        provenance={},
    )
    folder.write_json("manifest.json", with_shard_list(folder, manifest).model_dump(mode="json"))
    write_parquet(folder, "rejects.parquet", {"example_id": ["x"]})
    write_parquet(folder, "train/s001/part-00000-of-00001.parquet", {"image": [b"of no manifest"]})


def test_corpora_of_vitline_keep_ids_groups_labels_weights_and_classes(folder, read):
    vitline_corpus(folder)
    source = corpus(folder, single_label=False)
    rows = {row[0]: row[1:6] for row in read(source, 1)}
    assert rows == {row[0]: row[1:6] for row in read(source)}
    assert rows.keys() == {*(f"train/{i}.jpg" for i in range(3)), "val/0.jpg", "val/1.jpg"}
    assert rows["train/0.jpg"] == (("n01", "n02"), (0.5, 0.25), None, "train", b"train0")
    assert rows["val/1.jpg"] == (("n01",), (1.0,), "g", "val", b"val1")
    assert source.class_info("n01") == ClassInfo(name="owl", source_id="n01", parents=("bird",))
    with pytest.raises(ValueError, match=r"Set source\.single_label to false"):
        read(corpus(folder))
    first, second = (f"train/s000/part-{shard:05d}-of-00003.parquet" for shard in (0, 1))
    folder.write(first, folder.read(second))
    with pytest.raises(ShardError, match=r"part-00000-of-00003\.parquet states that it is train/s000/part-00001"):
        read(source)


def test_the_fingerprint_changes_with_the_files(folder):
    write_parquet(folder, "a.parquet", {"image": [b"1"], "label": [1]})
    first = corpus(folder).fingerprint()
    assert corpus(folder).fingerprint() == first
    write_parquet(folder, "b.parquet", {"image": [b"1"], "label": [1]})
    assert corpus(folder).fingerprint() != first
