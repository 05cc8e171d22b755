"""KITTI: the random draw of drives, classes computed by hand, and unchanged image bytes."""

import io
import zipfile
from collections import Counter

import numpy as np
import pytest

from vitline.data_prep.benchmarks.official_splits import OfficialSplits, Slice
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.benchmarks.vtab.kitti import Kitti, drives_of_images, splits_of_drives
from vitline.infra.storage import open_store

FIELDS = "0.00 0 -1.57 614.24 181.78 727.31 284.77 1.57 1.73 4.15 {x} 1.65 {z} -1.59"
OBJECTS = (
    ([("Car", 8.0), ("Van", 30)], 0),
    ([("Van", 8.01)], 1),
    ([("Truck", 20.0), ("Pedestrian", 2)], 1),
    ([("Car", 20.5), ("DontCare", -1000)], 2),
    ([("Tram", 5), ("Cyclist", 3), ("Misc", 1), ("Person_sitting", 2)], 3),
    ([], 3),
    ([("Car", -3.2)], 0),
)
"""Objects as (type, z) and the class, by the table of VTAB."""
NUM_DRIVES = 30
PICTURES = 50 * NUM_DRIVES
"""Three drives each, 150 images, are drawn for test and for validation."""


def label_text(objects):
    return "".join(f"{kind} {FIELDS.format(x=-x, z=z)}\n" for x, (kind, z) in enumerate(objects))


