"""Locations in tables that lead nowhere, or where the table may not lead: each is one refused row, and the others are prepared."""

import csv
import io
import os
import socket
import uuid

import pytest

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe, LabelTable
from vitline.data_prep.find_corpus import corpus_store, corpus_version
from vitline.data_prep.parquet_files import read_table
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import REJECTS_KEY
from vitline.data_prep.sources.label_table import LabelTableCorpus
from vitline.infra.config import digest_of
from vitline.infra.keys import run_key
from vitline.infra.storage import open_store

PICTURES = [f"{i:02d}.jpg" for i in range(24)]


@pytest.fixture
def place(tmp_path, picture, monkeypatch):
    """A folder with images in `pictures`."""
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 108 bytes
    (tmp_path / "pictures").mkdir()
    for number, name in enumerate(PICTURES):
        (tmp_path / "pictures" / name).write_bytes(picture(number))
    return tmp_path


def prepared(place, locations, root=None, execution=None, **source):
    """Number of accepted images, and reason and detail of every refused location, of a table that also names the pictures."""
    text = io.StringIO()
    csv.writer(text).writerows([("image", "labels"), *((name, "cat") for name in (*PICTURES, *locations))])
    table, content = place / "table.csv", text.getvalue().encode()
    if not table.exists() or table.read_bytes() != content:
        table.write_bytes(content)  # one that was replaced would make another corpus
    request = CorpusConfig(
        name="rows",
        source=LabelTable(path=str(place / "table.csv"), images=str(place / "pictures"), **source),
        recipe=CorpusRecipe(val_fraction=0.1, test_fraction=0),
        execution={"max_refused_fraction": 0.9, "image_timeout_s": 20} | (execution or {}),
    )
    root = root or f"memory://{uuid.uuid4().hex}"
    (manifest,) = prepare([request], root)
    rows = read_table(corpus_store(open_store(root), request), REJECTS_KEY).to_pylist()
    by_line = {f"table.csv!{number}": name for number, name in enumerate(locations, len(PICTURES) + 2)}
    refused = {by_line.get(row["example_id"], row["example_id"]): (row["reason"], row["detail"]) for row in rows}
    return manifest.counts.num_accepted, refused


