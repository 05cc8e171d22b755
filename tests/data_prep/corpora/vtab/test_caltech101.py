"""Caltech-101: splits that are found by comparing the archive with the published images."""

import io
import zipfile

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from vitline.data_prep.benchmarks.tfds_order import tfds_order

from ....tars import tar_of

NUM_TEST = 40
NAMES = ("accordion", "background_google", "faces")


def write_archive(folder, pictures, method=zipfile.ZIP_DEFLATED):
    members = {f"101_ObjectCategories/{key}": data for key, data in pictures.items()}
    members["101_ObjectCategories/BACKGROUND_Google/tmp"] = b"no picture"
    with zipfile.ZipFile(folder / "caltech-101.zip", "w", method) as archive:
        archive.writestr("__MACOSX/caltech-101/._101_ObjectCategories.tar.gz", b"Mac")
        archive.writestr("caltech-101/101_ObjectCategories.tar.gz", tar_of(members, "w:gz"))
        archive.writestr("caltech-101/Annotations.tar", b"boxes")


def webp(data, lossless=True):
    """As on the Hub: made from the pixels that TensorFlow decodes."""
    file = io.BytesIO()
    Image.fromarray(simplejpeg.decode_jpeg(data, "RGB", fastdct=True)).save(file, "webp", lossless=lossless)
    return file.getvalue()


def write_published(folder, split, pictures, encode=webp):
    (folder / split).mkdir(exist_ok=True)
    items = [*pictures.items()]
    for number, part in enumerate((items[:500], items[500:])):
        members = {}
        for i, (key, data) in enumerate(part):
            members[f"s{500 * number + i:07d}.webp"] = encode(data)
            members[f"s{500 * number + i:07d}.cls"] = str(NAMES.index(key.split("/")[0].lower())).encode()
        (folder / split / f"{number}.tar").write_bytes(tar_of(members))
    (folder / split / "nshards.txt").write_text("2")


@pytest.fixture
def caltech(tmp_path, set_splits, mini):
    """(folder, pictures by key, trainval in TFDS's order, keys of test). Two pairs of equal pictures: of two classes in
    train and test, and of one class in train and val."""
    set_splits("caltech101", mini.train_and_test(NUM_TEST))
    folders = ("Faces", "BACKGROUND_Google", "accordion")
    total = mini.num_train + mini.num_val + NUM_TEST
    keys = [f"{folders[i % 3]}/image_{i:04d}.jpg" for i in range(total)]
    pictures = {}
    for i, key in enumerate(keys):
        smooth = np.random.default_rng(i).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(smooth).resize((32, 24), Image.Resampling.BICUBIC).save(file, "JPEG", quality=80)
        pictures[key] = file.getvalue()
    test = keys[::30][:NUM_TEST]
    rest = [key for key in keys if key not in test]
    order = [rest[i] for i in tfds_order("train", rest)]
    pictures[next(key for key in order if key[0] == "a")] = pictures[next(key for key in test if key[0] == "F")]
    pictures[order[-1]] = pictures[next(key for key in order if key[0] == order[-1][0])]
    write_archive(tmp_path, pictures)
    write_published(tmp_path, "train", {key: pictures[key] for key in order[: mini.num_train]})
    write_published(tmp_path, "test", {key: pictures[key] for key in test})
    return tmp_path, pictures, order, test


@pytest.mark.slow
def test_unpublished_images_are_val_and_the_archive_gives_keys_and_bytes(caltech, prepared, mini):
    folder, pictures, order, test = caltech
    manifest, _, rows = prepared("caltech101", folder)
    ids = [f"train/{key}" for key in order]
    assert [row[0] for row in rows["train"]] == ids[: mini.num_train]
    assert [row[0] for row in rows["val"]] == ids[mini.num_train :]
    assert {row[0] for row in rows["test"]} == {f"test/{key}" for key in test}
    for example_id, label, data in (*rows["train"], *rows["val"], *rows["test"]):
        key = example_id.partition("/")[2]
        assert (NAMES[label], data) == (key.split("/")[0].lower(), pictures[key])
    assert manifest.num_classes == 3
    (folder / "caltech-101.zip").unlink()
    for key, data in pictures.items():
        path = folder / "101_ObjectCategories" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    unpacked, *_ = prepared("caltech101", folder)
    assert unpacked.digest == manifest.digest


def test_the_archive_alone_is_refused_with_both_alternatives(caltech, prepared):
    folder, *_ = caltech
    for tar in [*folder.glob("t*/*")]:
        tar.unlink()
    with pytest.raises(
        ValueError, match=r"lacks train/ .*; test/ .*wds_vtab-caltech101.*prepared by TensorFlow Datasets"
    ):
        prepared("caltech101", folder)


@pytest.mark.slow
def test_other_images_or_another_order_are_refused(caltech, prepared, mini):
    folder, pictures, order, test = caltech
    write_archive(folder, pictures, zipfile.ZIP_STORED)
    write_published(folder, "test", {key: pictures[key] for key in test}, lambda data: webp(data, lossless=False))
    with pytest.raises(
        ValueError, match=r"40 of the images in train/ and test/ .* no counterpart .* in caltech-101\.zip"
    ):
        prepared("caltech101", folder)
    write_published(folder, "test", {key: pictures[key] for key in test[1:]})
    with pytest.raises(ValueError, match=r"/test has 39 images, but 40 are expected"):
        prepared("caltech101", folder)
    write_published(folder, "test", {key: pictures[key] for key in test})
    wrong = [*order[1 : mini.num_train], order[mini.num_train + 1]]
    write_published(folder, "train", {key: pictures[key] for key in wrong})
    with pytest.raises(ValueError, match=r"2 images contradict the order of TensorFlow Datasets"):
        prepared("caltech101", folder)


@pytest.mark.slow
def test_incomplete_or_damaged_archive_is_reported_with_its_name(caltech, prepared):
    folder, *_ = caltech
    whole = (folder / "caltech-101.zip").read_bytes()
    with zipfile.ZipFile(folder / "caltech-101.zip", "w") as archive:
        archive.writestr("caltech-101/other.txt", b"")
    with pytest.raises(
        ValueError, match=r"caltech-101\.zip!caltech-101/101_ObjectCategories\.tar\.gz.*is not in the zip"
    ):
        prepared("caltech101", folder)
    middle = len(whole) // 2
    (folder / "caltech-101.zip").write_bytes(whole[:middle] + bytes(100) + whole[middle + 100 :])
    with pytest.raises(
        ValueError, match=r"caltech-101\.zip.* at byte .*Download it again from https://data\.caltech\.edu"
    ):
        prepared("caltech101", folder)
