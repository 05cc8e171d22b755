"""Class folders with links, hidden files and odd names, on disks, in stores and in archives."""

import gzip
import os
import subprocess
import tarfile
import unicodedata
import uuid
import zipfile
from pathlib import Path

import pytest

from vitline.data_prep.config import ClassFolders, CorpusRecipe
from vitline.data_prep.sources.class_folders import ClassFolderCorpus
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store

from ....tars import link_of, tar_of


def opened(path, links="follow", top_folders="auto", allowed_roots=(), **recipe):
    source = ClassFolders(path=str(path), links=links, top_folders=top_folders, allowed_roots=allowed_roots)
    return ClassFolderCorpus(source, CorpusRecipe(**recipe))


def work_folder(work=None, each=3):
    return WorkFolder(open_store("memory://root"), open_store(work or f"memory://{uuid.uuid4().hex}"), each)


def listed(path, links="follow", each=3, **recipe):
    """Every example of a source by its id, read part by part by workers that share nothing but the store."""
    work, found = work_folder(each=each), {}
    for part in opened(path, links, **recipe).parts(work):
        for example in opened(path, links, **recipe).examples(part, work):
            assert example.example_id not in found
            found[example.example_id] = example
    return found


def located(example):
    """The bytes of an example by its locator alone."""
    end = None if example.length is None else example.offset + example.length
    return open_store(example.base).read(example.key, example.offset, end)


