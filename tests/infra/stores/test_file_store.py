"""What a path below a file store may lead to besides a file; test_storage.py tests what all stores promise."""

import fcntl
import os
import socket

import pytest

from vitline.infra.storage import StoreFailed, open_store
from vitline.infra.stores import file_store


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with one object, and names that lead to no file."""
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 108 bytes
    (tmp_path / "object").write_bytes(b"12345")
    (tmp_path / "folder").mkdir()
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    links = {
        "loop": "loop",
        "there": "back",
        "back": "there",
        "to pipe": "pipe",
        "to object": "object",
        "long": "x" * 300,
    }
    for name, target in {**links, "zero": "/dev/zero", "terminal": "/dev/tty", "gone": "nowhere"}.items():
        os.symlink(target, name)
    return open_store(tmp_path)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("folder", "a folder"),
        ("object/below", "a folder of the path is a file"),
        ("x" * 300, "too long for this disk"),
        ("x/" * 3000 + "x", "too long for this disk"),
        ("long", "too long for this disk"),
        ("loop", "links in a circle"),
        ("there/below", "links in a circle"),
        ("pipe", r"a pipe \(FIFO\), not a file"),
        ("to pipe", r"a pipe \(FIFO\), not a file"),
        ("socket", "a socket, not a file"),
        ("zero", "a device, not a file"),
        ("terminal", "a device, not a file"),
        ("gone", "No such file"),
    ],
)
def test_a_path_that_leads_to_no_file_is_a_missing_object_with_a_reason(store, key, reason):
    for read in (store.read, store.size, store.open, store.read_tagged):
        with pytest.raises(FileNotFoundError, match=reason):
            read(key)
    assert not store.exists(key)


def test_scan_returns_the_files_among_other_entries(store):
    assert {(found.key, found.size) for found in store.scan()} == {("object", 5), ("to object", 5)}
    assert store.read("to object", 1, 3) == b"23"


def test_a_lock_that_another_process_keeps_is_named_and_nothing_is_changed(store, tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "_LOCK_WAIT_S", 0.05)
    tag = store.create("lease", b"mine")
    with open(tmp_path / ".lock-lease", "ab") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)  # as a process does that was stopped in the middle of a swap
        with pytest.raises(StoreFailed, match=r"lease cannot be replaced: .*\.lock-lease for 0.05 s.*kill -CONT"):
            store.compare_and_swap("lease", b"other", tag)
        assert store.read("lease") == b"mine"
    store.compare_and_swap("lease", b"other", tag)
