"""Diabetic retinopathy: splits by usage, and images as TFDS makes them."""

import functools
import io
import sys
import zipfile

import numpy as np
import pytest

from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.benchmarks.vtab import diabetic_retinopathy as module
from vitline.data_prep.benchmarks.vtab.diabetic_retinopathy import (
    DiabeticRetinopathy,
    btgraham,
    eye_radius,
    masked_and_cropped,
)
from vitline.data_prep.decode import ImageRejected, decode
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store

from ....pictures import encoded

NUM_TEST = 30
as_jpeg = functools.partial(encoded, kind="JPEG", quality=92)
cv2 = pytest.importorskip("cv2", reason="the extra vtab is not installed")


def eye(height, width, radius_px, seed=0):
    """A disc of noise on black."""
    rng, (y, x) = np.random.default_rng(seed), np.mgrid[:height, :width]
    pixels = rng.integers(60, 200, (height, width, 3), dtype=np.uint8)
    pixels[(y - height // 2) ** 2 + (x - width // 2) ** 2 > radius_px**2] = 0
    return pixels


@pytest.fixture(scope="module")
def eyes():
    """The files of 600 patients' eyes."""
    return {patient: as_jpeg(eye(16, 20, 8, seed=patient)) for patient in range(10, 610)}


@pytest.fixture
def retinopathy(eyes, tmp_path, set_splits, mini, monkeypatch):
    """Kaggle's files with eyes of radius 10: (folder, levels by split of TFDS and key)."""
    set_splits("diabetic_retinopathy", mini.three_splits(NUM_TEST))
    monkeypatch.setattr(module, "RADIUS_PX", 10)
    names = [f"{n}_{side}" for n in range(10, 610) for side in ("left", "right")]
    levels = {"train": {}, "validation": {}, "test": {}}
    for i, name in enumerate(names[: mini.num_train + mini.num_val + NUM_TEST]):
        split = "train" if i < mini.num_train else "test" if i % 2 and len(levels["test"]) < NUM_TEST else "validation"
        levels[split][name] = i % 5
    usages = {"validation": "Public", "test": "Private"}
    tested = sorted((key, level, usages[split]) for split in usages for key, level in levels[split].items())
    table = "image,level\n" + "".join(f"{key},{level}\n" for key, level in levels["train"].items())
    (tmp_path / "trainLabels.csv").write_text(table)
    table = "image,level,Usage\r\n" + "".join(f"{key},{level},{usage}\r\n" for key, level, usage in tested)
    (tmp_path / "retinopathy_solution.csv").write_bytes(table.encode())
    for folder, keys in (("train", levels["train"]), ("test", [row[0] for row in tested])):
        with zipfile.ZipFile(tmp_path / f"{folder}.zip", "w") as archive:
            for key in keys:
                archive.writestr(f"{folder}/{key}.jpeg", eyes[int(key.split("_")[0])])
    return tmp_path, levels


def reader(folder):
    return DiabeticRetinopathy(open_store(folder), "diabetic_retinopathy", 1 << 20)


@pytest.mark.slow
def test_splits_are_those_of_the_leaderboards_and_images_are_processed(eyes, retinopathy, prepared):
    folder, levels = retinopathy
    manifest, _, rows = prepared("diabetic_retinopathy", folder)
    for split, named in (("train", "train"), ("val", "validation"), ("test", "test")):
        keys = list(levels[named])
        in_order = [keys[i] for i in tfds_order(named, keys)]
        assert [row[:2] for row in rows[split]] == [(f"{named}/{key}", levels[named][key]) for key in in_order]
    name, _, data = rows["val"][0]
    assert data == btgraham(eyes[int(name.split("/")[1].split("_")[0])], 10)
    assert manifest.num_classes == 5
    for name in ("train", "test"):
        with zipfile.ZipFile(folder / f"{name}.zip") as archive:
            archive.extractall(folder)
        (folder / f"{name}.zip").unlink()
    with zipfile.ZipFile(folder / "trainLabels.csv.zip", "w") as archive:
        archive.write(folder / "trainLabels.csv", "trainLabels.csv")
    (folder / "trainLabels.csv").unlink()
    assert prepared("diabetic_retinopathy", folder)[0].digest == manifest.digest


EYES = [
    eye(400, 600, 180),  # wider than high
    eye(301, 333, 140),  # odd sides
    eye(700, 500, 400),  # larger than the picture: cut at its sides
    eye(350, 800, 500),  # cut above and below
    np.zeros((90, 120, 3), np.uint8),  # dark: the height is used instead of the radius
]


@pytest.mark.parametrize("pixels", EYES, ids=range(len(EYES)))
def test_images_equal_those_of_tfds_byte_for_byte(pixels):
    name = "tensorflow_datasets.image_classification.diabetic_retinopathy_detection"
    reference = pytest.importorskip(name, reason="tensorflow-datasets is not installed")
    made = reference._btgraham_processing(io.BytesIO(as_jpeg(pixels)), "an eye", 300, crop_to_radius=True)
    assert btgraham(as_jpeg(pixels), 300) == made.read()


def test_eye_radius_matches_hand_computed_values():
    """The middle row is [0, 9, 90, 90, 90, 90, 90, 1] in red: mean 57.5, above 5.75 are 6 pixels."""
    image = np.zeros((5, 8, 3), np.uint8)
    image[2, :, 0] = (0, 9, 90, 90, 90, 90, 90, 1)
    assert eye_radius(image) == 3.0
    image[2] = 0
    image[:2] = 255
    assert eye_radius(image) == 2.5  # half of the height
    image[2, 4] = 200
    assert eye_radius(image) == 2.5  # one bright pixel gives a radius of half a pixel, which is ignored
    image[2] = 255
    assert eye_radius(image) == 4.0  # a sum of three channels does not overflow


def test_mask_and_crop_match_hand_computed_values():
    image = np.full((9, 12, 3), 200, np.uint8)
    cropped = masked_and_cropped(image, 3)  # centred on x = 6, y = 4
    assert cropped.shape == (6, 6, 3)
    y, x = np.mgrid[-3:3, -3:3]
    far, near = x**2 + y**2 > 3.6**2, x**2 + y**2 < 2.9**2
    assert (cropped[far] == 128).all()
    assert (cropped[near] == 200).all()
    assert masked_and_cropped(image, 100).shape == image.shape


def test_a_uniform_image_becomes_grey_and_differences_are_multiplied_by_four():
    """A uniform image becomes 4 * v - 4 * v + 128. The blur of sigma 10 removes 2 % of a bright spot on grey, so the
    difference is multiplied by four; the JPEG (quality 72) limits exactness."""
    even = decode(btgraham(as_jpeg(np.full((600, 600, 3), 77, np.uint8)), 300))
    assert even.shape == (540, 540, 3)
    assert (abs(even.astype(int) - 128) <= 1).all()
    spot = np.full((600, 600, 3), 100, np.uint8)
    spot[296:304, 296:304] = 120
    made = decode(btgraham(as_jpeg(spot), 300)).astype(int)
    share = 64 / (2 * np.pi * 100)  # of 64 pixels under the Gaussian, near its middle
    expected = 128 + 4 * 20 * (1 - share)
    assert abs(made[268:272, 268:272].mean() - expected) < 6
    assert abs(made[50:100, 50:100].mean() - 128) < 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_an_image"),
        (b"\xff\xd8\xff", "not_an_image"),
        (b"\x89PNG\r\n\x1a\n", "not_an_image"),
        (as_jpeg(np.pad(np.full((2, 2, 3), 255, np.uint8), ((1000, 1000), (1000, 1000), (0, 0)))), "too_many_pixels"),
    ],
)
def test_files_that_are_not_images_of_eyes_are_refused(data, reason):
    with pytest.raises(ImageRejected) as caught:
        btgraham(data, 300)
    assert caught.value.reason == reason


