"""PatchCamelyon's six HDF5 files in miniature, compressed and decompressed."""

import gzip
import io

import h5py
import numpy as np
import pytest

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.registry import open_data
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import StoreFailed, open_store
from vitline.infra.stores.file_store import FileStore

NUM_TEST = 20


def hdf5(name, array, **options):
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        opened.create_dataset(name, data=array, **options)
    return file.getvalue()


def path_of(folder, split, what, packed=True):
    return folder / f"camelyonpatch_level_2_split_{split}_{what}.h5{'.gz' if packed else ''}"


def pixels_of(count, seed):
    """Images that differ and compress well."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8).repeat(16, axis=1).repeat(16, axis=2)


def write(folder, split, pixels, labels):
    path_of(folder, split, "x").write_bytes(gzip.compress(hdf5("x", pixels), 1))
    path_of(folder, split, "y").write_bytes(gzip.compress(hdf5("y", labels.reshape(-1, 1, 1, 1)), 1))


@pytest.fixture
def pcam(tmp_path, set_splits, mini):
    """(folder, pictures by the names of the files)."""
    set_splits("patch_camelyon", mini.three_splits(NUM_TEST))
    pixels = {}
    for split, count in (("train", mini.num_train), ("valid", mini.num_val), ("test", NUM_TEST)):
        pixels[split] = pixels_of(count, count)
        write(tmp_path, split, pixels[split], np.arange(count, dtype=np.uint8) // 3 % 2)
    return tmp_path, pixels


def small(folder):
    """Files of 40 images per split."""
    for split in ("train", "valid", "test"):
        write(folder, split, pixels_of(40, 1), np.arange(40, dtype=np.uint8) % 2)
    return open_data("patch_camelyon", open_store(folder), 1 << 20)


def place_of(folder, examples_per_part=512):
    return WorkFolder(open_store(folder / "root"), open_store(folder / "work"), examples_per_part)


@pytest.mark.slow
def test_keys_use_the_word_valid_and_the_order_uses_validation(pcam, prepared, mini):
    folder, pixels = pcam
    manifest, corpus, rows = prepared("patch_camelyon", folder)
    for split, name, tfds, count in (
        ("train", "train", "train", mini.num_train),
        ("val", "valid", "validation", mini.num_val),
        ("test", "test", "test", NUM_TEST),
    ):
        keys = [f"{name}_{i}" for i in range(count)]
        assert [row[0] for row in rows[split]] == [f"{tfds}/{keys[i]}" for i in tfds_order(tfds, keys)]
        found = {row[0]: row for row in rows[split]}
        for i, label in ((0, 0), (3, 1), (5, 1), (19, 0)):
            assert found[f"{tfds}/{name}_{i}"][1:] == (label, lossless_png(pixels[name][i]))
    assert manifest.num_classes == 2
    assert not [key for key in corpus.list() if "unpacked" in key]
    for path in folder.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert prepared("patch_camelyon", folder)[0].digest == manifest.digest


def test_a_compressed_file_is_decompressed_once_per_part_and_removed(tmp_path):
    data, work = small(tmp_path), place_of(tmp_path)
    parts = list(data.parts(work))
    assert [(part.name, part.num_examples) for part in parts] == [
        ("train-000000", 40),
        ("validation-000000", 40),
        ("test-000000", 40),
    ]
    assert not work.store.list()
    begun = data.images(parts[0], work)
    next(begun)
    begun.close()
    (copy,) = work.store.list()  # left by a worker that was stopped
    assert copy.startswith("spill/")
    path_of(tmp_path, "train", "x").write_bytes(b"not read again")
    assert len(list(data.images(parts[0], work))) == 40
    assert not work.store.list()


def test_parts_of_an_unpacked_file_begin_at_chunk_boundaries(tmp_path):
    data, pixels = small(tmp_path), pixels_of(40, 7)
    for split in ("train", "valid", "test"):
        path_of(tmp_path, split, "x").unlink()
        path_of(tmp_path, split, "x", packed=False).write_bytes(hdf5("x", pixels, chunks=(8, 48, 96, 3)))
    parts = [part for part in data.parts(place_of(tmp_path, 10)) if part.where["split"] == "train"]
    assert [part.num_examples for part in parts] == [16, 16, 8]
    found = {each.key: each.data for part in parts for each in data.images(part, place_of(tmp_path))}
    assert found == {f"train_{i}": lossless_png(pixels[i]) for i in range(40)}


def test_files_that_are_not_patch_camelyon_are_refused(tmp_path):
    data, work = small(tmp_path), place_of(tmp_path)
    labels = path_of(tmp_path, "valid", "y")
    for content, message in (
        (gzip.compress(hdf5("y", np.full((40, 1, 1, 1), 2))), r"labels \[2\]; expected 0 and 1"),
        (gzip.compress(hdf5("y", np.zeros((40, 2)))), "expected rows of whole numbers"),
        (gzip.compress(hdf5("z", np.zeros((40, 1)))), "does not contain the array y itself"),
        (gzip.compress(b"no HDF5"), "is damaged"),
        (b"no gzip", "is damaged"),
    ):
        labels.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            data.keys()
    small(tmp_path)
    path_of(tmp_path, "train", "x").write_bytes(gzip.compress(hdf5("x", pixels_of(39, 1)), 1))
    packed = path_of(tmp_path, "valid", "x")
    packed.write_bytes(packed.read_bytes()[:-3000])
    train, valid, _ = data.parts(work)
    with pytest.raises(ValueError, match=r"of shape \(39, 96, 96, 3\) and type uint8; expected \(40, 96, 96, 3\)"):
        list(data.images(train, work))
    with pytest.raises(ValueError, match="is damaged: Compressed file ended"):
        list(data.images(valid, work))
    assert not [key for key in work.store.list() if "valid" in key]


def test_errors_of_the_store_are_not_reported_as_damage(tmp_path, monkeypatch):
    data, work = small(tmp_path), place_of(tmp_path)
    (part, *_) = data.parts(work)
    next(data.images(part, work))  # the file is unpacked now

    class Failing(io.RawIOBase):
        def __init__(self, file):
            self.file = file

        def readable(self):
            return True

        def seekable(self):
            return True

        def seek(self, *where):
            return self.file.seek(*where)

        def tell(self):
            return self.file.tell()

        def readinto(self, buffer):
            raise StoreFailed("the service is away")

    opening = FileStore.open
    monkeypatch.setattr(
        FileStore, "open", lambda store, key: Failing(opening(store, key)) if "unpacked" in key else opening(store, key)
    )
    with pytest.raises(StoreFailed, match="the service is away"):
        list(data.images(part, work))
