"""The cache never fails, never gives other bytes than were put, and stays under its cap, whatever disk and processes do."""

import fcntl
import logging
import multiprocessing
import os
import random
import shutil
import signal
import stat
from contextlib import contextmanager
from pathlib import Path

import pytest

from vitline.infra.stores.disk_cache import DiskCache
from vitline.infra.stores.store import TEMPORARY

CAP, SIZE = 40_000, 1_000


def value(namespace, key):
    """The bytes of an entry, which follow from its name."""
    return random.Random(f"{namespace}/{key}").randbytes(SIZE)


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "nvme", CAP)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def fill(cache, namespace, keys):
    for key in map(str, keys):
        cache.put(namespace, key, value(namespace, key))


def held(cache, namespace, keys):
    """The keys that are in the cache, whose bytes must be right. Does not count as a use."""
    found = [str(key) for key in keys if (cache.folder / namespace / str(key)).exists()]
    for key in found:
        assert (cache.folder / namespace / key).read_bytes().endswith(value(namespace, key))
    return [int(key) for key in found]


@contextmanager
def locked(cache):
    """Holds the lock of a cache, as another process does."""
    with open(cache.folder / ".lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def num_bytes(cache):
    """Bytes of all files, with those that are being written."""
    with locked(cache):
        return sum(path.stat().st_size for path in cache.folder.glob("*/*"))


def test_entries_are_private_and_are_found_by_another_object(cache, tmp_path, monkeypatch):
    assert cache.get("a", "1") is None
    cache.put("a", "1", b"one")
    cache.put("a", "1", b"one")
    cache.put("a", "empty", b"")
    monkeypatch.setenv("HOME", str(tmp_path))
    again = DiskCache("~/nvme", CAP)
    assert (again.get("a", "1"), again.get("a", "empty"), again.get("b", "1")) == (b"one", b"", None)
    again.discard("a", "1")
    again.discard("a", "1")
    assert cache.get("a", "1") is None
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in [cache.folder, *cache.folder.rglob("*")]}
    assert modes <= {0, 0o044}  # files in a folder that only its owner may enter
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_entries_used_least_recently_make_way(cache):
    fill(cache, "old", range(20))
    fill(cache, "older", range(19))
    for key in range(5):  # the entries written first are used last
        assert cache.get("old", str(key)) == value("old", key)
    later = DiskCache(cache.folder.parent, CAP)
    fill(later, "new", range(10))
    assert held(later, "new", range(10)) == [*range(10)]
    left = held(later, "old", range(20))
    assert left[:5] == [*range(5)]
    assert left[5:] == [*range(20 - len(left[5:]), 20)]
    assert len(left) + len(held(later, "older", range(19))) in {28, 29}
    assert num_bytes(cache) <= CAP


def test_a_group_larger_than_the_cache_keeps_what_it_has(cache, warnings):
    """Otherwise an entry that is used once per epoch would be removed shortly before its next use."""
    for _ in range(3):
        fill(cache, "large", range(100))
        assert held(cache, "large", range(100)) == [*range(39)]
    assert len(warnings()) == 1
    assert "is full" in warnings()[0]
    cache.put("other", "1", value("other", "1"))
    assert cache.get("other", "1") is None
    DiskCache(cache.folder.parent, CAP).put("other", "1", value("other", "1"))  # a process that reads something else
    assert cache.get("other", "1") == value("other", "1")


def use(folder, namespace, seed):
    """Reads and writes at random in a process of its own; the exit code says if a wrong byte was read."""
    cache, rng, hits = DiskCache(folder, CAP), random.Random(seed), 0
    for step in range(300):
        cache._used_namespaces.clear()
        cache._write_after = 0.0
        of, key = rng.choice([namespace, "shared"]), str(rng.randrange(25))
        if (found := cache.get(of, key)) is None:
            cache.put(of, key, value(of, key))
        elif found != value(of, key):
            os._exit(1)
        hits += found is not None
        if step == 0:
            Path(folder, f"began-{seed}").touch()
    os._exit(0 if hits else 2)


def test_processes_that_share_a_cache_read_right_bytes_and_stay_under_the_cap(cache):
    fill(cache, "shared", range(3))
    context, folder = multiprocessing.get_context("spawn"), str(cache.folder.parent)
    processes = [context.Process(target=use, args=(folder, f"own{i}", i)) for i in range(2)]
    for process in processes:
        process.start()
    most = 0
    for process in processes:
        while process.is_alive():
            most = max(most, num_bytes(cache))
            process.join(0.02)
    assert [process.exitcode for process in processes] == [0, 0]
    assert CAP / 2 < max(most, num_bytes(cache)) <= CAP
    assert not [*cache.folder.glob(f"*/{TEMPORARY}*")]


LARGE = 10_000  # times SIZE: the write takes long enough to be met


