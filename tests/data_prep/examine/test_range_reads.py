"""Reads of many ranges: each gets its own bytes, whatever is read together; small neighbours cost one request."""

import random

import numpy as np
import pytest

from vitline.data_prep.config import CorpusConfig, Digits
from vitline.data_prep.examine.local_range import LocalRange
from vitline.data_prep.examine.range_reads import ByteRange, joint_reads, read_ahead
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare import job
from vitline.infra.storage import open_store
from vitline.infra.stores.file_store import FileStore

KIB = 1024


@pytest.fixture
def packed(tmp_path):
    """A store with two objects of 3 MiB and 10 bytes, and the content of each."""
    content = {"a": np.random.default_rng(0).bytes(3 * KIB * KIB), "b": b"0123456789"}
    store = open_store(tmp_path.as_uri())
    for key, data in content.items():
        store.write(key, data)
    return store, content


@pytest.fixture
def distant(monkeypatch):
    """Counts the requests, where files are read like objects of a remote store."""
    requests = []
    read, read_into = FileStore.read, FileStore.read_into

    def counted(self, key, start=0, end=None):
        requests.append((key, start, end))
        return read(self, key, start, end)

    def counted_into(self, key, start, buffer):
        requests.append((key, start, start + len(buffer)))
        return read_into(self, key, start, buffer)

    monkeypatch.setattr(FileStore, "high_latency", True)
    monkeypatch.setattr(FileStore, "read", counted)
    monkeypatch.setattr(FileStore, "read_into", counted_into)
    return requests


def some_ranges(store, draw):
    ranges = []
    for _ in range(300):
        start = draw.choice([draw.randrange(3 * KIB * KIB), draw.randrange(12)])
        end = draw.choice([None, start + draw.choice([0, 1, 900, 50 * KIB, 2 * KIB * KIB])])
        ranges.append(draw.choice([None, ByteRange(store.uri, draw.choice("ab"), start, end)]))
    return sorted(ranges, key=lambda each: each[:3] if each else ()) if draw.random() < 0.5 else ranges


@pytest.mark.parametrize("seed", range(4))
def test_each_range_gets_its_own_bytes_in_order(packed, distant, seed):
    store, content = packed
    ranges = some_ranges(store, random.Random(seed))
    found = [(i, read()) for i, read in read_ahead(enumerate(ranges))]
    assert found == [(i, content[r.key][r.start : r.end] if r else b"") for i, r in enumerate(ranges)]


def test_small_neighbours_share_a_request(packed, distant):
    store, content = packed
    tight = [ByteRange(store.uri, "a", 1000 * i, 1000 * i + 900) for i in range(3000)]
    assert [read() for _, read in read_ahead(enumerate(tight))] == [content["a"][r.start : r.end] for r in tight]
    assert len(distant) == 3  # 3 MB, 1 MiB each
    far = [ByteRange(store.uri, "a", start, start + 10) for start in (0, 70 * KIB, 140 * KIB)]
    large = [ByteRange(store.uri, "a", start, start + 700 * KIB) for start in (0, 700 * KIB)]
    back = [ByteRange(store.uri, "a", start, start + 10) for start in (20, 10)]
    for apart in (far, large, back, [tight[0], ByteRange(store.uri, "b", 0, 5)]):
        assert len([*joint_reads(enumerate(apart))]) == len(apart)


def test_missing_object_fails_where_its_bytes_are_used(packed, distant):
    store, _ = packed
    ranges = [ByteRange(store.uri, key, 0, 5) for key in ("a", "missing", "b")]
    first, missing, last = [read for _, read in read_ahead(enumerate(ranges))]
    assert last() == b"01234"
    assert len(first()) == 5
    with pytest.raises(FileNotFoundError):
        missing()


def test_local_ranges_are_not_read(packed):
    store, _ = packed
    ((_, read),) = read_ahead([("one", ByteRange(store.uri, "b", 2, 5))])
    found = read()
    assert isinstance(found, LocalRange)
    assert found.read(0, 10) == b"234"
    found.close()


def test_packed_images_need_few_requests_and_give_the_same_corpus(tmp_path, distant, monkeypatch):
    """The write stage reads them in random order, many at a time."""
    request = CorpusConfig(name="digits", source=Digits())
    roots = [open_store((tmp_path / name).as_uri()) for name in ("distant", "local")]
    (manifest,) = job.prepare([request], roots[0].uri)
    num_reads = sum(key.startswith("spill/") for key, _, _ in distant)
    assert manifest.counts.num_accepted == 1797
    assert 0 < num_reads < 100  # most of them of pictures in the report
    monkeypatch.setattr(FileStore, "high_latency", False)
    (local,) = job.prepare([request], roots[1].uri)
    assert local.digest == manifest.digest
    shards = [{key: corpus_store(root, request).read(key) for key in files(root, request)} for root in roots]
    assert shards[0] == shards[1]


def files(root, request):
    return [key for key in corpus_store(root, request).list() if key.endswith(".parquet") and not key.startswith("_")]
