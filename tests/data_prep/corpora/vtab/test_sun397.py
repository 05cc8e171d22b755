"""SUN397: VTAB's own lists, and the images as TFDS stores them."""

import builtins
import io

import numpy as np
import pytest
from PIL import Image

from vitline.data_prep.benchmarks.official_splits import OFFICIAL_SPLITS
from vitline.data_prep.benchmarks.registry import open_data
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.benchmarks.vtab import sun397
from vitline.infra.storage import open_store

from ....tars import tar_of

NUM_TEST = 30


def plain(colour, size, kind):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def decoded(data):
    with Image.open(io.BytesIO(data)) as image:
        return image.format, image.quantization[0][0], np.asarray(image.convert("RGB")).astype(int)


@pytest.fixture
def sun(tmp_path, set_splits, mini):
    """900 + 250 + 30 listed images of three classes and an unlisted one: (folder, keys of each split)."""
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    set_splits("sun397", mini.three_splits(NUM_TEST))
    folders = ["/a/abbey", "/a/apartment_building/outdoor", "/z/zen_garden"]
    total = mini.num_train + mini.num_val + NUM_TEST
    keys = [f"{folders[i % 3]}/sun_{i:016d}.jpg" for i in range(total)]
    pictures = {
        f"SUN397{key}": mini.picture(i, kind=("JPEG", "PNG", "BMP", "GIF")[i % 4])
        for i, key in enumerate([*keys, "/a/abbey/sun_unlisted.jpg"])
    }
    (tmp_path / "SUN397.tar.gz").write_bytes(tar_of(pictures, "w:gz"))
    cut = mini.num_train, mini.num_train + mini.num_val
    splits = {"tr": keys[: cut[0]], "va": keys[cut[0] : cut[1]], "te": keys[cut[1] :]}
    for name, part in splits.items():
        (tmp_path / f"sun397_tfds_{name}.txt").write_text("".join(f"{key}\n" for key in part))
    (tmp_path / "sun397_labels.txt").write_text("".join(f"{folder}\n" for folder in folders))
    return tmp_path, splits


@pytest.mark.slow
def test_images_are_listed_labelled_by_folder_and_stored_as_jpeg(sun, prepared):
    folder, splits = sun
    manifest, _, rows = prepared("sun397", folder)
    for name, split, salt in (("tr", "train", "train"), ("va", "val", "validation"), ("te", "test", "test")):
        keys = splits[name]
        assert [row[0] for row in rows[split]] == [f"{salt}/{keys[i]}" for i in tfds_order(salt, keys)]
    every = {row[0]: row for row in rows["train"]}
    assert every["train//a/apartment_building/outdoor/sun_0000000000000001.jpg"][1] == 1
    assert {decoded(row[2])[0] for row in rows["test"]} == {"JPEG"}
    assert manifest.num_classes == 3
    assert [*open_data("sun397", open_store(folder), 1 << 20).class_names()] == [
        "abbey",
        "apartment_building/outdoor",
        "zen_garden",
    ]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF"])
def test_large_images_have_at_most_120_000_pixels_and_keep_their_colours(kind):
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    large = decoded(sun397.as_tfds_stores(plain((200, 30, 10), (600, 400), kind)))
    assert large[0] == "JPEG"
    assert large[1] == 2  # the value at quality 95; at quality 72 it is 9
    assert large[2].shape == (283, 424, 3)  # 400 and 600 times the square root of 1/2
    assert np.abs(large[2] - (200, 30, 10)).max() <= 6
    assert decoded(sun397.as_tfds_stores(plain((0, 0, 255), (400, 300), kind)))[2].shape == (300, 400, 3)


def test_scaling_is_bilinear_without_smoothing():
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    stripes = np.zeros((800, 600, 3), np.uint8)  # 480,000 pixels: halved, so a row comes of rows 2r and 2r + 1
    stripes[::4] = 240
    file = io.BytesIO()
    Image.fromarray(stripes).save(file, "PNG")
    pixels = decoded(sun397.as_tfds_stores(file.getvalue()))[2]
    assert pixels.shape == (400, 300, 3)
    assert abs(pixels[100:300:2].mean() - 120) < 3
    assert abs(pixels[101:300:2].mean()) < 3


def test_lists_come_from_an_installed_tfds_if_the_archive_has_none(tmp_path, monkeypatch):
    (tmp_path / "SUN397.tar.gz").write_bytes(b"")
    data = open_data("sun397", open_store(tmp_path), 1 << 20)
    if sun397._installed_lists():
        keys = data.keys()
        assert {split: len(keys[split]) for split in keys} == OFFICIAL_SPLITS["sun397"].sizes
        assert "/t/track/outdoor/sun_aophkoiosslinihb.jpg" in keys["train"]
        assert len(data.class_names()) == 397
        assert data.files()["sun397_tfds_tr.txt"].size == 3_070_803
    monkeypatch.setattr(sun397, "_installed_lists", lambda: None)
    with pytest.raises(ValueError, match=r"lacks sun397_tfds_tr\.txt, .*tensorflow_datasets/image_classification"):
        open_data("sun397", open_store(tmp_path), 1 << 20).files()


def test_undecodable_files_are_refused_and_missing_opencv_is_reported(sun, prepared, monkeypatch):
    folder, _ = sun
    with pytest.raises(ValueError, match="not_an_image"):
        sun397.as_tfds_stores(b"<html>" * 100)
    (folder / "sun397_tfds_te.txt").write_text("/m/mars/sun_1.jpg\n")
    with pytest.raises(ValueError, match=r"sun397_tfds_te\.txt has '/m/mars/sun_1\.jpg', whose folder is not in"):
        prepared("sun397", folder)
    real = builtins.__import__

    def without_opencv(name, *args, **kwargs):
        if name == "cv2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_opencv)
    with pytest.raises(ValueError, match=r'pip install "vitline\[vtab\]"'):
        sun397.as_tfds_stores(plain((0, 0, 0), (8, 8), "PNG"))
