"""A property of every source: each entry becomes exactly one example or refusal; nothing is lost. Here, entries are listed with
other libraries than in the code under test."""

import csv
import gzip
import json
import random
import uuid
import zipfile
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.data_prep.config import (
    ClassFolders,
    CorpusConfig,
    Digits,
    ImageArrays,
    ImageNet21k,
    LabelTable,
    ParquetImages,
    WebDataset,
)
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.sources.class_folders import ClassFolderCorpus
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store

from ...tars import link_of, tar_of


def ids_of(config, each=5):
    """The ids that a source gives, read part by part."""
    work = open_store(f"memory://{uuid.uuid4().hex}")
    source, work = open_source(config), WorkFolder(work, work, each)
    return [example.example_id for part in source.parts(work) for example in source.examples(part, work)]


def archive_of(members, kind, path):
    """Writes (name, data or None, target or None) as links and files."""
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data, target in members:
                info = zipfile.ZipInfo(name)
                info.external_attr = (0o120777 if target else 0o100644) << 16
                archive.writestr(info, target or data)
        return path
    files = [link_of(name, target) if target else (name, data) for name, data, target in members]
    path.write_bytes(tar_of(files, "w:gz" if kind == "tar.gz" else "w"))
    return path


@pytest.mark.parametrize("links", ["follow", "second_label", "skip"])
@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_every_name_of_an_image_becomes_an_example_or_a_refusal(kind, links, tmp_path):
    members = [("a/picture.jpg", b"x", None)]
    members += [(f"b{i % 7}/{i:03d}.jpg", None, "../a/picture.jpg") for i in range(200)]
    members += [("c/0.jpg", None, "../b0/000.jpg")]
    members += [(f"c/{i}.jpg", None, f"{i - 1}.jpg") for i in range(1, 60)]  # a chain too long to be followed
    members += [("a/notes.txt", b"x", None), ("b0/notes.jpg", None, "../a/notes.txt"), ("d/gone.jpg", None, "nowhere")]
    path = archive_of(members, kind, tmp_path / f"a.{kind}")
    found = Counter(ids_of(CorpusConfig(name="x", source=ClassFolders(path=str(path), links=links))))
    assert found == Counter(name for name, _, _ in members)


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_archives_of_any_links_lose_nothing(kind, tmp_path):
    """Random links to files, folders, links and missing targets; a link to a folder gives the folder's content."""
    for seed in range(40):
        choose = random.Random(seed)
        folders = [f"f{i}" for i in range(4)]
        members = [
            (f"{choose.choice(folders)}/{i}{choose.choice(['.jpg', '.jpg', '.txt'])}", b"x", None) for i in range(8)
        ]
        for i in range(12):
            target = choose.choice(
                [*(f"../{name}" for name, _, _ in members), *(f"../{f}" for f in folders), "nowhere"]
            )
            members.append((f"{choose.choice(folders)}/l{i}{choose.choice(['', '.jpg'])}", None, target))
        choose.shuffle(members)
        path = archive_of(members, kind, tmp_path / f"{seed}.{kind}")
        source = ClassFolders(path=str(path))
        found = Counter(ids_of(CorpusConfig(name="x", source=source)))
        assert max(found.values()) == 1, seed
        links = {name: target for name, _, target in members if target}
        for name, _, target in members:
            to_folder, at = False, name
            for _ in range(len(members)):
                if at not in links:
                    to_folder = at in folders
                    break
                at = links[at].removeprefix("../")
            assert to_folder or name in found, (seed, name, target)


def test_names_beyond_the_limit_of_linked_folders_are_reported(tmp_path):
    members = [("a/picture.jpg", b"x", None)]
    members += [(f"b/{i:03d}", None, "../a") for i in range(100)]
    path = archive_of(members, "tar", tmp_path / "a.tar")
    source = ClassFolderCorpus(ClassFolders(path=str(path)), CorpusConfig(name="x", source=Digits()).recipe)
    work = open_store(f"memory://{uuid.uuid4().hex}")
    work = WorkFolder(work, work, 500)
    found = [example for part in source.parts(work) for example in source.examples(part, work)]
    assert sum(example.refused is None for example in found) == 65
    (refused,) = [example for example in found if example.refused]
    assert refused.refused[0] == "ignored_file"
    assert "links to folders give a/picture.jpg more than 65 names" in refused.refused[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
@pytest.mark.parametrize("name", ["a/picture.jpg", "a/notes.txt"])
def test_links_to_one_file_beyond_the_limit_are_reported(kind, name, tmp_path):
    members = [(name, b"x", None), *((f"b/{i:04d}.jpg", None, f"../{name}") for i in range(3000))]
    members += [(f"c/{i:04d}.jpg", b"x", None) for i in range(1500)]
    members += [(f"d/{i:04d}.jpg", None, f"../c/{i:04d}.jpg") for i in range(1500)]
    path = archive_of(members, kind, tmp_path / f"a.{kind}")
    source = ClassFolderCorpus(ClassFolders(path=str(path)), CorpusConfig(name="x", source=Digits()).recipe)
    work = open_store(f"memory://{uuid.uuid4().hex}")
    work = WorkFolder(work, work, 500)
    found = {example.example_id: example for part in source.parts(work) for example in source.examples(part, work)}
    assert sum(i.startswith("b/") for i in found) == 1000
    assert sum(i[0] in "cd" and not example.refused for i, example in found.items()) == 3000  # links to different files
    more = ("ignored_file", f"links give {name} more than 1,001 names; the others are ignored")
    assert found[f"{name} (more names)"].refused == more


def _folder(folder, picture):
    for i in range(12):
        (folder / "cat").mkdir(exist_ok=True)
        (folder / f"cat/{i}.jpg").write_bytes(picture(i))
    for name in ("cat/notes.txt", "cat/.hidden", "cat/broken.jpg", "cat/empty.png", "top.jpg"):
        (folder / name).write_bytes(b"" if "empty" in name else b"no picture")
    (folder / "cat/gone.jpg").symlink_to("nowhere")
    (folder / "cat/copy.jpg").write_bytes(picture(3))
    return ClassFolders(path=str(folder)), 19


def _archive(kind):
    def make(folder, picture):
        members = [(f"cat/{i}.jpg", picture(i), None) for i in range(12)]
        members += [(f"dog/{i}.jpg", None, "../cat/1.jpg") for i in range(90)]
        members += [("cat/broken.jpg", b"no", None), ("cat/notes.txt", b"no", None), ("cat/gone.jpg", None, "nowhere")]
        return ClassFolders(path=str(archive_of(members, kind, folder / f"a.{kind}"))), len(members)

    return make


def _rows(folder, picture):
    for i in range(12):
        (folder / f"{i}.jpg").write_bytes(picture(i))
    (folder / "broken.jpg").write_bytes(b"no picture")
    rows = [(f"{i}.jpg", "cat") for i in range(12)]
    return [*rows, ("broken.jpg", "cat"), ("gone.jpg", "cat"), ("../up.jpg", "cat"), ("", "cat"), ("1.jpg#", "")]


def _csv(folder, picture):
    rows = _rows(folder, picture)
    with (folder / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "labels"), *rows])
    return LabelTable(path=str(folder / "t.csv")), len(rows)


