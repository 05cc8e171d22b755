"""The six operations of a store behave alike on every backend (infra/stores/README.md)."""

import errno
import io
import multiprocessing
import pickle
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitline.infra.storage import (
    PreconditionFailed,
    Unwritable,
    check_writable,
    open_store,
    probe_conditional_writes,
    raising_unwritable,
)

BACKENDS = [
    "file",
    "memory",
    pytest.param("s3", marks=pytest.mark.s3),
    "gs",
    pytest.param("az", marks=pytest.mark.servers),
]


@pytest.fixture(params=BACKENDS)
def store(request, tmp_path):
    if request.param in ("s3", "gs", "az"):
        uri = request.getfixturevalue(f"{request.param}_uri")
    else:
        uri = f"{tmp_path}/store" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    opened = open_store(uri)
    yield opened
    for key in opened.list():
        opened.delete(key)


def test_read_returns_what_was_written(store):
    store.write("a/b c/ü+%&.bin", b"0123456789")
    assert store.read("a/b c/ü+%&.bin") == b"0123456789"
    ranges = {(2, 5): b"234", (8, None): b"89", (8, 99): b"89", (10, None): b"", (99, 120): b"", (4, 4): b""}
    assert {span: store.read("a/b c/ü+%&.bin", *span) for span in ranges} == ranges
    buffer = bytearray(b"-----")
    assert store.read_into("a/b c/ü+%&.bin", 7, memoryview(buffer)) == 3
    assert store.read_into("a/b c/ü+%&.bin", 0, memoryview(buffer)[4:]) == 1
    assert buffer == b"789-0"
    assert store.size("a/b c/ü+%&.bin") == 10
    store.write("a/b c/ü+%&.bin", b"")
    assert store.read("a/b c/ü+%&.bin") == b""
    store.delete("a/b c/ü+%&.bin")
    store.delete("a/b c/ü+%&.bin")
    assert not store.exists("a/b c/ü+%&.bin")


def test_reading_a_missing_object_names_its_key(store):
    for read in (store.read, store.read_tagged, store.size, store.open, store.read_json):
        with pytest.raises(FileNotFoundError, match="nothing/here"):
            read("nothing/here")
    store.write("folder/object", b"x")
    assert not store.exists("folder")
    with pytest.raises(FileNotFoundError):
        store.read("folder")


def test_list_matches_key_prefixes_and_returns_finished_objects_only(store):
    keys = ["runs/a/state.json", "runs/a/step-1", "runs/ab/step-2", "top"]
    for key in reversed(keys):
        store.create(key, b"{}")
    _, tag = store.read_tagged("top")
    store.compare_and_swap("top", b"swapped", tag)
    with store.writer("half") as file:
        file.write(b"not yet")
        assert store.list() == keys
    store.delete("half")
    assert store.list("runs/a") == keys[:3]
    assert store.list("runs/a/") == keys[:2]
    assert store.list("runs/a/st") == keys[:2]
    assert store.list("none") == store.list("none/at/all") == []
    assert store.child("runs/ab").list() == ["step-2"]
    for prefix in ("", "runs/a", "runs/a/st", "none"):
        assert sorted((found.key, found.size) for found in store.scan(prefix)) == [
            (key, store.size(key)) for key in store.list(prefix)
        ]


def test_scan_returns_a_new_tag_for_a_replaced_object(store):
    for key in ("d/b", "d-b", "d.b", "da"):
        store.write(key, b"1")
    before = {found.key: found.tag for found in store.scan()}
    store.write("d-b", b"other")
    after = {found.key: found.tag for found in store.scan()}
    assert {key for key in before if before[key] != after[key]} == {"d-b"}


def test_writer_creates_the_object_only_on_a_clean_exit(store):
    def fail_half_way():
        with store.writer("streamed") as file:
            file.write(b"half" * 3_000_000)
            raise OSError("disk of the source")

    with pytest.raises(OSError, match="disk of the source"):
        fail_half_way()
    assert store.list() == []
    with store.writer("streamed") as file:
        for part in (b"ab" * 2_500_000, b"cd" * 2_500_000):
            file.write(part)
        assert not store.exists("streamed")
    assert store.size("streamed") == 10_000_000
    assert store.read("streamed", 4_999_998, 5_000_002) == b"abcd"


def test_pyarrow_writes_and_reads_through_the_store(store):
    table = pa.table({"n": list(range(1000)), "text": [str(n) * 50 for n in range(1000)]})
    with store.writer("table.parquet") as file:
        pq.write_table(table, file, row_group_size=100)
    with store.open("table.parquet") as file:
        shard = pq.ParquetFile(file)
        assert shard.num_row_groups == 10
        assert shard.read_row_group(7) == table.slice(700, 100)
    with store.open("table.parquet") as file:
        assert file.seek(-4, io.SEEK_END) == store.size("table.parquet") - 4
        assert file.read() == b"PAR1"


def test_create_fails_if_the_object_exists(store):
    store.create("lease", b"mine")
    with pytest.raises(PreconditionFailed, match="lease"):
        store.create("lease", b"yours")
    assert store.read("lease") == b"mine"


