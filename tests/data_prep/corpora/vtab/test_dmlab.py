"""DMLab: records in a compressed tar, or unpacked; their keys, classes and bytes."""

import pytest

from vitline.data_prep.archives.tfrecord import crc32c
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.benchmarks.vtab.dmlab import DmLab
from vitline.data_prep.sources.raw import SourcePart
from vitline.infra.storage import open_store

from ....tars import framed, tar_of

NUM_TEST = 20
SHARDS = {"train": 3, "validation": 2, "test": 1}


def delimited(number, data):
    size = bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) if len(data) > 0x7F else bytes([len(data)])
    return bytes([number << 3 | 2]) + size + data


def record(name, label, image):
    """A tf.train.Example encoded by hand: `1: Features{1: map entry{1: name, 2: Feature}}`, bytes_list 1, int64_list 3."""
    features = {
        b"image": delimited(1, delimited(1, image)),
        b"filename": delimited(1, delimited(1, name)),
        b"label": delimited(3, delimited(1, bytes([label]))),
    }
    return delimited(1, b"".join(delimited(1, delimited(1, key) + delimited(2, f)) for key, f in features.items()))


@pytest.fixture(scope="module")
def pictures():
    return {}


@pytest.fixture
def shards(mini, set_splits, pictures):
    """The files of records by name; frame i of a split is <split>_<i>.jpg of class i % 6."""
    set_splits("dmlab", mini.three_splits(NUM_TEST))
    files, first = {}, 0
    for split, count in (("train", mini.num_train), ("validation", mini.num_val), ("test", NUM_TEST)):
        records = []
        for i in range(count):
            if first + i not in pictures:
                pictures[first + i] = mini.picture(first + i, (6, 4), "JPEG")
            records.append(framed([record(f"{split}_{i}.jpg".encode(), i % 6, pictures[first + i])], crc32c))
        for shard in range(SHARDS[split]):
            name = f"dmlab-{split}.tfrecord-{shard:05d}-of-{SHARDS[split]:05d}"
            files[name] = b"".join(records[shard :: SHARDS[split]])
        first += count
    return files


def write_tar(path, files):
    path.write_bytes(tar_of({"./._dmlab-train.tfrecord-00000-of-00003": b"AppleDouble", **files}, "w:gz"))


def reader(folder):
    return DmLab(open_store(folder), "dmlab", 1 << 20)


@pytest.mark.slow
def test_frames_keep_their_bytes_and_are_ordered_by_their_names(tmp_path, shards, pictures, mini, prepared):
    write_tar(tmp_path / "dmlab.tar.gz", shards)
    manifest, _, rows = prepared("dmlab", tmp_path)
    first = 0
    for split, named, count in (
        ("train", "train", mini.num_train),
        ("val", "validation", mini.num_val),
        ("test", "test", NUM_TEST),
    ):
        order = tfds_order(named, [f"{named}_{i}.jpg" for i in range(count)])
        assert rows[split] == [(f"{named}/{named}_{i}.jpg", i % 6, pictures[first + i]) for i in order]
        first += count
    assert manifest.num_classes == 6
    (tmp_path / "unpacked").mkdir()
    for name, data in shards.items():
        (tmp_path / "unpacked" / name).write_bytes(data)
    assert prepared("dmlab", tmp_path / "unpacked")[0].digest == manifest.digest


def test_an_unpacked_frame_is_read_by_range(tmp_path, shards):
    for name, data in shards.items():
        (tmp_path / name).write_bytes(data)
    store = open_store(tmp_path)
    (part, *rest) = reader(tmp_path).parts(None)
    assert (part.name, len(rest)) == ("dmlab-test.tfrecord-00000-of-00001", 5)
    for found in reader(tmp_path).images(part, None):
        key, offset, length = found.where
        assert store.read(key, offset, offset + length) == found.data


def test_damage_is_reported_before_any_image_is_read(tmp_path, shards):
    name = "dmlab-validation.tfrecord-00001-of-00002"
    flipped = bytearray(shards[name])
    flipped[500] ^= 1
    for data, message in (
        (
            bytes(flipped),
            rf"dmlab.tar.gz!{name}, record at byte \d+: .*checksum .* does not match. Download the file again",
        ),
        (shards[name][:-3], rf"dmlab.tar.gz!{name}: the record at byte \d+ has .* truncated\. Copy it again"),
        (framed([b""], crc32c), rf"{name}, record at byte 12: the record has no filename"),
        (framed([record(b"\xff.jpg", 1, b"")], crc32c), rf"{name}, record at byte 12: 'utf-8' codec can't decode"),
    ):
        write_tar(tmp_path / "dmlab.tar.gz", shards | {name: data})
        with pytest.raises(ValueError, match=message):
            reader(tmp_path).keys()
    whole = (tmp_path / "dmlab.tar.gz").read_bytes()
    (tmp_path / "dmlab.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"the gzip data is truncated\. Download it again from https"):
        reader(tmp_path).keys()


def test_a_record_without_class_or_image_is_refused_individually(tmp_path):
    records = [record(b"a.jpg", 6, b"x"), record(b"b.jpg", 5, b"x"), record(b"c.jpg", 0, b"")[:-3], b""]
    name = "dmlab-train.tfrecord"
    (tmp_path / name).write_bytes(framed(records, crc32c) + b"cut")
    found = list(reader(tmp_path).images(SourcePart(name=name, where={"key": name}), None))
    assert [(one.key, one.refused and one.refused[0]) for one in found[:2]] == [("a.jpg", "no_label"), ("b.jpg", None)]
    assert [one.refused[0] for one in found[2:]] == ["damaged_archive"] * 3
    assert "ends within a record header" in found[-1].refused[1]


def test_missing_split_and_missing_archive_are_reported(tmp_path, shards, prepared):
    with pytest.raises(
        ValueError, match=r"lacks dmlab.tar.gz, 3,017,022,789 bytes.* The unpacked files dmlab-\*.tfrecord"
    ):
        prepared("dmlab", tmp_path)
    for name, data in shards.items():
        if "train" in name:
            (tmp_path / name).write_bytes(data)
    with pytest.raises(
        ValueError, match=r"has 0 examples of validation, but 250 are expected\. Download its files again"
    ):
        prepared("dmlab", tmp_path)
