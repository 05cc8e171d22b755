"""SVHN's two MATLAB files, in miniature, written by scipy."""

import numpy as np
import pytest
import scipy.io

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.registry import open_data
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.infra.storage import open_store

NUM_TEST = 30


def write(path, x, y):
    scipy.io.savemat(path, {"X": x, "y": y}, do_compression=True)


@pytest.fixture
def svhn(tmp_path, set_splits, mini):
    """(folder, X of both files)."""
    set_splits("svhn", mini.train_and_test(NUM_TEST))
    rng, arrays = np.random.default_rng(0), {}
    for split, count in (("train", mini.num_train + mini.num_val), ("test", NUM_TEST)):
        arrays[split] = rng.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
        write(tmp_path / f"{split}_32x32.mat", arrays[split], np.arange(count, dtype=np.uint8)[:, None] % 10 + 1)
    return tmp_path, arrays


@pytest.mark.slow
def test_images_are_the_last_axis_and_ten_is_the_digit_zero(svhn, prepared, mini):
    folder, arrays = svhn
    manifest, _, rows = prepared("svhn", folder)
    order = tfds_order("train", range(mini.num_train + mini.num_val))
    assert [row[0] for row in rows["trainval"]] == [f"train/{key}" for key in order]
    every = {row[0]: row for split in ("train", "val", "test") for row in rows[split]}
    # y of picture 0 is 1, of picture 8 it is 9, of picture 9 it is 10.
    assert [every[f"train/{i}"][1] for i in (0, 8, 9, 10, 19)] == [1, 9, 0, 1, 0]
    assert every["train/77"][2] == lossless_png(np.ascontiguousarray(arrays["train"][:, :, :, 77]))
    assert every["test/29"][1:] == (0, lossless_png(np.ascontiguousarray(arrays["test"][:, :, :, 29])))
    assert manifest.num_classes == 10


def test_files_that_are_not_svhn_are_refused(svhn):
    folder, _ = svhn
    data = open_data("svhn", open_store(folder), 1 << 20)
    path = folder / "test_32x32.mat"
    whole, pixels = path.read_bytes(), np.zeros((32, 32, 3, 4), np.uint8)
    for content, message in (
        ((pixels, [1, 2, 3, 11]), "label 11 is outside of 1 to 10"),
        ((pixels, [0, 2, 3, 4]), "label 0 is outside of 1 to 10"),
        ((pixels, [1, 2, 3]), "do not have one image of 32 x 32 x 3 per label"),
        ((pixels.astype(float), [1, 2, 3, 4]), "no array X of uint8"),
        (whole[:-100], "damaged MATLAB file"),
        (b"\x89HDF" + bytes(200), "not a MATLAB 5 file"),
    ):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write(path, content[0], np.array(content[1])[:, None])
        with pytest.raises(ValueError, match=rf"test_32x32.mat: .*{message}.*housenumbers"):
            data.keys()
    path.unlink()
    with pytest.raises(ValueError, match=r"lacks test_32x32\.mat, 64,275,384 bytes"):
        data.keys()