def test_a_location_without_a_file_is_one_refused_row(place):
    pictures = place / "pictures"
    os.mkfifo(pictures / "pipe.jpg")
    for name, target in {"loop": "loop", "one": "two", "two": "one", "to pipe": "pipe.jpg"}.items():
        (pictures / name).symlink_to(target)
    (pictures / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("pictures/socket")
    expected = {
        "x" * 300 + ".jpg": "too long for this disk",
        "x/" * 3000 + "x.jpg": "too long for this disk",
        "loop": "links in a circle",
        "one/x.jpg": "links in a circle",
        "pipe.jpg": "a pipe (FIFO), not a file",
        "to pipe": "a pipe (FIFO), not a file",
        "socket": "a socket, not a file",
        "folder": "a folder",
        "00.jpg/x.jpg": "a folder of the path is a file",
        "gone.jpg": "No such file or directory",
    }
    num_accepted, refused = prepared(place, expected)
    assert num_accepted == len(PICTURES)
    assert refused.keys() == expected.keys()
    for location, why in expected.items():
        reason, detail = refused[location]
        assert (reason, why in detail) == ("unreadable", True), (location, detail)


def test_a_device_is_one_refused_row(place):
    devices = ["/dev/zero", "/dev/full", "/dev/tty"]
    num_accepted, refused = prepared(place, devices, allowed_roots=("/dev",))
    assert num_accepted == len(PICTURES)
    assert {name: ("unreadable", True) for name in devices} == {
        name: (reason, "a device, not a file" in detail) for name, (reason, detail) in refused.items()
    }


def test_a_location_outside_of_the_images_is_one_refused_row(place, picture):
    pictures, private = place / "pictures", place / "private"
    private.mkdir()
    for number, name in enumerate(("1.jpg", "2.jpg", "3.jpg", "4.jpg")):
        (private / name).write_bytes(picture(100 + number))
    (pictures / "file.jpg").symlink_to(private / "1.jpg")
    (pictures / "folder").symlink_to("../private")
    (pictures / "deep").mkdir()
    for number, name in enumerate(("1.jpg", "2.jpg")):
        (pictures / "deep" / name).write_bytes(picture(200 + number))
    (pictures / "inside.jpg").symlink_to("deep/1.jpg")
    (place / "pictures-2").mkdir()
    (place / "pictures-2/5.jpg").write_bytes(picture(105))
    elsewhere = open_store(f"memory://{uuid.uuid4().hex}")
    elsewhere.write("open/6.jpg", picture(106))
    elsewhere.write("7.jpg", picture(107))
    outside = ["file.jpg", "folder/2.jpg", f"{private}/3.jpg", f"file://{private}/4.jpg", f"{place}/pictures-2/5.jpg"]
    outside += [f"{elsewhere.uri}/open/6.jpg", f"{elsewhere.uri}/7.jpg", "s3://any-bucket-of-the-credentials/8.jpg"]
    inside = [f"{pictures}/deep/2.jpg", "inside.jpg"]
    num_accepted, refused = prepared(place, [*outside, *inside])
    assert num_accepted == len(PICTURES) + 2
    assert {name: reason for name, (reason, _) in refused.items()} == dict.fromkeys(outside, "unsafe_path")
    assert all(f"outside of file://{pictures}" in refused[name][1] for name in outside)
    assert "to which a link leads" in refused["folder/2.jpg"][1]
    assert "source.allowed_roots: the location is outside" in refused[outside[-1]][1]
    assert not any("allowed_roots=" in detail for _, detail in refused.values()), "a value would be chosen by the table"
    roots = (str(private), f"{elsewhere.uri}/open")
    num_accepted, refused = prepared(place, [*outside, *inside], allowed_roots=roots)
    assert num_accepted == len(PICTURES) + 2 + 5
    assert {name for name, (reason, _) in refused.items() if reason == "unsafe_path"} == {outside[4], *outside[6:]}


def test_a_table_of_locations_elsewhere_says_how_to_allow_them(place):
    (place / "table").mkdir()
    (place / "table/t.csv").write_text(
        "image,labels\n" + "".join(f"{place}/pictures/{name},cat\n" for name in PICTURES)
    )
    request = CorpusConfig(name="rows", source=LabelTable(path=str(place / "table/t.csv")))
    with pytest.raises(ValueError, match=r"24 of 24 .*name the folders .* in source\.allowed_roots;"):
        prepare([request], f"memory://{uuid.uuid4().hex}")


def test_versions_of_corpora_depend_on_the_roots_of_a_table_only_where_they_are_given(place):
    (place / "t.csv").write_text("image,labels\n1.jpg,cat\n")
    root = open_store("memory://versions")

    def version(kind, **fields):
        return corpus_version(root, CorpusConfig(name="rows", source=kind(**fields)))

    table = {"path": str(place / "t.csv"), "images": "/pictures"}
    before = LabelTable(**table).model_dump(mode="json", exclude={"path", "allowed_roots"})
    recipe = CorpusRecipe().model_dump(mode="json")
    inputs = {"source": LabelTableCorpus(LabelTable(**table), CorpusRecipe()).fingerprint()}
    key = run_key("rows", "prepare", digest_of({"source": before, "recipe": recipe}), inputs)
    assert version(LabelTable, **table) == key.rpartition("-")[2]
    assert version(LabelTable, **table, allowed_roots=("/data",)) != version(LabelTable, **table)
    folder = {"path": str(place)}
    assert version(ClassFolders, **folder, allowed_roots=("/data",)) == version(ClassFolders, **folder)


def killed(*_):
    raise InterruptedError


def test_a_relative_root_is_an_error():
    with pytest.raises(ValueError, match="'data' is a relative path; give an absolute path"):
        LabelTable(path="t.csv", allowed_roots=("data",))


@pytest.mark.s3
def test_a_bucket_that_is_missing_or_closed_is_one_refused_row(s3_uri, place, monkeypatch):
    from vitline.infra.stores import s3_store

    open_store(s3_uri).write("1.jpg", b"x")
    missing = f"s3://missing-{uuid.uuid4().hex}/1.jpg"
    roots = (missing.removesuffix("/1.jpg"), s3_uri)
    locations = [missing, f"{s3_uri}/gone.jpg", f"{s3_uri}/{'x' * 1200}"]
    num_accepted, refused = prepared(place, locations, allowed_roots=roots)
    assert num_accepted == len(PICTURES)
    assert {name: reason for name, (reason, _) in refused.items()} == dict.fromkeys(refused, "unreadable")
    assert len(refused) == 3
    assert refused[missing][1].startswith(f"no access to {missing}: ")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not the secret")
    s3_store._filesystem.cache_clear()
    try:
        num_accepted, refused = prepared(place, [f"{s3_uri}/1.jpg"], allowed_roots=roots)
    finally:
        s3_store._filesystem.cache_clear()
    assert num_accepted == len(PICTURES)
    assert refused[f"{s3_uri}/1.jpg"][1].startswith(f"no access to {s3_uri}/1.jpg: ")