def add_files(folder, *names, data=b"x"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_path_gives_the_class_and_the_id(tmp_path):
    add_files(tmp_path, "cat/1.jpg", "bird/owl/barn owl/2.JPEG", "cat/no ending", "cat/ünï 漢.png")
    examples = listed(tmp_path)
    assert {i: e.labels for i, e in examples.items()} == {
        "cat/1.jpg": ("cat",),
        "bird/owl/barn owl/2.JPEG": ("bird/owl/barn owl",),
        "cat/no ending": ("cat",),
        "cat/ünï 漢.png": ("cat",),
    }
    assert not any(e.refused for e in examples.values())
    source = opened(tmp_path)
    assert source.class_info("bird/owl/barn owl").parents == ("bird", "owl")


def test_ids_are_nfc_and_keys_are_as_on_disk(tmp_path):
    decomposed = unicodedata.normalize("NFD", "café/é.jpg")
    add_files(tmp_path, decomposed)
    (example,) = listed(tmp_path).values()
    assert example.example_id == unicodedata.normalize("NFC", decomposed) != decomposed
    assert open_store(example.base).read(example.key) == b"x"


@pytest.mark.parametrize("kind", ["folder", "tree.tar", "tree.tgz", "tree.zip"])
@pytest.mark.parametrize("each", [1, 100])
def test_of_names_that_are_equal_as_ids_the_first_stays(tmp_path, kind, each):
    composed, decomposed = (unicodedata.normalize(form, "caf\u00e9/\u00e9.jpg") for form in ("NFC", "NFD"))
    add_files(tmp_path / "in", composed, decomposed, "dog/1.jpg", "dog/2.jpg")
    if kind != "folder":
        packed(tmp_path / "in", tmp_path / kind)
    examples = listed(tmp_path / ("in" if kind == "folder" else kind), each=each)
    assert sorted(i for i, e in examples.items() if not e.refused) == [composed, "dog/1.jpg", "dog/2.jpg"]
    (twin,) = (e for e in examples.values() if e.refused)
    assert twin.refused[0] == "repeated_name"
    assert repr(composed) in unicodedata.normalize("NFC", twin.refused[1])


def test_files_that_are_not_images_are_listed_with_a_reason(tmp_path):
    add_files(
        tmp_path, "cat/1.jpg", "cat/._1.jpg", "cat/.DS_Store", "cat/Thumbs.db", "cat/notes.txt", "readme.md", "top.jpg"
    )
    add_files(tmp_path, "__MACOSX/cat/1.jpg", ".git/config", "cat/vector.SVG")
    reasons = {i: e.refused[0] for i, e in listed(tmp_path).items() if e.refused}
    ignored = ("cat/._1.jpg", "cat/.DS_Store", "cat/Thumbs.db", "cat/notes.txt", "readme.md", "cat/vector.SVG")
    assert reasons == {**dict.fromkeys((*ignored, "__MACOSX", ".git"), "ignored_file"), "top.jpg": "no_label"}


def test_links_are_followed_or_refused(tmp_path):
    add_files(tmp_path, "pictures/cat/1.jpg", "elsewhere/2.jpg", "elsewhere/deep/3.jpg")
    cat = tmp_path / "pictures" / "cat"
    (cat / "2.jpg").symlink_to(tmp_path / "elsewhere" / "2.jpg")
    (cat / "more").symlink_to(tmp_path / "elsewhere" / "deep")
    (cat / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (cat / "loop").symlink_to(tmp_path / "pictures")
    followed = listed(tmp_path / "pictures", allowed_roots=(str(tmp_path / "elsewhere"),))
    assert {i for i, e in followed.items() if not e.refused} == {"cat/1.jpg", "cat/2.jpg", "cat/more/3.jpg"}
    assert followed["cat/gone.jpg"].refused[0] == "unreadable"
    assert "nowhere.jpg" in followed["cat/gone.jpg"].refused[1]
    assert followed["cat/loop"].refused[0] == "ignored_file"
    skipped = listed(tmp_path / "pictures", links="skip")
    assert {i for i, e in skipped.items() if not e.refused} == {"cat/1.jpg"}


@pytest.fixture
def leaving(tmp_path):
    """A source whose links lead out of it: to a file, through another link, to folders, and to no image."""
    add_files(
        tmp_path, "source/cat/1.jpg", "source/dog/2.jpg", "private/3.jpg", "private/notes.txt", "private/deep/4.jpg"
    )
    cat = tmp_path / "source" / "cat"
    for link, target in {
        "file.jpg": "../../private/3.jpg",
        "absolute.jpg": tmp_path / "private" / "3.jpg",
        "twice.jpg": "file.jpg",
        "notes.txt": "../../private/notes.txt",
        "folder": "../../private",
        "above": tmp_path,
        "inside.jpg": "../dog/2.jpg",
        "inside": tmp_path / "source" / "dog",
    }.items():
        (cat / link).symlink_to(target)
    return tmp_path / "source"


def test_links_that_leave_the_source_are_refused(leaving):
    found = listed(leaving)
    assert {i for i, e in found.items() if not e.refused} == {
        "cat/1.jpg", "cat/inside.jpg", "cat/inside/2.jpg", "dog/2.jpg",
    }  # fmt: skip
    refused = {i: e.refused for i, e in found.items() if e.refused}
    assert refused.pop("cat/notes.txt")[0] == "ignored_file"
    assert {i: reason for i, (reason, _) in refused.items()} == {
        "cat/file.jpg": "unsafe_path",
        "cat/absolute.jpg": "unsafe_path",
        "cat/twice.jpg": "unsafe_path",
        "cat/folder": "uncounted_loss",
        "cat/above": "uncounted_loss",
    }
    assert all("outside of the source folder" in detail for _, detail in refused.values())
    assert all("source.allowed_roots" in detail for _, detail in refused.values())


def test_links_lead_to_allowed_roots(leaving):
    private = leaving.parent / "private"
    found = {i for i, e in listed(leaving, allowed_roots=(str(private),)).items() if not e.refused}
    assert found == {
        "cat/1.jpg", "cat/inside.jpg", "cat/inside/2.jpg", "dog/2.jpg", "cat/file.jpg", "cat/absolute.jpg", "cat/twice.jpg",
        "cat/folder/3.jpg", "cat/folder/deep/4.jpg",
    }  # fmt: skip
    beside = leaving.parent / "priv"  # the beginning of a name is not a folder
    beside.mkdir()
    assert "cat/file.jpg" not in {i for i, e in listed(leaving, allowed_roots=(str(beside),)).items() if not e.refused}


def test_a_source_that_is_reached_through_a_link_holds_its_own_files(leaving, tmp_path):
    (tmp_path / "link").symlink_to(leaving)
    assert facts(listed(tmp_path / "link")) == facts(listed(leaving))
    assert opened(tmp_path / "link").fingerprint() == opened(leaving).fingerprint()


def test_folders_that_are_too_deep_are_one_refusal(tmp_path):
    add_files(tmp_path, "cat/1.jpg")
    deepest = os.open(tmp_path / "cat", os.O_RDONLY)
    for _ in range(1500):  # deeper than Python can recurse
        os.mkdir("d", dir_fd=deepest)
        above, deepest = deepest, os.open("d", os.O_RDONLY, dir_fd=deepest)
        os.close(above)
    os.close(deepest)
    try:
        found = listed(tmp_path)
        opened(tmp_path).fingerprint()
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "cat/d"], check=True)  # shutil.rmtree recurses
    assert {i for i, e in found.items() if not e.refused} == {"cat/1.jpg"}
    ((reason, detail),) = (e.refused for e in found.values() if e.refused)
    assert (reason, "below more than 200 folders" in detail) == ("uncounted_loss", True)