def _jsonl(folder, picture):
    rows = _rows(folder, picture)
    lines = [json.dumps({"image": image, "labels": [label]}) for image, label in rows]
    (folder / "t.jsonl").write_text("\n".join([*lines, "{no json", "[]"]) + "\n")
    return LabelTable(path=str(folder / "t.jsonl")), len(rows) + 2


def _parquet_table(folder, picture):
    rows = _rows(folder, picture)
    table = pa.table({"image": [image for image, _ in rows], "labels": [[label] for _, label in rows]})
    pq.write_table(table, folder / "t.parquet", row_group_size=5)
    return LabelTable(path=str(folder / "t.parquet")), len(rows)


def _parquet(folder, picture):
    images = [*map(picture, range(12)), b"no picture", b"", None]
    table = pa.table({"image": [{"bytes": each, "path": None} for each in images], "label": [*[0] * 14, None]})
    pq.write_table(table, folder / "data.parquet", row_group_size=4)
    return ParquetImages(path=str(folder / "data.parquet")), 15


def _webdataset(folder, picture):
    files = [(f"{i}.{ending}", data) for i in range(12) for ending, data in (("jpg", picture(i)), ("cls", b"1"))]
    files += [("bad.jpg", b"no picture"), ("bad.cls", b"1"), ("no-label.jpg", picture(99)), ("no-image.cls", b"1")]
    (folder / "a.tar").write_bytes(tar_of(files))
    return WebDataset(path=str(folder / "a.tar")), 15


def _synsets(folder, picture):
    for wnid in ("n00000001", "n00000002"):
        members = [(f"{wnid}_{i}.JPEG", picture(int(wnid[1:]) * 20 + i), None) for i in range(8)]
        archive_of([*members, (f"{wnid}_9.JPEG", b"no picture", None)], "tar", folder / f"{wnid}.tar")
    return ImageNet21k(path=str(folder)), 18


def _arrays(folder, picture):
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    images[7] = images[3]
    np.savez(folder / "a.npz", images=images, labels=np.arange(20) % 2)
    return ImageArrays(path=str(folder / "a.npz"), layout="npz"), 20


def _idx(folder, picture):
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    for name, header, data in (
        ("train-images-idx3-ubyte.gz", [0x803, 20, 8, 8], images),
        ("train-labels-idx1-ubyte.gz", [0x801, 20], np.arange(20, dtype=np.uint8) % 2),
    ):
        (folder / name).write_bytes(gzip.compress(np.array(header, ">i4").tobytes() + data.tobytes()))
    return ImageArrays(path=str(folder), layout="idx"), 20


def _digits(folder, picture):
    return Digits(), 1797


SOURCES = {
    "folder": _folder,
    "tar": _archive("tar"),
    "tar.gz": _archive("tar.gz"),
    "zip": _archive("zip"),
    "csv": _csv,
    "jsonl": _jsonl,
    "parquet table": _parquet_table,
    "parquet": _parquet,
    "webdataset": _webdataset,
    "imagenet21k": _synsets,
    "npz": _arrays,
    "idx": _idx,
    "digits": _digits,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_accepted_and_refused_add_up_to_the_listed_entries(kind, tmp_path, picture, memory_root):
    source, num_entries = SOURCES[kind](tmp_path, picture)
    request = CorpusConfig(name="all", source=source, execution={"max_refused_fraction": 1, "examples_per_chunk": 5})
    (manifest,) = prepare([request], memory_root)
    corpus = corpus_store(open_store(memory_root), request)
    with corpus.open("rejects.parquet") as file:
        refused = pq.read_table(file)["example_id"].to_pylist()
    assert len(refused) == len(set(refused)) == manifest.counts.num_refused
    own = [split for name, split in manifest.splits.items() if all(s.split == name for s in split.segments)]
    assert sum(split.num_rows for split in own) == manifest.counts.num_accepted
    assert manifest.counts.num_accepted + manifest.counts.num_refused == manifest.counts.num_found == num_entries
