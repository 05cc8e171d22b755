"""dSprites as .npz and .hdf5, in miniature, with the pickled member that the original has."""

import sys
import zipfile

import h5py
import numpy as np
import pytest

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.registry import open_data
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.benchmarks.vtab import dsprites
from vitline.data_prep.sources.arrays import paired_arrays
from vitline.infra.storage import open_store

STEM = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64"
TOTAL = 1280


class Trap:
    """Fails the test if it is unpickled."""

    def __reduce__(self):
        return exec, ("raise AssertionError('the metadata was read')",)


def arrays(total=TOTAL):
    """Rows of the official order: y runs fastest, then x, then the orientation."""
    rows = np.arange(total)
    classes = np.stack([rows * 0, rows * 0, rows * 0, rows // 1024 * 3 % 40, rows // 32 % 32, rows % 32], axis=1)
    images = np.random.default_rng(0).integers(0, 2, (total, 64, 64), dtype=np.uint8)
    return images, classes.astype(np.int64)


def write_npz(folder, images, classes):
    metadata = np.array(Trap(), dtype=object)
    np.savez_compressed(folder / f"{STEM}.npz", metadata=metadata, imgs=images, latents_classes=classes)


def write_hdf5(folder, images, classes, chunks=(90, 16, 64)):
    with h5py.File(folder / f"{STEM}.hdf5", "w") as file:
        file.create_dataset("imgs", data=images, chunks=chunks, compression="gzip", compression_opts=1)
        file.create_dataset("latents/classes", data=classes)


def every(rows):
    return {row[0]: row for split in ("train", "val", "test") for row in rows[split]}


def data_of(folder, task="dsprites_location"):
    return open_data(task, open_store(folder), 1 << 20)


@pytest.mark.slow
def test_npz_and_hdf5_give_the_same_rows_from_any_start(tmp_path, set_splits, mini, prepared, monkeypatch):
    set_splits("dsprites", mini.one_split(TOTAL))
    monkeypatch.setattr(dsprites, "_ROWS_PER_PART", 500)
    monkeypatch.setattr(paired_arrays, "READ_BYTES", 70 * 64 * 64)
    images, classes = arrays()
    (tmp_path / "npz").mkdir()
    (tmp_path / "hdf5").mkdir()
    write_npz(tmp_path / "npz", images, classes)
    write_hdf5(tmp_path / "hdf5", images, classes)
    manifest, _, rows = prepared("dsprites_location", tmp_path / "npz")
    assert [row[0] for row in rows["trainval"]] == [f"train/{k}" for k in tfds_order("train", range(TOTAL))][:1150]
    found = every(rows)
    assert len(found) == TOTAL
    # x is 0, 1, 2, 31 and, in the next orientation, 0 and 7
    assert [found[f"train/{i}"][1] for i in (31, 32, 64, 1023, 1024, 1024 + 7 * 32)] == [0, 0, 1, 15, 0, 3]
    for row in (0, 499, 500, 1279):
        assert found[f"train/{row}"][2] == lossless_png(images[row] * 255)
    assert manifest.num_classes == 16
    assert prepared("dsprites_location", tmp_path / "hdf5")[0].digest == manifest.digest
    assert [part.num_examples for part in data_of(tmp_path / "npz").parts(None)] == [500, 500, 280]
    assert [part.num_examples for part in data_of(tmp_path / "hdf5").parts(None)] == [540, 540, 200]


def test_classes_alternate_between_three_and_two_orientations(tmp_path):
    images, classes = arrays(40)
    classes[:, 3] = np.arange(40)
    write_npz(tmp_path, images, classes)
    data = data_of(tmp_path, "dsprites_orientation")
    labels = [found.label for part in data.parts(None) for found in data.images(part, None)]
    assert labels[:8] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert labels[-2:] == [15, 15]
    assert data.class_names()[:2] == ["orientation 0 to 2 of 40", "orientation 3 to 4 of 40"]
    assert data_of(tmp_path).class_names()[15] == "horizontal position 30 to 31 of 32"


@pytest.mark.parametrize("write", [write_npz, write_hdf5])
def test_files_that_are_not_dsprites_are_refused(tmp_path, write):
    images, classes = arrays(100)
    data = data_of(tmp_path)
    with pytest.raises(ValueError, match=rf"lacks {STEM}.hdf5, 28,024,106 bytes \(or {STEM}.npz\)"):
        data.keys()
    write(tmp_path, images, classes[:99])
    with pytest.raises(ValueError, match="has 100 images, but classes for 99"):
        data.keys()
    write(tmp_path, images.astype(np.uint16), classes)
    with pytest.raises(
        ValueError, match=r"imgs is an array of shape \(100, 64, 64\) and type uint16; expected rows of \(64, 64\)"
    ):
        data.keys()
    write(tmp_path, images, np.where(classes == 3, 32, classes))
    with pytest.raises(ValueError, match="horizontal position 32 is outside of 0 to 31"):
        data.keys()
    images[50, 3, 3] = 255
    write(tmp_path, images, classes)
    (part,) = data.parts(None)
    with pytest.raises(ValueError, match="a pixel has value 255; expected 0 and 1"):
        list(data.images(part, None))


def test_the_last_part_verifies_the_checksum_of_the_npz(tmp_path):
    images, classes = arrays(100)
    write_npz(tmp_path, images, classes)
    path = tmp_path / f"{STEM}.npz"
    with zipfile.ZipFile(path) as archive:
        checksum = archive.getinfo("imgs.npy").CRC.to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(checksum, bytes(4)))
    (part,) = data_of(tmp_path).parts(None)
    with pytest.raises(ValueError, match="Bad CRC-32"):
        list(data_of(tmp_path).images(part, None))


def test_hdf5_with_arrays_in_other_files_or_damage_is_refused(tmp_path, monkeypatch):
    images, classes = arrays(60)
    other, path = tmp_path / "other", tmp_path / f"{STEM}.hdf5"
    other.mkdir()
    write_hdf5(other, images, classes, chunks=(10, 64, 64))
    with h5py.File(path, "w") as file:
        file["imgs"] = h5py.ExternalLink(str(other / path.name), "imgs")
        file["latents/classes"] = classes
    with pytest.raises(ValueError, match="does not contain the array imgs itself"):
        data_of(tmp_path).keys()
    with h5py.File(path, "w") as file:
        outside = [(str(other / path.name), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("imgs", (60, 64, 64), np.uint8, external=outside)
        file["latents/classes"] = classes
    with pytest.raises(ValueError, match="imgs is not an array, or is stored in other files"):
        data_of(tmp_path).keys()
    path.write_bytes((other / path.name).read_bytes()[:4000])
    with pytest.raises(ValueError, match=rf"{path.name} is damaged"):
        data_of(tmp_path).keys()
    write_hdf5(tmp_path, images, classes, chunks=(10, 64, 64))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r'pip install "vitline\[vtab\]"'):
        data_of(tmp_path).keys()