def test_an_image_that_cannot_be_processed_is_refused_with_its_key(retinopathy):
    folder, levels = retinopathy
    key = next(iter(levels["test"]))
    with zipfile.ZipFile(folder / "test.zip", "w") as archive:
        archive.writestr(f"test/{key}.jpeg", b"no picture")
        archive.writestr("test/unlisted_left.jpeg", b"no picture")
    data, work = reader(folder), WorkFolder(open_store(folder), open_store(f"{folder}/work"), 10)
    part = [*data.parts(work)][-1]
    (found,) = data.images(part, work)
    assert (found.split, found.key, found.refused[0]) == ("test", key, "not_an_image")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("image,level", "name,level", "trainLabels.csv: no column image; the columns are"),
        (
            "11_left,2",
            "11_left,5",
            r"line 4 is \['11_left', '5'\], which is not a new image with a level from 0 to 4. Download it again",
        ),
        ("11_left,2", "10_left,2", "line 4 is .*not a new image"),
        ("11_left,2", '"11_left,2', "trainLabels.csv: line .*: unexpected end of data"),
        ("image", "\x00", "no column image"),
    ],
)
def test_invalid_tables_are_reported(retinopathy, old, new, message):
    path = retinopathy[0] / "trainLabels.csv"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        reader(retinopathy[0]).keys()


def test_unknown_usage_is_reported_with_its_line(retinopathy):
    path = retinopathy[0] / "retinopathy_solution.csv"
    path.write_text(path.read_text().replace("Public", "Secret", 1))
    with pytest.raises(ValueError, match=r"retinopathy_solution.csv: line \d+ is .*'Secret'"):
        reader(retinopathy[0]).keys()


def test_errors_for_split_archives_and_missing_opencv_name_the_next_step(tmp_path, retinopathy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ValueError, match=r'pip install "vitline\[vtab\]"'):
        reader(retinopathy[0]).keys()
    (tmp_path / "train.zip").rename(tmp_path / "train.zip.001")
    with pytest.raises(ValueError, match=r"lacks train.zip \(or train/\)\..*cat train.zip.00\* > train.zip"):
        reader(tmp_path).files()
