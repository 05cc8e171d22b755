"""CLEVR: images joined with their scenes, and classes computed by hand."""

import json
import zipfile

import numpy as np
import pytest

from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.benchmarks.vtab.clevr import Clevr
from vitline.infra.storage import open_store

NUM_TEST = 30
DEPTHS = (0.5, 8.0, 8.0001, 8.5, 8.6, 9.0, 9.4, 9.5, 10.0, 10.0001, 15.0)
DISTANCES = (0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 5)
"""Classes of DEPTHS, by the table of VTAB: intervals are open below and closed above."""


def scene(name, number):
    """Scene `number` with 3 + number % 8 objects, of which the second to last is the nearest."""
    count = 3 + number % 8
    depths = [20.0 + i for i in range(count)]
    depths[-2] = DEPTHS[number % len(DEPTHS)]
    objects = [
        {"color": "red", "pixel_coords": [0, 240 + i, depth], "3d_coords": [-3.0, 0.1, 0.7], "rotation": 5e-1}
        for i, depth in enumerate(depths)
    ]
    return {
        "split": name[6:-11],
        "image_filename": name,
        "image_index": number,
        "objects": objects,
        "relationships": {},
    }


def write_clevr(path, mini, compression=zipfile.ZIP_STORED, named=True):
    """An archive like the official one. If scenes have image names, the train scenes are not in the order of the images."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("CLEVR_v1.0/", b"")
        archive.writestr("CLEVR_v1.0/LICENSE.txt", "CC BY 4.0")
        for split, count in (("test", 3), ("train", mini.num_train + mini.num_val), ("val", NUM_TEST)):
            scenes = []
            for i in range(count):
                name = f"CLEVR_{split}_{i:06d}.png"
                archive.writestr(f"CLEVR_v1.0/images/{split}/{name}", mini.picture(i, (6, 4)))
                scenes.append(scene(name, i))
            if named:
                scenes.reverse()
            else:
                scenes = [{key: value for key, value in one.items() if key != "image_filename"} for one in scenes]
            content = {"info": {"split": split, "version": "1.0"}, "scenes": scenes}
            archive.writestr(f"CLEVR_v1.0/questions/CLEVR_{split}_questions.json", '{"questions": []}')
            if split != "test":
                archive.writestr(f"CLEVR_v1.0/scenes/CLEVR_{split}_scenes.json", json.dumps(content))


@pytest.fixture(scope="module")
def written():
    return {}


@pytest.fixture
def clevr(tmp_path, set_splits, mini, written):
    set_splits("clevr", mini.train_and_test(NUM_TEST, "validation"))
    if not written:
        write_clevr(tmp_path / "CLEVR_v1.0.zip", mini)
        written["zip"] = (tmp_path / "CLEVR_v1.0.zip").read_bytes()
    (tmp_path / "CLEVR_v1.0.zip").write_bytes(written["zip"])
    return tmp_path


def labels(tmp_path, task, folder=""):
    data = Clevr(open_store(f"{tmp_path}{folder}"), task, 1 << 20)
    return data.labels(), len(data.class_names())


def test_images_are_joined_with_their_scenes(clevr, mini, prepared):
    manifest, _, rows = prepared("clevr_distance", clevr)
    keys = [f"CLEVR_train_{i:06d}.png" for i in range(mini.num_train + mini.num_val)]
    order = tfds_order("train", keys)
    of_numbers = [(f"train/{keys[i]}", DISTANCES[i % 11], mini.picture(i, (6, 4))) for i in order]
    assert rows["trainval"] == of_numbers
    assert rows["train800"] == of_numbers[:800]
    tests = [f"CLEVR_val_{i:06d}.png" for i in range(NUM_TEST)]  # the salt is TFDS's name of the split: validation
    assert [row[0] for row in rows["test"]] == [f"validation/{tests[i]}" for i in tfds_order("validation", tests)]
    assert (manifest.num_classes, manifest.counts.num_accepted) == (6, len(keys) + NUM_TEST)


@pytest.mark.slow
def test_an_unpacked_folder_gives_the_same_images_as_the_archive(clevr, prepared):
    whole, *_ = prepared("clevr_count", clevr)
    with zipfile.ZipFile(clevr / "CLEVR_v1.0.zip") as archive:
        archive.extractall(clevr / "unpacked")
    unpacked, _, rows = prepared("clevr_count", clevr / "unpacked")
    assert unpacked.digest == whole.digest
    assert whole.num_classes == 8
    assert dict((row[0], row[1]) for row in rows["test"])["validation/CLEVR_val_000015.png"] == 7  # of 10 objects


@pytest.mark.parametrize("named", [True, False])
def test_counts_and_distances_with_and_without_names_in_the_scenes(tmp_path, mini, named):
    write_clevr(tmp_path / "CLEVR_v1.0.zip", mini, zipfile.ZIP_DEFLATED, named)
    counts, num_counts = labels(tmp_path, "clevr_count")
    assert list(counts["validation"].values()) == [*range(8), *range(8), *range(8), *range(6)]
    distances, num_distances = labels(tmp_path, "clevr_distance")
    assert list(distances["train"].values())[:22] == [*DISTANCES, *DISTANCES]
    assert list(distances["train"])[:2] == ["CLEVR_train_000000.png", "CLEVR_train_000001.png"]
    assert (num_counts, num_distances) == (8, 6)


def rewritten(path, change):
    """The archive with one member changed, or without it if `change` returns None."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in change(members).items():
            archive.writestr(name, data)


