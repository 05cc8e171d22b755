"""Locations in tables that lead nowhere: each is one refused row, and the others are prepared."""

import csv
import os
import socket
import uuid

import pytest

from data_prep.config import CorpusConfig, CorpusRecipe, LabelTable
from data_prep.find_corpus import corpus_store
from data_prep.parquet_files import read_parquet
from data_prep.prepare import prepare
from data_prep.shard_format import REJECTS_KEY
from infra.storage import open_store

PICTURES = [f"{i:02d}.jpg" for i in range(24)]


@pytest.fixture
def place(tmp_path, picture, monkeypatch):
    """A folder with images in `pictures`."""
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 108 bytes
    (tmp_path / "pictures").mkdir()
    for number, name in enumerate(PICTURES):
        (tmp_path / "pictures" / name).write_bytes(picture(number))
    return tmp_path


def prepared(place, locations, root=None, **source):
    """Number of accepted images, and reason and detail of every refused location, of a table that also names the pictures."""
    with (place / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "labels"), *((name, "cat") for name in (*PICTURES, *locations))])
    request = CorpusConfig(
        name="rows",
        source=LabelTable(path=str(place / "table.csv"), images=str(place / "pictures"), **source),
        recipe=CorpusRecipe(val_fraction=0.1, test_fraction=0),
        execution={"max_refused_fraction": 0.9, "image_timeout_s": 20},
    )
    root = root or f"memory://{uuid.uuid4().hex}"
    (manifest,) = prepare([request], root)
    with corpus_store(open_store(root), request).open(REJECTS_KEY) as file:
        rows = read_parquet(file).to_pylist()
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
    num_accepted, refused = prepared(place, devices)
    assert num_accepted == len(PICTURES)
    assert {name: ("unreadable", True) for name in devices} == {
        name: (reason, "a device, not a file" in detail) for name, (reason, detail) in refused.items()
    }


@pytest.mark.s3
def test_a_bucket_that_is_missing_or_closed_is_one_refused_row(s3_uri, place, monkeypatch):
    from infra.stores import s3_store

    open_store(s3_uri).write("1.jpg", b"x")
    missing = f"s3://missing-{uuid.uuid4().hex}/1.jpg"
    num_accepted, refused = prepared(place, [missing, f"{s3_uri}/gone.jpg", f"{s3_uri}/{'x' * 1200}"])
    assert num_accepted == len(PICTURES)
    assert {name: reason for name, (reason, _) in refused.items()} == dict.fromkeys(refused, "unreadable")
    assert len(refused) == 3
    assert refused[missing][1].startswith(f"no access to {missing}: ")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not the secret")
    s3_store._filesystem.cache_clear()
    try:
        num_accepted, refused = prepared(place, [f"{s3_uri}/1.jpg"])
    finally:
        s3_store._filesystem.cache_clear()
    assert num_accepted == len(PICTURES)
    assert refused[f"{s3_uri}/1.jpg"][1].startswith(f"no access to {s3_uri}/1.jpg: ")
