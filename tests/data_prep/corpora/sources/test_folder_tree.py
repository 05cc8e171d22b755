"""Which folders are splits, and which are classes: one answer for a folder, a prefix of a store and an archive of the same tree."""

import uuid
import zipfile

import pytest

from vitline.data_prep.config import ClassFolders, CorpusRecipe
from vitline.data_prep.sources.class_folders import ClassFolderCorpus
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store

from ....tars import tar_of

CLASSES = ("cat", "dog")


def tree(*folders, classes=CLASSES, inside=""):
    """Paths of two images in each class of each folder."""
    return [f"{folder}/{c}{inside}/{i}.jpg" for folder in folders for c in classes for i in range(2)]


def made(kind, paths, place):
    """A source of these files."""
    if kind == "store":
        uri = f"memory://{uuid.uuid4().hex}"
        for path in paths:
            open_store(uri).write(path, b"x")
        return uri
    if kind == "folder":
        for path in paths:
            (place / "src" / path).parent.mkdir(parents=True, exist_ok=True)
            (place / "src" / path).write_bytes(b"x")
        return place / "src"
    if kind == "zip":
        with zipfile.ZipFile(place / "src.zip", "w") as archive:
            for path in paths:
                archive.writestr(path, b"x")
        return place / "src.zip"
    (place / f"src.{kind}").write_bytes(
        tar_of([(f"./{path}", b"x") for path in paths], "w" if kind == "tar" else "w:gz")
    )
    return place / f"src.{kind}"


def understood(path, **source):
    """Classes of each split ("drawn" if the source names none), and the description of the tree."""
    corpus = ClassFolderCorpus(ClassFolders(path=str(path), **source), CorpusRecipe(val_fraction=0, test_fraction=0))
    work = WorkFolder(open_store("memory://root"), open_store(f"memory://{uuid.uuid4().hex}"), 100)
    found = {}
    for example in [e for part in corpus.parts(work) for e in corpus.examples(part, work)]:
        if not example.refused:
            found.setdefault(str(example.split), set()).update(example.labels)
    return {split: sorted(classes) for split, classes in found.items()}, corpus.structure(work)


BOTH = {"train": ["cat", "dog"], "test": ["cat", "dog"]}
WITH_VAL = {"train": ["cat", "dog"], "val": ["cat", "dog"]}
CERTAIN = {
    "training_set, test_set": (tree("training_set", "test_set"), BOTH),
    "seg_train/seg_train": (tree("seg_train/seg_train", "seg_test/seg_test"), BOTH),
    "eval as on the Hub": (tree("train", "eval"), BOTH),
    "train_images, val_images": (tree("train_images", "val_images"), WITH_VAL),
    "one folder deeper": (tree("pets/train", "pets/val"), WITH_VAL),
    "two folders deeper": (tree("data/pets/Training", "data/pets/Testing"), BOTH),
    "numbers": (tree("images/train2017", "images/val2017"), WITH_VAL),
    "beside labels": ([*tree("images/train", "images/valid"), "labels/train/1.txt", "README.md"], WITH_VAL),
    "dev, camel case": (tree("TrainSet", "DevSet"), WITH_VAL),
    "images in every split": (tree("train/images", "test/images"), BOTH),
    "splits in classes": (tree("cat", "dog", classes=("train", "test")), BOTH),
    "images in classes": (tree("train", "test", inside="/images"), BOTH),
    "one split": (tree("data/train"), {"train": ["cat", "dog"]}),
    "no split": (tree("pets"), {"train": ["cat", "dog"]}),
    "a vehicle": (tree("vehicles", classes=("train", "car", "bus")), {"train": ["bus", "car", "train"]}),
    "words in classes": (
        tree("x", classes=("train_station", "test_tube", "cat")),
        {"train": ["cat", "test_tube", "train_station"]},
    ),
    "one class": (["cat/1.jpg", "cat/black/2.jpg"], {"train": ["cat", "cat/black"]}),
}
UNCERTAIN = {
    "tiny-imagenet": ([*tree("train", inside="/images"), "val/images/1.jpg", "val/val_annotations.txt"], "in val, but in no class folder"),
    "a set that is no split": ([*tree("seg_train", "seg_test"), "seg_pred/1.jpg"], "but also folder 'seg_pred'"),
    "only test": (tree("test"), "nothing beside it names train"),
    "two words for test": (tree("train", "eval", "test"), "eval and test, which would both be test"),
    "other words": (tree("train", "test_clean", "test_other"), "in different ways"),
    "splits in some classes": ([*tree("cat", classes=("train", "val")), "dog/1.jpg"], "where folders of classes are"),
    "splits in splits": (tree("train/train", "train/val", "test"), "where folders of classes are"),
    "a lone train with the folders of another": (tree("train", "mine"), "the same folders"),
    "no class in common": ([*tree("train/Images"), *tree("val")], "no class in common"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["folder", "store", "tar", "tar.gz", "zip"])
def test_every_kind_of_source_understands_a_tree_alike(kind, tmp_path):
    for number, (name, (paths, expected)) in enumerate(CERTAIN.items()):
        (place := tmp_path / str(number)).mkdir()
        found, structure = understood(made(kind, paths, place))
        assert found == expected, name
        assert "<class>" in structure
        assert all(f" is {split} (" in structure for split in expected if len(expected) > 1), structure
    for number, (name, (paths, error)) in enumerate(UNCERTAIN.items(), 100):
        (place := tmp_path / str(number)).mkdir()
        with pytest.raises(ValueError, match=error) as raised:
            pytest.fail(f"{name}: {understood(made(kind, paths, place))}")
        assert "source.splits=" in str(raised.value)


def test_the_settings_answer(tmp_path):
    paths = [*tree("train", inside="/images"), "val/images/1.jpg", *tree("cat", classes=("held_out",))]
    path = made("folder", paths, tmp_path)
    assert understood(path, splits={"train": "train"})[0] == {"train": ["cat", "dog"]}
    found, structure = understood(path, splits={"train": "train", "*/held_out": "test"})
    assert found["test"] == ["cat"]
    assert "<class>/held_out" in structure
    assert understood(path, top_folders="classes")[0] == {
        "train": ["cat/held_out", "train/cat/images", "train/dog/images", "val/images"]
    }
    with pytest.raises(ValueError, match=r"source.splits names 'trian', but .* has no such folder with images"):
        understood(path, splits={"trian": "train"})