SCENES = "CLEVR_v1.0/scenes/CLEVR_val_scenes.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: None, r"CLEVR_v1.0.zip: scenes/CLEVR_val_scenes.json is missing. Download it again from https"),
        (lambda text: text[:-100], r"CLEVR_val_scenes.json: character .* is not JSON.*Download it again"),
        (lambda text: text.replace(b"val_000003", b"val_000004"), "1 images have more than one scene"),
        (
            lambda text: text.replace(b"val_000003", b"val_009999"),
            r"1 images have no scene, for example CLEVR_val_000003",
        ),
        (
            lambda text: text.replace(b"pixel_coords", b"pixels", 1),
            r"scene 0 is not valid \('pixel_coords'\)",
        ),
        (lambda text: text.replace(b"8.0001", b"NaN", 1), r"scene \d+ is not valid \(depths \[.*nan"),
        (lambda text: text.replace(b'"image_filename"', b'"name"', 2), None),
    ],
)
def test_invalid_scenes_are_reported(clevr, change, message):
    def changed(members):
        text = change(members.pop(SCENES))
        return members | ({SCENES: text} if text is not None else {})

    rewritten(clevr / "CLEVR_v1.0.zip", changed)
    if message is None:  # if some scenes have no name, all are matched by position
        found, _ = labels(clevr, "clevr_distance")
        assert list(found["validation"].values())[:3] == [DISTANCES[i % 11] for i in (29, 28, 27)]
        return
    with pytest.raises(ValueError, match=message):
        labels(clevr, "clevr_distance")


def test_damaged_scene_file_is_detected_even_if_it_is_valid_json(clevr):
    data = (clevr / "CLEVR_v1.0.zip").read_bytes()
    at = data.index(b'"pixel_coords": [0, 240, 20.0]')
    (clevr / "CLEVR_v1.0.zip").write_bytes(data[:at] + data[at:].replace(b"20.0", b"12.0", 1))
    with pytest.raises(ValueError, match=r"scenes.json: size or checksum differ from the directory. Download it again"):
        labels(clevr, "clevr_distance")


def test_a_missing_image_is_an_error(clevr, prepared):
    name = "CLEVR_v1.0/images/train/CLEVR_train_000007.png"
    rewritten(clevr / "CLEVR_v1.0.zip", lambda members: {key: data for key, data in members.items() if key != name})
    with pytest.raises(
        ValueError, match=r"has 1,149 examples of train, but 1,150 are expected\. CLEVR_v1.0.zip has .* bytes"
    ):
        prepared("clevr_count", clevr)


def test_distances_are_compared_in_float32():
    """8.5 + 1e-8 is 8.5 in float32, so it has the class below."""
    assert np.float32(8.5 + 1e-8) == np.float32(8.5)
    data = Clevr(open_store("memory://none"), "clevr_distance", 1)
    objects = [{"pixel_coords": [0, 0, 8.5 + 1e-8]}]
    assert data._scene({"objects": objects}, 0) == (None, 1)