def test_names_that_are_not_utf8_are_refused_with_a_readable_id(tmp_path):
    add_files(tmp_path, "cat/1.jpg")
    try:
        os.close(os.open(os.fsencode(tmp_path) + b"/cat/\xff.jpg", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pytest.skip("this disk takes UTF-8 names only")
    assert listed(tmp_path)["cat/�.jpg"].refused[0] == "unreadable"


def splits_of(folder, **recipe):
    return {i: e.split for i, e in listed(folder, **recipe).items()}


def test_a_missing_split_is_drawn_from_train(tmp_path):
    add_files(tmp_path, *(f"train/cat/{i}.jpg" for i in range(200)), "test/cat/a.jpg")
    splits = splits_of(tmp_path, val_fraction=0.3, test_fraction=0.3)
    assert splits.pop("test/cat/a.jpg") == "test"
    assert set(splits.values()) == {"train", "val"}
    add_files(tmp_path, "val/cat/b.jpg")
    assert set(splits_of(tmp_path, val_fraction=0.3).values()) == {"train", "val", "test"}
    assert all(s == "train" for i, s in splits_of(tmp_path, val_fraction=0.3).items() if i.startswith("train"))


def in_memory(folder):
    uri = f"memory://{uuid.uuid4().hex}"
    for file in folder.rglob("*"):
        if file.is_file():
            open_store(uri).write(file.relative_to(folder).as_posix(), file.read_bytes())
    return uri


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_meaning_of_top_level_folders_can_be_set(tmp_path, wrapped):
    path, before = tmp_path / "tree", "pets/" if wrapped else ""
    add_files(path, "train/a/0.jpg", "validation/a/1.jpg", "test/a/2.jpg", "docs/figures/fig.jpg", "notes/read.md")
    if wrapped:
        packed(path, path := tmp_path / "tree.zip", inside="pets")
    found = listed(path, top_folders="splits")
    assert {i: (e.labels, e.split) for i, e in found.items() if not e.refused} == {
        f"{before}train/a/0.jpg": (("a",), "train"),
        f"{before}validation/a/1.jpg": (("a",), "val"),
        f"{before}test/a/2.jpg": (("a",), "test"),
    }
    reason, detail = found[f"{before}docs/figures/fig.jpg"].refused
    assert reason == "ignored_file"
    assert detail.startswith("not in one of the split folders ")
    as_classes = (e.labels for e in listed(path, top_folders="classes").values() if not e.refused)
    assert {*as_classes} == {("train/a",), ("validation/a",), ("test/a",), ("docs/figures",)}


@pytest.mark.parametrize("as_store", [False, True])
def test_a_folder_without_images_next_to_the_splits_changes_nothing(tmp_path, as_store):
    add_files(tmp_path, "docs/read.md", "docs/.x/1.jpg", "train/cat/1.jpg", "val/cat/2.jpg", "zoo/.DS_Store")
    (tmp_path / "empty").mkdir()
    found = splits_of(in_memory(tmp_path) if as_store else tmp_path, test_fraction=0)
    assert {found["train/cat/1.jpg"], found["val/cat/2.jpg"]} == {"train", "val"}


def test_requested_splits_must_exist(tmp_path):
    add_files(tmp_path, "cat/1.jpg", "test/2.jpg")
    with pytest.raises(ValueError, match=r"'splits', but .* holds test; its top level must have train"):
        listed(tmp_path, top_folders="splits")


def test_the_fingerprint_changes_with_the_files(tmp_path):
    add_files(tmp_path, "a/cat/1.jpg", "a/cat/2.jpg")
    first = opened(tmp_path / "a").fingerprint()
    assert opened(tmp_path / "a").fingerprint() == first
    (tmp_path / "a").rename(tmp_path / "b")  # the location of the folder does not matter
    assert opened(tmp_path / "b").fingerprint() == first
    add_files(tmp_path, "b/cat/2.jpg", data=b"longer")
    second = opened(tmp_path / "b").fingerprint()
    (tmp_path / "b/cat/1.jpg").unlink()
    assert len({first, second, opened(tmp_path / "b").fingerprint()}) == 3


@pytest.mark.parametrize("name", ["objects", "pictures.tar"])
def test_the_fingerprint_of_a_store_changes_with_its_objects(name):
    uri = f"memory://{uuid.uuid4().hex}"
    store, path = open_store(uri), f"{uri}/pictures.tar" if name == "pictures.tar" else uri
    seen = []
    for data in (b"one", b"two"):
        store.write("pictures.tar", data)
        seen += [opened(path).fingerprint(), opened(path).fingerprint()]
    assert seen[0] == seen[1] != seen[2] == seen[3]


@pytest.mark.parametrize("path", ["missing", "missing.tar", "memory://missing", "memory://missing/a.zip"])
def test_a_path_that_is_not_a_source_is_an_error(tmp_path, path):
    path = path if "://" in path else tmp_path / path
    for attempt in (opened(path).fingerprint, lambda: list(opened(path).parts(work_folder()))):
        with pytest.raises(ValueError, match=r"is neither a folder|holds no objects|does not exist"):
            attempt()


# Stores and archives --------------------------------------------------------------------------------------------------


def packed(folder, archive, inside="."):
    """An archive as common tools make it from a folder, with entries for folders and links."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as out:
            for number, name in enumerate(names):
                path, info = folder / name, zipfile.ZipInfo((Path(inside) / name).as_posix())
                info.compress_type = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
                if path.is_symlink():
                    info.create_system, info.external_attr = 3, 0o120777 << 16
                    out.writestr(info, os.readlink(path))
                elif path.is_file():
                    out.writestr(info, path.read_bytes())
    else:
        with tarfile.open(archive, "w" if archive.suffix == ".tar" else "w:gz") as out:
            out.add(folder, arcname=inside)


KINDS = ["pictures.tar", "pictures.tgz", "pictures.zip"]


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree"
    for number, name in enumerate(("cat/1.jpg", "cat/2 é.JPEG", "dog/a/3", "dog/b/4.png", "top.jpg", "dog/notes.txt")):
        add_files(folder, name, data=bytes([number]) * (100 + number))
    add_files(folder, "dog/.hidden.jpg", "cat/._1.jpg")
    add_files(folder, "cat/empty.jpg", data=b"")
    return folder


def facts(examples):
    return {i: (e.labels, e.split, e.refused) for i, e in examples.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("each", [1, 4, 100])
def test_an_archive_gives_the_same_examples_as_the_folder(tree, tmp_path, kind, each):
    packed(tree, tmp_path / kind)
    found = listed(tmp_path / kind, each=each)
    assert facts(found) == facts(listed(tree))
    pictures = {i: e for i, e in found.items() if not e.refused}
    assert len(pictures) == 5
    for example_id, example in pictures.items():
        assert example.data == located(example) == (tree / example_id).read_bytes()
    assert all(e.data is None for e in found.values() if e.refused)


def test_a_prefix_of_a_store_gives_the_same_examples_as_the_folder(tree):
    uri = f"memory://{uuid.uuid4().hex}"
    for path in tree.rglob("*"):
        if path.is_file():
            open_store(uri).write(path.relative_to(tree).as_posix(), path.read_bytes())
    found = listed(uri)
    assert facts(found) == facts(listed(tree))
    assert all(located(e) == (tree / i).read_bytes() for i, e in found.items() if not e.refused)


def test_parts_report_their_examples_and_bytes(tree, tmp_path):
    packed(tree, tmp_path / "pictures.tar")
    sizes = {"pictures.tar": 100 + 101 + 102 + 103 + 104 + 105 + 1 + 1, "tree": 100 + 101 + 102 + 103 + 104}
    for path in (tmp_path / "pictures.tar", tree):
        parts = list(opened(path).parts(work_folder(each=4)))
        assert len({part.name for part in parts}) == len(parts) > 2
        assert sum(part.num_bytes for part in parts) == sizes[path.name]
        assert parts == list(opened(path).parts(work_folder(each=4)))


@pytest.fixture
def linked(tmp_path):
    folder = tmp_path / "tree"
    add_files(folder, "animals/cat/1.jpg", "animals/dog/2.jpg", "top.jpg", "cars/3.jpg")
    add_files(tmp_path, "outside.jpg")
    for link, target in {
        "pets/tom.jpg": "../animals/cat/1.jpg",
        "black/tom.jpg": "../pets/tom.jpg",  # a link to a link
        "pets/all dogs": "../animals/dog",
        "tops/top.jpg": "../top.jpg",
        "cars/again.jpg": "3.jpg",
        "cars/out.jpg": "../../outside.jpg",
        "cars/gone.jpg": "nowhere.jpg",
        "cars/loop": "../cars",
    }.items():
        (folder / link).parent.mkdir(exist_ok=True)
        (folder / link).symlink_to(target)
    return folder


@pytest.mark.parametrize("kind", ["folder", *KINDS])
def test_links_give_second_labels(linked, tmp_path, kind):
    if kind != "folder":
        packed(linked, tmp_path / kind)
    path = linked if kind == "folder" else tmp_path / kind
    found = listed(path, "second_label")
    assert not opened(path, "second_label").single_label
    assert {i: e.labels for i, e in found.items() if not e.refused} == {
        "animals/cat/1.jpg": ("animals/cat", "black", "pets"),
        "animals/dog/2.jpg": ("animals/dog", "pets/all dogs"),
        "top.jpg": ("tops",),
        "cars/3.jpg": ("cars",),
    }
    refused = {i: e.refused for i, e in found.items() if e.refused}
    assert refused.pop("cars/gone.jpg") == ("unreadable", "link to 'nowhere.jpg', which does not exist")
    assert {reason for reason, _ in refused.values()} == {"ignored_file"}
    details = {i: detail for i, (_, detail) in refused.items()}
    assert "'../../outside.jpg', outside" in details.pop("cars/out.jpg")
    assert details == {
        "pets/tom.jpg": "second label of animals/cat/1.jpg",
        "black/tom.jpg": "second label of animals/cat/1.jpg",
        "pets/all dogs": "second label of animals/dog",
        "tops/top.jpg": "second label of top.jpg",
        "cars/again.jpg": "second label of cars/3.jpg",
        "cars/loop": "link to cars, a folder that contains the link",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_links_in_archives_are_followed_or_skipped(linked, tmp_path, kind):
    packed(linked, tmp_path / kind)
    (linked / "cars/out.jpg").unlink()  # outside of the tree: followed on a disk, but not in an archive
    on_disk = {i: e.labels for i, e in listed(linked).items() if not e.refused}
    followed = {i: e for i, e in listed(tmp_path / kind).items() if not e.refused}
    assert {i: e.labels for i, e in followed.items()} == on_disk
    assert all(located(e) == e.data == b"x" for e in followed.values())
    skipped = listed(tmp_path / kind, "skip")
    assert {i for i, e in skipped.items() if not e.refused} == {"animals/cat/1.jpg", "animals/dog/2.jpg", "cars/3.jpg"}


def test_hard_links_in_tars_are_links(tmp_path):
    add_files(tmp_path / "tree", "a/1.jpg")
    (tmp_path / "tree/b").mkdir()
    os.link(tmp_path / "tree/a/1.jpg", tmp_path / "tree/b/1.jpg")
    packed(tmp_path / "tree", tmp_path / "a.tar")
    twice = listed(tmp_path / "a.tar", "second_label")
    (picture,) = (e for e in twice.values() if not e.refused)
    assert picture.labels == ("a", "b")
    assert {i for i, e in listed(tmp_path / "a.tar").items() if not e.refused} == {"a/1.jpg", "b/1.jpg"}


def test_circular_links_are_not_followed_endlessly(tmp_path):
    add_files(tmp_path / "tree", "a/1.jpg", "b/2.jpg")
    for link, target in {"a/to": "../b", "b/to": "../a", "c": "c", "a/d": "e", "a/e": "d"}.items():
        (tmp_path / "tree" / link).symlink_to(target)
    packed(tmp_path / "tree", tmp_path / "a.tar")
    for path in (tmp_path / "tree", tmp_path / "a.tar"):
        labels = {i: e.labels for i, e in listed(path, "second_label").items() if not e.refused}
        assert labels == {"a/1.jpg": ("a", "b/to"), "b/2.jpg": ("a/to", "b")}


def test_links_between_folders_do_not_multiply(tmp_path):
    for level in range(8):  # 20 links to the next folder in each: 20 ** 8 ways to the last one
        for i in range(20):
            (tmp_path / f"{level}").mkdir(exist_ok=True)
            (tmp_path / f"{level}/{i:02d}").symlink_to(f"../{level + 1}")
    add_files(tmp_path, "8/1.jpg")
    found = listed(tmp_path, each=500)
    pictures = [i for i, e in found.items() if not e.refused]
    assert len(pictures) == 65
    assert pictures[-1] == "8/1.jpg"
    refused = {e.refused for e in found.values() if e.refused}
    assert len(refused) == 7
    assert {reason for reason, _ in refused} == {"ignored_file"}
    detail = "link to '../8', a folder to which more than 64 links lead; the others are ignored"
    assert ("ignored_file", detail) in refused
    assert len(found) < 8 * 64 * 20


@pytest.mark.parametrize("kind", ["a.tar", "a.tgz"])
def test_a_hostile_archive_leaves_nothing_outside_of_the_work_folder(tmp_path, kind):
    files = [(name, b"abc") for name in ("cat/1.jpg", "../../up.jpg", "/tmp/abs.jpg", "cat/2.jpg")]
    whole = tar_of([*files, link_of("cat/out", str(tmp_path)), ("cat/out/3.jpg", b"abc")])
    (tmp_path / "a.tar").write_bytes(whole[:-5000])  # truncated
    (tmp_path / "a.tgz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    before = {path for path in tmp_path.rglob("*")}
    work = work_folder(str(tmp_path / "work"))
    found = [e for part in opened(tmp_path / kind).parts(work) for e in opened(tmp_path / kind).examples(part, work)]
    after = {path for path in tmp_path.rglob("*")} - before
    assert {path.relative_to(tmp_path).parts[0] for path in after} == {"work"}
    assert [e.example_id for e in found if not e.refused] == ["cat/1.jpg", "cat/2.jpg", "cat/out/3.jpg"]
    reasons = [e.refused[0] for e in found if e.refused]
    assert reasons == ["unsafe_path", "unsafe_path", "ignored_file", "uncounted_loss"]


def test_damage_of_an_archive_is_one_refusal(tree, tmp_path):
    packed(tree, tmp_path / "a.zip")
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[-22 + 10] -= 1  # the number of entries
    (tmp_path / "a.zip").write_bytes(data)
    refused = [e.refused for e in listed(tmp_path / "a.zip").values() if e.refused]
    assert [reason for reason, _ in refused].count("uncounted_loss") == 1
    (tmp_path / "b.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(ValueError, match=r"holds no members: .* invalid tar header"):
        list(opened(tmp_path / "b.tar").parts(work_folder()))


@pytest.mark.slow
def test_folders_and_archives_on_s3(s3_uri, tree, tmp_path):
    store = open_store(s3_uri)
    for path in tree.rglob("*"):
        if path.is_file():
            store.write(f"tree/{path.relative_to(tree).as_posix()}", path.read_bytes())
    assert facts(listed(f"{s3_uri}/tree")) == facts(listed(tree))
    for kind in KINDS:
        packed(tree, tmp_path / kind)
        store.write(kind, (tmp_path / kind).read_bytes())
        found = listed(f"{s3_uri}/{kind}")
        assert facts(found) == facts(listed(tree))
        assert all(located(e) == (tree / i).read_bytes() for i, e in found.items() if not e.refused)
    assert opened(f"{s3_uri}/tree").fingerprint() == opened(f"{s3_uri}/tree").fingerprint()