def devkit():
    """(train_rand.txt, train_mapping.txt, drive of each picture): lines in the order of drives, pictures permuted."""
    drives = [f"2011_09_{26 + i % 4}_drive_{i:04d}_sync" for i in range(NUM_DRIVES)]
    lines = [f"{drive[:10]} {drive} {frame:010d}" for drive in drives for frame in range(50)]
    numbers = np.random.default_rng(1).permutation(PICTURES) + 1
    return ",".join(map(str, numbers)), "\n".join(lines) + "\n", [drives[(n - 1) // 50] for n in numbers]


def write_kitti(folder, mini):
    rand, mapping, drives = devkit()
    with zipfile.ZipFile(folder / "devkit_object.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (
            ("readme.txt", "KITTI"),
            ("mapping/train_rand.txt", rand),
            ("mapping/train_mapping.txt", mapping),
        ):
            archive.writestr(name, text)
    with zipfile.ZipFile(folder / "data_object_label_2.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("training/label_2/", "")
        for i in range(PICTURES):
            archive.writestr(f"training/label_2/{i:06d}.txt", label_text(OBJECTS[i % len(OBJECTS)][0]))
    with zipfile.ZipFile(folder / "data_object_image_2.zip", "w") as archive:
        for i in range(PICTURES):
            archive.writestr(f"training/image_2/{i:06d}.png", mini.picture(i, (9, 3)))
        archive.writestr("testing/image_2/000000.png", mini.picture(0))
    return drives


@pytest.fixture
def kitti(tmp_path, set_splits, mini):
    set_splits(
        "kitti",
        OfficialSplits(train=Slice("train", 0, 1200), val=Slice("validation", 0, 150), test=Slice("test", 0, 150)),
    )
    return tmp_path, write_kitti(tmp_path, mini)


@pytest.fixture(scope="module")
def tfds_splits():
    """TFDS's random draw: (train, validation, test) image numbers of a development kit."""
    module = "tensorflow_datasets.datasets.kitti.kitti_dataset_builder"
    build = pytest.importorskip(module, reason="tensorflow-datasets is not installed")._build_splits

    def splits(rand, mapping):
        files = {"mapping/train_rand.txt": rand, "mapping/train_mapping.txt": mapping}
        return build([(name, io.BytesIO(text.encode())) for name, text in files.items()])

    return splits


@pytest.mark.parametrize("num_drives", [3, 9, 10, 25, 141])
def test_drives_are_drawn_as_in_tfds(tfds_splits, num_drives):
    rng = np.random.default_rng(num_drives)
    numbers = [*range(num_drives), *rng.integers(0, num_drives, 500)]
    lines = [f"2011_09_26 2011_09_26_drive_{rng.integers(10_000):04d}_{i}_sync 0000000000" for i in range(num_drives)]
    rand, mapping = ",".join(f"{n + 1}" for n in numbers), "\n".join(lines)
    drives = drives_of_images(rand, mapping)
    splits = splits_of_drives(drives)
    found = {name: [i for i, drive in enumerate(drives) if splits[drive] == name] for name in set(splits.values())}
    expected = dict(zip(("train", "validation", "test"), map(sorted, tfds_splits(rand, mapping)), strict=True))
    assert found == expected
    drawn = max(1, num_drives // 10)
    assert Counter(splits.values()) == {"train": num_drives - 2 * drawn, "validation": drawn, "test": drawn}


def test_the_draw_does_not_depend_on_the_version_of_numpy():
    """Ten drives: one of them is drawn, and one of the other nine."""
    splits = splits_of_drives([f"drive_{i}" for i in range(10)])
    assert {name for name, split in splits.items() if split != "train"} == {"drive_3", "drive_4"}
    assert (splits["drive_4"], splits["drive_3"]) == ("test", "validation")


@pytest.mark.slow
def test_images_are_split_by_drive_and_labelled_by_the_nearest_vehicle(kitti, prepared, mini):
    folder, drives = kitti
    manifest, _, rows = prepared("kitti_distance", folder)
    splits = splits_of_drives(drives)
    for split, named in (("train", "train"), ("val", "validation"), ("test", "test")):
        numbers = [i for i, drive in enumerate(drives) if splits[drive] == named]
        keys = [f"{i:06d}.png" for i in numbers]
        expected = [(keys[j], numbers[j]) for j in tfds_order(named, keys)]
        assert rows[split] == [(f"{named}/{key}", OBJECTS[i % 7][1], mini.picture(i, (9, 3))) for key, i in expected]
    assert manifest.num_classes == 4
    for name in ("data_object_image_2.zip", "data_object_label_2.zip", "devkit_object.zip"):
        target = folder / "unpacked" / ("devkit_object" if name.startswith("devkit") else "")
        with zipfile.ZipFile(folder / name) as archive:
            archive.extractall(target)
    assert prepared("kitti_distance", folder / "unpacked")[0].digest == manifest.digest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("training/label_2/000003.txt", b" -1.59", b"", r"label_2/000003.txt: line 1 has 14 fields; expected 15"),
        ("training/label_2/000003.txt", b" 20.5 ", b" nan ", "000003.txt: line 1 has distance nan"),
        ("training/label_2/000003.txt", b" 20.5 ", b" near ", "000003.txt: could not convert string to float: 'near'"),
        ("training/label_2/000003.txt", b" 20.5 ", b" -101 ", "000003.txt: -101.0 is not above -100"),
        ("training/label_2/000003.txt", None, None, r"no training/label_2/000003.txt for the image 000003.png"),
        (
            "mapping/train_rand.txt",
            None,
            None,
            r"devkit_object.zip: mapping/train_rand.txt is missing. Download it again",
        ),
        ("mapping/train_rand.txt", b",1500,", b",1501,", r"entry \d+ of train_rand.txt is 1501, which is not a line"),
        ("mapping/train_mapping.txt", b" 2011", b"\xff", "train_mapping.txt is not UTF-8 text"),
    ],
)
def test_invalid_annotations_are_reported(kitti, name, old, new, message):
    path = kitti[0] / ("devkit_object.zip" if name.startswith("mapping") else "data_object_label_2.zip")
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    data = members.pop(name)
    if old is not None:
        assert old in data
        members[name] = data.replace(old, new, 1)
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    with pytest.raises(ValueError, match=message):
        Kitti(open_store(kitti[0]), "kitti_distance", 1 << 20).keys()
