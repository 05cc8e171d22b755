"""smallNORB's files in their own format, in miniature, written after the description of its authors."""

import gzip
import struct

import numpy as np
import pytest

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.official_splits import OfficialSplits, Slice
from vitline.data_prep.benchmarks.registry import open_data
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.infra.storage import open_store

STEMS = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
NUM_VAL, NUM_TEST = 210, 20


def norb(array):
    """The bytes of an array: magic number, number of axes, at least three lengths, all little-endian."""
    magic = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54}[array.dtype.name]
    lengths = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack("<2i", magic, array.ndim) + struct.pack(f"<{len(lengths)}i", *lengths) + array.tobytes()


def info_of(count):
    """Rows of instance, elevation, azimuth and lighting."""
    rows = np.arange(count, dtype=np.int32)
    return np.stack([rows % 5 + 4, rows % 9, rows % 18 * 2, rows % 6], axis=1)


@pytest.fixture
def smallnorb(tmp_path, set_splits, mini):
    """(folder, pairs of both splits)."""
    cut = Slice("test", 0, NUM_VAL), Slice("test", NUM_VAL, NUM_VAL + NUM_TEST)
    set_splits("smallnorb", OfficialSplits(train=Slice("train", 0, mini.num_train), val=cut[0], test=cut[1]))
    rng, arrays = np.random.default_rng(0), {}
    for split, count in (("train", mini.num_train), ("test", NUM_VAL + NUM_TEST)):
        coarse = rng.integers(0, 256, (count, 2, 12, 12), dtype=np.uint8)
        arrays[split] = coarse.repeat(8, axis=2).repeat(8, axis=3)
        for what, array in (("dat", arrays[split]), ("info", info_of(count))):
            (tmp_path / f"{STEMS[split]}-{what}.mat.gz").write_bytes(gzip.compress(norb(array), 1))
    return tmp_path, arrays


@pytest.mark.slow
def test_left_images_are_used_and_val_is_the_first_half_of_test(smallnorb, prepared, mini):
    folder, arrays = smallnorb
    manifest, _, rows = prepared("smallnorb_azimuth", folder)
    order = [f"test/{key}" for key in tfds_order("test", range(NUM_VAL + NUM_TEST))]
    assert [row[0] for row in rows["val"]] == order[:NUM_VAL]
    assert [row[0] for row in rows["test"]] == order[NUM_VAL:]
    assert [row[0] for row in rows["train"]] == [f"train/{k}" for k in tfds_order("train", range(mini.num_train))]
    every = {row[0]: row for split in ("train", "val", "test") for row in rows[split]}
    # stored are 0, 2, ..., 34: degrees divided by ten
    assert [every[f"train/{i}"][1] for i in (0, 1, 17, 18)] == [0, 1, 17, 0]
    assert every["train/5"][2] == lossless_png(arrays["train"][5, 0])
    assert every["test/9"][2] == lossless_png(arrays["test"][9, 0])
    assert manifest.num_classes == 18
    for path in folder.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    manifest, _, rows = prepared("smallnorb_elevation", folder)
    assert manifest.num_classes == 9
    labels = {row[0]: row[1] for row in rows["train"]}
    assert [labels[f"train/{i}"] for i in (0, 8, 9, 17, 18)] == [0, 8, 0, 8, 0]


def test_class_names_are_degrees():
    names = {
        task: open_data(task, open_store("memory://none"), 1).class_names()
        for task in ("smallnorb_azimuth", "smallnorb_elevation")
    }
    assert (names["smallnorb_azimuth"][1], names["smallnorb_azimuth"][17]) == (
        "azimuth 20 degrees",
        "azimuth 340 degrees",
    )
    assert (names["smallnorb_elevation"][0], names["smallnorb_elevation"][8]) == (
        "elevation 30 degrees",
        "elevation 70 degrees",
    )


def test_other_and_damaged_files_are_refused(smallnorb):
    folder, arrays = smallnorb
    data = open_data("smallnorb_azimuth", open_store(folder), 1 << 20)
    info, dat = (folder / f"{STEMS['test']}-{what}.mat.gz" for what in ("info", "dat"))
    whole, odd = info.read_bytes(), info_of(NUM_VAL + NUM_TEST)
    odd[7, 2] = 3
    for content, message in (
        (gzip.compress(b"MATLAB 5.0 MAT-file" + bytes(200)), "begins with 0x.* which is not valid for smallNORB"),
        (gzip.compress(norb(odd)), "azimuth 3 is odd; smallNORB stores even numbers"),
        (gzip.compress(norb(odd[:, :3])), "expected rows of four int32"),
        (whole[:60], "damaged"),
    ):
        info.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            data.keys()
    info.write_bytes(whole)
    one_camera = np.ascontiguousarray(arrays["test"][:, :1])
    dat.write_bytes(gzip.compress(norb(one_camera), 1))
    with pytest.raises(
        ValueError, match=r"array of shape \(230, 1, 96, 96\) and type uint8; expected \(230, 2, 96, 96\)"
    ):
        list(data.parts(None))
    dat.write_bytes(gzip.compress(norb(arrays["test"])[:-1000], 1))
    _, part = data.parts(None)
    with pytest.raises(ValueError, match="is truncated in row 229 of 230"):
        list(data.images(part, None))
