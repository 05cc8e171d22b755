"""Records of a far store are read once, and again only where they have changed."""

import gzip
import json
from uuid import uuid4

import pytest

from vitline.infra.storage import StoreRefused, cached_records, open_store
from vitline.infra.stores.cached_records import INDEX_KEY
from vitline.infra.stores.memory_store import MemoryStore

NUM = 150


class FarStore(MemoryStore):
    """A store in memory that is read by requests, and counts them."""

    high_latency = True

    def __init__(self, name):
        super().__init__(name)
        self.requests = 0

    def _get(self, key):
        self.requests += 1
        return super()._get(key)

    def scan(self, prefix=""):
        found = list(super().scan(prefix))
        self.requests = 0
        return iter(found)


@pytest.fixture
def store():
    store = FarStore(f"far-{uuid4().hex}")
    for number in range(NUM):
        store.write_json(f"runs/r{number}/state.json", {"step": number})
    store.write("runs/r0/weights", b"\xff" * 10)
    store.write_json("pipelines/p.json", {})
    return store


def steps(store):
    """Steps of all runs, and the number of requests beside the listing."""
    with cached_records(store, "runs/") as view:
        found = [view.child(f"runs/r{number}").read_json_or_none("state.json") for number in range(NUM)]
    return [each and each["step"] for each in found], store.requests


def test_a_second_view_reads_only_what_has_changed(store):
    assert steps(store) == (list(range(NUM)), NUM + 1)  # and the index, which is not there yet
    assert steps(store) == (list(range(NUM)), 1)
    store.write_json("runs/r7/state.json", {"step": -7})
    store.delete("runs/r8/state.json")
    assert steps(store) == ([None if n == 8 else -7 if n == 7 else n for n in range(NUM)], 2)


def test_an_absent_record_costs_no_request_and_keys_are_those_of_the_listing(store):
    with cached_records(store, "runs/") as view:
        run = view.child("runs/r0")
        assert (run.read_json_or_none("stop.json"), run.list(), run.exists("state.json")) == (
            None,
            ["state.json", "weights"],
            True,
        )
        store.delete("runs/r0/state.json")
        assert run.list("state") == ["state.json"]
        sizes = {each.key: each.size for each in view.scan("runs/r0/")}
        assert sizes == {"runs/r0/state.json": 15, "runs/r0/weights": 10}
    assert not store.exists(INDEX_KEY)  # so few reads are not worth a write


# With names: those made from the bytes hold the second of their compression, and each process of a run must collect the same.
@pytest.mark.parametrize(
    "damaged",
    [b"", b"text", gzip.compress(b"[]"), gzip.compress(json.dumps({"format": 0, "records": {}}).encode())],
    ids=["empty", "text", "no records", "another format"],
)
def test_an_index_that_cannot_be_read_is_written_anew(store, damaged):
    store.write(INDEX_KEY, damaged)
    assert steps(store) == (list(range(NUM)), NUM + 1)
    assert steps(store) == (list(range(NUM)), 1)


def test_somebody_who_may_only_read_reads_all(store, monkeypatch):
    def refuse(key, data):
        raise StoreRefused("put_object: 403", 403, "AccessDenied", "")

    monkeypatch.setattr(store, "write", refuse)
    assert steps(store) == steps(store) == (list(range(NUM)), NUM + 1)


def test_records_that_were_deleted_or_belong_to_other_prefixes(store):
    assert steps(store)[1] == NUM + 1
    for number in range(NUM):
        store.delete(f"runs/r{number}/state.json")
        store.write_json(f"pipelines/p{number}.json", {"n": number})
    with cached_records(store, "pipelines/") as view:  # knows nothing of runs, and leaves them in the index
        assert view.read_tagged("pipelines/p3.json") == store.read_tagged("pipelines/p3.json")
        for key in view.list("pipelines/"):
            view.read(key)
        with pytest.raises(ValueError, match="'runs/r1' does not lie below pipelines/"):
            view.read("runs/r1")
        with pytest.raises(TypeError, match="cannot be written"):
            view.write("pipelines/p3.json", b"")
    kept = json.loads(gzip.decompress(store.read(INDEX_KEY)))["records"]
    assert len([key for key in kept if key.startswith("pipelines/")]) == NUM + 1
    assert "runs/r5/state.json" in kept
    with cached_records(store, "runs/") as view:
        assert view.list("runs/") == ["runs/r0/weights"]


def test_on_files_the_store_itself_is_read(tmp_path):
    store = open_store(tmp_path)
    with cached_records(store, "runs/") as view:
        assert view is store
