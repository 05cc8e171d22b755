"""Test sets of ImageNet's classes that were made to be hard: A, R, Sketch, C and ObjectNet."""

import io
import json
import zipfile

import numpy as np
import pytest
from PIL import Image

from vitline.data_prep.benchmarks.transfer.transfer_splits import CORRUPTIONS, TEST_SETS
from vitline.data_prep.shard_format import load_classes
from vitline.vit.evaluation.reference.corruption_errors import severity_of

from .... import pictures
from .conftest import NUMBERS, WNIDS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for task in TEST_SETS:
        monkeypatch.setitem(TEST_SETS, task, 6)


def wnids_of(corpus):
    return [entry["source_id"] for entry in load_classes(corpus)]


def test_a_and_r_have_the_classes_of_their_folders(imagenet, prepared, ilsvrc, noise):
    some = (WNIDS[7], WNIDS[2])
    for task in ("imagenet-a", "imagenet-r"):
        paths = [f"{task}/{wnid}/{i}.jpg" for wnid in some for i in range(3)]
        files = {path: noise(7, number) for number, path in enumerate(paths)}
        (imagenet / f"{task}.tar").write_bytes(ilsvrc.tar_of(files | {f"{task}/README.txt": b"text"}))
        manifest, corpus, rows = prepared(task, imagenet)
        assert wnids_of(corpus) == sorted(some)
        assert {row[0]: row[1:] for row in rows["test"]} == {
            f"test/{wnid}_{i}.jpg": (sorted(some).index(wnid), files[f"{task}/{wnid}/{i}.jpg"])
            for wnid in some
            for i in range(3)
        }
        assert set(manifest.splits) == {"test"}


def test_sketch_has_all_classes_and_is_read_from_its_zip(imagenet, prepared, noise):
    with zipfile.ZipFile(imagenet / "ImageNet-Sketch.zip", "w") as archive:
        for i in range(6):
            archive.writestr(f"sketch/{WNIDS[i]}/sketch_{i}.JPEG", noise(9, i))
    _, corpus, rows = prepared("imagenet-sketch", imagenet)
    assert wnids_of(corpus) == WNIDS
    assert {row[0]: row[1] for row in rows["test"]} == {f"test/{WNIDS[i]}_sketch_{i}.JPEG": i for i in range(6)}


def test_c_has_a_corpus_for_each_corruption_with_all_severities(imagenet, prepared, ilsvrc, noise):
    assert len(CORRUPTIONS) == 15
    files = {
        f"{corruption}/{severity}/{WNIDS[severity]}/ILSVRC2012_val_{i:08d}.JPEG": noise(10, severity, i)
        for corruption in ("shot_noise", "gaussian_noise")
        for severity, i in [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (5, 2)]
    }
    (imagenet / "noise.tar").write_bytes(ilsvrc.tar_of(files))
    _, corpus, rows = prepared("imagenet-c-shot-noise", imagenet)
    assert wnids_of(corpus) == WNIDS
    assert {row[0]: row[1] for row in rows["test"]} == {
        f"test/{path.partition('/')[2].replace('/', '_')}": int(path.split("/")[1])
        for path in files
        if path.startswith("shot_noise")
    }
    assert all(severity_of(example_id) == label for example_id, label, *_ in rows["test"])
    with pytest.raises(ValueError, match=r"ImageNet-C, weather: .* lacks weather\.tar .*zenodo"):
        prepared("imagenet-c-frost", imagenet)


def test_a_folder_that_is_no_class_is_refused(imagenet, prepared, ilsvrc, noise):
    (imagenet / "imagenet-a.tar").write_bytes(ilsvrc.tar_of({"imagenet-a/n00000001/a.jpg": noise(1)}))
    with pytest.raises(
        ValueError, match=r"test/n00000001_a\.jpg: no_label \(folder n00000001 is none of the 12 classes\)"
    ):
        prepared("imagenet-a", imagenet)


@pytest.fixture
def objectnet(imagenet):
    """ObjectNet beside ImageNet: a chair is of two classes, a pen of one, and a rake of none; the border of all images is red."""
    names = {wnid: f"class {NUMBERS[wnid]}, of its own" for wnid in WNIDS}
    folder = imagenet / "objectnet-1.0"
    (folder / "mappings").mkdir(parents=True)
    labels = {"chair": "Chair", "pen_1": "Pen (1)", "rake": "Rake"}
    classes = {"Chair": f"{names[WNIDS[5]]}; {names[WNIDS[3]]}", "Pen (1)": names[WNIDS[0]]}
    (folder / "mappings/folder_to_objectnet_label.json").write_text(json.dumps(labels))
    (folder / "mappings/objectnet_to_imagenet_1k.json").write_text(json.dumps(classes))
    for number, kind in enumerate(("chair", "pen_1", "rake")):
        (folder / "images" / kind).mkdir(parents=True)
        for i in range(3):
            pixels = np.full((9, 12, 3), (255, 0, 0), np.uint8)
            pixels[2:-2, 2:-2] = np.random.default_rng((number, i)).integers(0, 256, (5, 8, 3))
            (folder / "images" / kind / f"{i}.png").write_bytes(pictures.encoded(pixels))
    return folder


def test_objectnet_has_the_classes_that_are_imagenets_and_no_border(objectnet, imagenet, prepared):
    manifest, corpus, rows = prepared("objectnet", imagenet)
    assert wnids_of(corpus) == [WNIDS[0], WNIDS[3], WNIDS[5]]
    assert not manifest.single_label
    found = {row[0]: sorted(row[1]) for row in rows["test"]}
    assert found == {f"test/chair_{i}.png": [1, 2] for i in range(3)} | {f"test/pen_1_{i}.png": [0] for i in range(3)}
    image = next(row[2] for row in rows["test"] if row[0] == "test/pen_1_2.png")
    expected = np.random.default_rng((1, 2)).integers(0, 256, (5, 8, 3))
    assert (np.asarray(Image.open(io.BytesIO(image))) == expected).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"Chair": "a throne"}', "'a throne' is no class of ImageNet"),
        ("[]", "it is no table of names"),
        ("{", "Expecting"),
    ],
)
def test_mappings_of_objectnet_that_cannot_be_used_are_refused(objectnet, imagenet, prepared, text, message):
    (objectnet / "mappings/objectnet_to_imagenet_1k.json").write_text(text)
    with pytest.raises(ValueError, match=rf"objectnet_to_imagenet_1k\.json: {message}.*objectnet\.dev"):
        prepared("objectnet", imagenet)


def test_a_packed_objectnet_is_to_be_unpacked_first(imagenet, prepared):
    (imagenet / "objectnet-1.0.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"lacks objectnet-1\.0/images/.*is encrypted: unpack it in this folder"):
        prepared("objectnet", imagenet)