def write_for_ever(folder):
    cache = DiskCache(folder, 10 * LARGE * SIZE)
    for key in map(str, range(10**9)):
        cache.discard("a", str(int(key) - 2))
        cache.put("a", key, value("a", key) * LARGE)


def test_kill_while_writing_leaves_a_usable_cache(cache):
    folder, context = cache.folder.parent, multiprocessing.get_context("spawn")
    for _ in range(3):
        writer = context.Process(target=write_for_ever, args=(str(folder),))
        writer.start()
        while not [*cache.folder.glob(f"*/{TEMPORARY}*")]:
            assert writer.is_alive()
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        after = DiskCache(folder, 10 * LARGE * SIZE)
        for path in cache.folder.glob("a/[0-9]*"):
            assert after.get("a", path.name) == value("a", path.name) * LARGE
        after.put("b", "1", b"one")
        assert after.get("b", "1") == b"one"
        assert not [*cache.folder.glob(f"*/{TEMPORARY}*")]
        assert after._entries._count() == num_bytes(cache)


@pytest.mark.parametrize("at", [0, 6, 10, 16, 500, SIZE + 15, None])
def test_damaged_entry_is_deleted_and_can_be_written_again(cache, warnings, at):
    """One changed byte anywhere, or a file that was cut short."""
    fill(cache, "a", range(3))
    for key in ("0", "1"):
        path = cache.folder / "a" / key
        data = bytearray(path.read_bytes())
        if at is None:
            del data[int(key) * 700 :]
        else:
            data[at] ^= 1
        path.write_bytes(data)
        assert cache.get("a", key) is None
        assert not path.exists()
    assert [text for text in warnings() if "/a/0 is damaged" in text] == warnings()
    fill(cache, "a", range(3))
    assert [cache.get("a", str(key)) for key in range(3)] == [value("a", key) for key in range(3)]


def test_bytes_of_another_entry_are_damage(cache):
    fill(cache, "a", range(2))
    shutil.copy(cache.folder / "a" / "0", cache.folder / "a" / "1")
    assert cache.get("a", "1") is None


def test_full_disk_is_one_warning_and_what_is_there_is_still_read(cache, warnings, full_disk):
    fill(cache, "a", range(2))
    with full_disk(SIZE // 2):
        fill(cache, "a", range(2, 9))
    assert [text for text in warnings() if "cannot be used" in text and "shard_cache_dir" in text] == warnings()
    assert len(warnings()) == 1
    assert [cache.get("a", str(key)) for key in range(2)] == [value("a", key) for key in range(2)]
    assert held(cache, "a", range(9)) == [0, 1]
    cache._write_after = 0.0  # five minutes later there is room
    fill(cache, "a", range(9))
    assert held(cache, "a", range(9)) == [*range(9)]
    assert len(warnings()) == 1
    assert not [*cache.folder.glob(f"*/{TEMPORARY}*")]


def test_folder_that_vanishes_is_one_warning_and_is_made_again(cache, warnings):
    fill(cache, "a", range(2))
    shutil.rmtree(cache.folder.parent)
    assert cache.get("a", "1") is None
    fill(cache, "a", range(9))
    assert len(warnings()) == 1
    assert "No such file or directory" in warnings()[0]
    cache._write_after = 0.0
    fill(cache, "a", range(9))
    assert held(cache, "a", range(9)) == [*range(9)]


def no_folder(folder):
    folder.parent.write_bytes(b"a file")


def writable_by_others(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def link(folder):
    folder.parent.mkdir(parents=True)
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


def of_somebody_else(folder):
    folder.mkdir(parents=True)
    os.chown(folder, os.getuid() + 1, os.getgid())


ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder away")


@pytest.mark.parametrize(
    "plant", [no_folder, writable_by_others, link, pytest.param(of_somebody_else, marks=ROOT_ONLY)]
)
def test_unusable_folder_is_one_warning(cache, warnings, plant):
    plant(cache.folder)
    for _ in range(2):
        fill(cache, "a", range(9))
        assert cache.get("a", "1") is None
    assert len(warnings()) == 1
    assert f"{cache.folder} cannot be used" in warnings()[0]


def test_a_process_that_keeps_the_lock_delays_no_read_and_fails_no_write(cache, warnings):
    fill(cache, "a", range(2))
    with locked(cache):
        fill(cache, "a", range(9))
        assert cache.get("a", "1") == value("a", "1")
        assert DiskCache(cache.folder.parent, CAP).get("a", "1") == value("a", "1")
    assert held(cache, "a", range(9)) == [0, 1]
    cache._write_after = 0.0
    fill(cache, "a", range(4))
    assert held(cache, "a", range(4)) == [*range(4)]
    assert not warnings()


def test_count_is_corrected_where_entries_have_been_deleted(cache):
    fill(cache, "a", range(39))
    shutil.rmtree(cache.folder / "a")
    fill(cache, "a", range(39))
    assert held(cache, "a", range(39)) == [*range(39)]