def test_compare_and_swap_fails_if_the_object_changed(store):
    tag = store.create("lease", b"1")
    assert store.read_tagged("lease") == (b"1", tag)
    second = store.compare_and_swap("lease", b"2", tag)
    with pytest.raises(PreconditionFailed):
        store.compare_and_swap("lease", b"3", tag)
    third = store.compare_and_swap("lease", b"3", second)
    assert store.read_tagged("lease") == (b"3", third)
    with pytest.raises(PreconditionFailed):
        store.compare_and_swap("absent", b"1", third)
    store.delete("lease")
    with pytest.raises(PreconditionFailed):
        store.compare_and_swap("lease", b"4", third)
    assert store.list() == []


def test_exactly_one_of_concurrent_creates_succeeds(store):
    def create(n):
        try:
            store.create("lease", str(n).encode())
        except PreconditionFailed:
            return None
        return n

    with ThreadPoolExecutor(8) as pool:
        winners = [n for n in pool.map(create, range(8)) if n is not None]
    assert [int(store.read("lease"))] == winners


def count_up(uri, times):
    store, done = open_store(uri), 0
    while done < times:
        value, tag = store.read_tagged("counter")
        try:
            store.compare_and_swap("counter", str(int(value) + 1).encode(), tag)
            done += 1
        except PreconditionFailed:
            continue


@pytest.mark.parametrize("store", [BACKENDS[0], BACKENDS[2]], indirect=True)
def test_concurrent_increments_by_compare_and_swap_are_not_lost(store):
    store.create("counter", b"0")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=count_up, args=(store.uri, 10)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert store.read("counter") == b"40"


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a\0b", "a/.tmp-1", ".lock-a"]
)
def test_invalid_keys_are_refused(store, key):
    for operation in (store.read, store.size, store.delete, store.open):
        with pytest.raises(ValueError, match="is not a valid key"):
            operation(key)
    for operation in (store.write, store.create):
        with pytest.raises(ValueError, match="is not a valid key"):
            operation(key, b"x")
    with pytest.raises(ValueError, match="is not a valid key"), store.writer(key):
        pass


def test_write_json_sorts_keys_and_refuses_nan(store):
    store.write_json("state.json", {"b": (1, 2), "a": "ü"})
    assert store.read("state.json").decode() == '{\n "a": "ü",\n "b": [\n  1,\n  2\n ]\n}\n'
    assert store.read_json("state.json") == {"a": "ü", "b": [1, 2]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write_json("state.json", {"a": float("nan")})
    store.write("state.json", b"{")
    with pytest.raises(ValueError, match=r"state\.json is not JSON"):
        store.read_json("state.json")


def test_store_can_be_pickled(store):
    child = store.child("runs/x")
    child.write("state", b"1")
    again = pickle.loads(pickle.dumps(child))
    assert again == child
    assert again.read("state") == b"1"
    assert store.uri_of("runs/x/state") == child.uri_of("state") == f"{store.uri}/runs/x/state"


def test_probe_detects_a_store_that_ignores_write_conditions(store, monkeypatch):
    probe_conditional_writes(store)
    assert store.list() == []
    if store.uri.startswith("file://"):  # every start of a stage probes: files must not pile up
        assert list(Path(store.uri.removeprefix("file://")).glob(".*probe*")) == []

    def swap_unconditionally(key, data, tag):
        store.write(key, data)
        return "tag"

    monkeypatch.setattr(store, "compare_and_swap", swap_unconditionally)
    with pytest.raises(RuntimeError, match="compare-and-swap with a stale tag"):
        probe_conditional_writes(store)
    assert store.list() == []


def test_leftovers_of_a_killed_writer_are_found_when_old_enough(store, tmp_path):
    store.write("runs/a/state.json", b"{}")
    assert store.leftovers(older_than_s=-60) == []
    if store.uri.startswith("file://"):
        (tmp_path / "store/runs/a/.tmp-0123").write_bytes(b"half")
        assert store.leftovers(older_than_s=60) == []
        assert store.leftovers(older_than_s=-60) == ["runs/a/.tmp-0123"]
        assert store.child("runs").discard_leftovers(older_than_s=-60) == ["a/.tmp-0123"]
    assert store.discard_leftovers(older_than_s=-60) == store.leftovers(older_than_s=-60) == []
    assert store.list() == ["runs/a/state.json"]


@pytest.mark.parametrize(
    "uri",
    [
        "ftp://bucket/x",
        "gs:///x",
        "az://",
        "hf+lab://datasets/birds",
        "s3+://bucket",
        "s3+lab:///x",
        "s3://",
        "s3:///x",
        "memory://",
        "file://",
        "",
    ],
)
def test_invalid_store_uri_is_refused(uri):
    with pytest.raises(ValueError, match="is not a store"):
        open_store(uri)


def test_file_uris_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("store").uri == open_store(tmp_path / "store/").uri == f"file://{tmp_path}/store"


def test_error_of_an_unwritable_root_names_the_settings_that_choose_it(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(Unwritable, match=r"file cannot be written: .*--root or \$VITLINE_ROOT for corpora") as refused:
        open_store(tmp_path / "file").write("runs/a.json", b"{}")
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    with pytest.raises(Unwritable):
        check_writable(open_store(tmp_path / "file/store"))
    with pytest.raises(OSError, match="No space left") as full, raising_unwritable("the root"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.type is OSError
