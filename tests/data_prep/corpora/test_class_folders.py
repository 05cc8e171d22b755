"""Class folders as people have them."""

import os
import unicodedata

import pytest

from data_prep.config import ClassFolders, CorpusRecipe
from data_prep.corpora.class_folders import ClassFolderCorpus
from infra.storage import open_store


def listed(folder, links="follow", **recipe):
    source = ClassFolderCorpus(ClassFolders(path=str(folder), links=links), CorpusRecipe(**recipe))
    store = open_store("memory://unused")
    return {example.example_id: example for example in source.examples(store, store)}


def put(folder, *names, data=b"x"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_the_path_is_the_class_and_the_id(tmp_path):
    put(tmp_path, "cat/1.jpg", "bird/owl/barn owl/2.JPEG", "cat/no ending", "cat/ünï 漢.png")
    examples = listed(tmp_path)
    assert {i: e.labels for i, e in examples.items()} == {
        "cat/1.jpg": ("cat",),
        "bird/owl/barn owl/2.JPEG": ("bird/owl/barn owl",),
        "cat/no ending": ("cat",),
        "cat/ünï 漢.png": ("cat",),
    }
    assert not any(e.refused for e in examples.values())
    source = ClassFolderCorpus(ClassFolders(path=str(tmp_path)), CorpusRecipe())
    assert source.class_info("bird/owl/barn owl").parents == ("bird", "owl")


def test_ids_are_nfc_and_keys_are_what_the_disk_says(tmp_path):
    decomposed = unicodedata.normalize("NFD", "café/é.jpg")
    put(tmp_path, decomposed)
    (example,) = listed(tmp_path).values()
    assert example.example_id == unicodedata.normalize("NFC", decomposed) != decomposed
    assert open_store(example.base).read(example.key) == b"x"


def test_what_is_no_picture_is_listed_with_a_reason(tmp_path):
    put(tmp_path, "cat/1.jpg", "cat/._1.jpg", "cat/.DS_Store", "cat/Thumbs.db", "cat/notes.txt", "readme.md", "top.jpg")
    put(tmp_path, "__MACOSX/cat/1.jpg", ".git/config", "cat/vector.SVG")
    reasons = {i: e.refused[0] for i, e in listed(tmp_path).items() if e.refused}
    ignored = ("cat/._1.jpg", "cat/.DS_Store", "cat/Thumbs.db", "cat/notes.txt", "readme.md", "cat/vector.SVG")
    assert reasons == {**dict.fromkeys((*ignored, "__MACOSX", ".git"), "ignored_file"), "top.jpg": "no_label"}


def test_links_are_followed_or_refused(tmp_path):
    put(tmp_path, "pictures/cat/1.jpg", "elsewhere/2.jpg", "elsewhere/deep/3.jpg")
    cat = tmp_path / "pictures" / "cat"
    (cat / "2.jpg").symlink_to(tmp_path / "elsewhere" / "2.jpg")
    (cat / "more").symlink_to(tmp_path / "elsewhere" / "deep")
    (cat / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (cat / "loop").symlink_to(tmp_path / "pictures")
    followed = listed(tmp_path / "pictures")
    assert {i for i, e in followed.items() if not e.refused} == {"cat/1.jpg", "cat/2.jpg", "cat/more/3.jpg"}
    assert followed["cat/gone.jpg"].refused[0] == "unreadable"
    assert "nowhere.jpg" in followed["cat/gone.jpg"].refused[1]
    assert followed["cat/loop"].refused[0] == "ignored_file"
    skipped = listed(tmp_path / "pictures", links="skip")
    assert {i for i, e in skipped.items() if not e.refused} == {"cat/1.jpg"}


def test_names_that_are_not_utf8_are_refused_readably(tmp_path):
    put(tmp_path, "cat/1.jpg")
    try:
        os.close(os.open(os.fsencode(tmp_path) + b"/cat/\xff.jpg", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pytest.skip("this disk takes UTF-8 names only")
    assert listed(tmp_path)["cat/�.jpg"].refused[0] == "unreadable"


def splits_of(folder, **recipe):
    return {i: e.split for i, e in listed(folder, **recipe).items()}


def test_top_level_splits_are_taken(tmp_path):
    put(tmp_path, "train/cat/1.jpg", "Validation/cat/2.jpg", "test/dog/3.jpg", "train/dog/4.jpg")
    assert splits_of(tmp_path) == {
        "train/cat/1.jpg": "train",
        "train/dog/4.jpg": "train",
        "Validation/cat/2.jpg": "val",
        "test/dog/3.jpg": "test",
    }
    assert {e.labels for e in listed(tmp_path).values()} == {("cat",), ("dog",)}


def test_a_split_that_is_missing_is_taken_from_train(tmp_path):
    put(tmp_path, *(f"train/cat/{i}.jpg" for i in range(200)), "test/cat/a.jpg")
    splits = splits_of(tmp_path, val_fraction=0.3, test_fraction=0.3)
    assert splits.pop("test/cat/a.jpg") == "test"
    assert set(splits.values()) == {"train", "val"}
    put(tmp_path, "val/cat/b.jpg")
    assert set(splits_of(tmp_path, val_fraction=0.3).values()) == {"train", "val", "test"}
    assert all(s == "train" for i, s in splits_of(tmp_path, val_fraction=0.3).items() if i.startswith("train"))


def test_a_class_may_be_called_train(tmp_path):
    put(tmp_path, "train/1.jpg", "plane/2.jpg", "ship/3.jpg")
    assert {e.labels for e in listed(tmp_path).values()} == {("train",), ("plane",), ("ship",)}


def test_splits_are_by_hash_and_do_not_move(tmp_path):
    put(tmp_path, *(f"cat/{i}.jpg" for i in range(100)))
    before = splits_of(tmp_path)
    assert set(before.values()) == {"train", "val", "test"}
    put(tmp_path, *(f"dog/{i}.jpg" for i in range(100)))
    assert before.items() <= splits_of(tmp_path).items()


def fingerprint(folder):
    return ClassFolderCorpus(ClassFolders(path=str(folder)), CorpusRecipe()).fingerprint()


def test_the_fingerprint_changes_with_the_files(tmp_path):
    put(tmp_path, "a/cat/1.jpg", "a/cat/2.jpg")
    first = fingerprint(tmp_path / "a")
    assert fingerprint(tmp_path / "a") == first
    (tmp_path / "a").rename(tmp_path / "b")  # where the folder lies does not matter
    assert fingerprint(tmp_path / "b") == first
    put(tmp_path, "b/cat/2.jpg", data=b"longer")
    second = fingerprint(tmp_path / "b")
    (tmp_path / "b/cat/1.jpg").unlink()
    assert len({first, second, fingerprint(tmp_path / "b")}) == 3


def test_a_folder_that_is_none_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        fingerprint(tmp_path / "missing")
    with pytest.raises(ValueError, match="local or mounted disk only"):
        fingerprint("s3://bucket/pictures")
