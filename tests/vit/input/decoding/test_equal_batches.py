"""Batches are equal bit for bit, whatever the number of input processes. The processes are threads here."""

import errno
import hashlib
import os
import socket
from dataclasses import fields, replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitline.data_prep.shard_format import ShardError
from vitline.infra.storage import open_store
from vitline.infra.stores.disk_cache import disk_cache
from vitline.vit.input.batches import Batch, LoaderResources, MultiLabels, Source, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.input.decoding.shared_memory import BatchBuffers, Link, new_memory
from vitline.vit.input.mapped_labels import MappedLabels, find_kept_rows
from vitline.vit.input.prefetch import WaitTimes

from ....batches import train_batches
from ..conftest import make_corpus
from ..test_shard_cache import DistantStore

CONFIG = InputConfig(
    global_batch_size=12, num_lanes=6, shuffle_window=2, augment=AugmentConfig(image_size_px=16, min_area_fraction=0.3)
)
AUGMENTED = AugmentConfig(
    image_size_px=16, randaugment_layers=2, randaugment_magnitude=9, mixup_alpha=0.8, cutmix_alpha=1.0
)
DROPS = (2, None, 3, None, 0)
GOLDEN = {
    "whole": "1a534164e8b7db03",
    "damaged": "9736a0f487c849c1",
    "several": "35d99d6c04a01e90",
    "mixture": "7622008b0be1db08",
}

pytestmark = pytest.mark.usefixtures("in_threads")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Sources by name: one corpus, one with bad examples, one with several labels, and a mixture that drops classes."""
    make = tmp_path_factory.mktemp
    whole, damaged = make_corpus(make("whole")), make_corpus(make("damaged"), undecodable={13, 30})
    lists = [[i % 5, (i + 2) % 5][: 1 + i % 2] for i in range(47)]
    several = make_corpus(make("several"), labels=lists, weights=[[0.5, 1.0][: 1 + i % 2] for i in range(47)])
    kept = find_kept_rows(damaged.store, damaged.manifest, "train", DROPS)

    def source(corpus, *more):
        return Source(corpus.store, corpus.manifest, "train", *more)

    mixture = [
        source(whole, 3.0, MappedLabels((0, 1, 2, 3, 4), 5, True)),
        source(damaged, 1.0, MappedLabels(DROPS, 5, True, kept)),
    ]
    return {"whole": [source(whole)], "damaged": [source(damaged)], "several": [source(several)], "mixture": mixture}


def steps_of(sources, config=CONFIG, **changes):
    loading = LoaderResources(**{f.name: changes.pop(f.name) for f in fields(LoaderResources) if f.name in changes})
    asked = {"seed": 11, "num_steps": 9, "micro_batch_size": 5, "mask_bad": True} | changes
    with source_batches(sources, config, **asked, loading=loading) as batches:
        return list(batches)  # which keeps them all while later ones are made


def assert_equal(found, expected):
    assert [len(step) for step in found] == [len(step) for step in expected]
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        for name in (f.name for f in fields(Batch)):
            mine, theirs = getattr(one, name), getattr(other, name)
            if isinstance(theirs, MultiLabels):
                assert torch.equal(mine.weights, theirs.weights), name
                mine, theirs = mine.ids, theirs.ids
            if isinstance(theirs, torch.Tensor):
                assert mine.dtype == theirs.dtype, name
                assert torch.equal(mine, theirs), name
            elif name == "bad":
                assert sorted(mine) == sorted(theirs)
            else:
                assert mine == theirs, name


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_batches_do_not_depend_on_processes(corpora, data):
    lanes = data.draw(st.sampled_from((1, 3, 6)), "lanes")
    augment = data.draw(st.sampled_from((CONFIG.augment, AUGMENTED)), "augment")
    config = input_config(lanes, augment)
    sources = corpora[data.draw(st.sampled_from(sorted(corpora)), "corpus")]
    world_size = data.draw(st.integers(1, lanes), "workers")
    asked = {
        "rank": data.draw(st.integers(0, world_size - 1), "rank"),
        "world_size": world_size,
        "start_step": data.draw(st.sampled_from((0, 5)), "first step"),
        "micro_batch_size": data.draw(st.sampled_from((1, 4, 12)), "micro-batch"),
    }
    resources = {
        "processes": data.draw(st.integers(1, lanes // world_size), "processes"),
        "threads": data.draw(st.sampled_from((1, 4)), "threads"),
        "decoded_cache_bytes": data.draw(st.sampled_from((0, 20_000, 10**7)), "cache"),
    }
    expected = steps_of(sources, config, **asked)
    assert_equal(steps_of(sources, config, **asked, **resources), expected)


def input_config(lanes, augment):
    return InputConfig(global_batch_size=12, num_lanes=lanes, shuffle_window=2, augment=augment)


def test_processes_share_the_shard_cache(corpora, tmp_path):
    disk_cache.cache_clear()
    [source] = corpora["whole"]
    distant = [replace(source, corpus=DistantStore.at(source.corpus.uri))]
    cached = {"shard_cache_dir": str(tmp_path), "shard_cache_bytes": 10**8, "processes": 3, "num_steps": 8}
    expected = steps_of([source], num_steps=8)
    assert_equal(steps_of(distant, **cached), expected)
    assert any(tmp_path.rglob("*"))
    assert_equal(steps_of(distant, **cached), expected)


def test_errors_are_those_of_this_process(corpora, corpus_maker, tmp_path):
    for processes in (0, 2):
        with pytest.raises(ValueError, match=r"row (13|30) of split 'train'\) cannot be decoded"):
            steps_of(corpora["damaged"], mask_bad=False, processes=processes)
    cut = corpus_maker(tmp_path)
    key = "train/s000/part-00001-of-00004.parquet"
    cut.store.write(key, cut.store.read(key)[:1000])
    with pytest.raises(ShardError, match="part-00001-of-00004"):
        steps_of([Source(cut.store, cut.manifest, "train")], processes=2)


def test_what_cannot_be_decoded_in_processes_is_refused(corpora):
    with pytest.raises(ValueError, match="decode_processes=4 must be at most 3"):
        steps_of(corpora["whole"], world_size=2, processes=4)
    with pytest.raises(ValueError, match="Set processes=0"):
        steps_of(corpora["whole"], processes=2, shared_cache=DecodedCache(10))
    [source] = corpora["whole"]
    with pytest.raises(ValueError, match=r"memory://x exists in this process only.*Set decode_processes=0"):
        steps_of([replace(source, corpus=open_store("memory://x"))], processes=2)


def test_resources_are_divided_among_the_processes():
    loading = LoaderResources(threads=5, processes=2, decoded_cache_bytes=10, read_ahead_bytes=100)
    assert [loading.of_process(n).threads for n in range(2)] == [3, 2]
    assert loading.of_process(0) == LoaderResources(threads=3, decoded_cache_bytes=5, read_ahead_bytes=50)
    assert replace(loading, threads=1).of_process(1).threads == 1


def test_a_connection_that_ends_within_a_message_ends_the_process(monkeypatch):
    """Its descriptors are missing: whoever waits for the steps that they belong to learns it."""

    def closed_meanwhile(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(socket, "recv_fds", closed_meanwhile)
    mine, others = map(Link, socket.socketpair())
    memory = new_memory(8)
    mine.send([0], [memory])
    with pytest.raises(EOFError, match="the connection has ended"):
        others.receive()
    for link in (mine, others):
        link.close()
    os.close(memory)


def test_memory_is_used_again_once_no_tensor_of_it_is_left():
    slots = BatchBuffers(4096)
    first, kept, _ = slots.take()
    part = kept[100:200].view(torch.int32)
    del kept
    second, other, descriptor = slots.take()
    assert first != second
    assert descriptor is not None
    part.fill_(7)
    assert not other.any()
    del part
    again, memory, descriptor = slots.take()
    assert (again, descriptor) == (first, None)
    assert memory[100:104].tolist() == [7, 0, 0, 0]


def test_a_consumer_that_drops_batches_needs_few_slots(corpora, monkeypatch):
    taken = set()
    real = BatchBuffers.take
    monkeypatch.setattr(BatchBuffers, "take", lambda slots: (found := real(slots), taken.add(found[0]))[0])
    [source] = corpora["whole"]
    asked = {"seed": 1, "micro_batch_size": 12, "num_steps": 60, "loading": LoaderResources(processes=2)}
    with train_batches(source.corpus, source.manifest, "train", CONFIG, **asked) as batches:
        assert sum(batch.num_examples for step in batches for batch in step) == 60 * 12
        assert batches.effort.tasks_cpu_s > 0
        assert batches.waits.total_s > 0
    assert (
        len(taken) <= 7
    )  # two that are queued, those of both loops, one that the planner holds and one that it begins


def test_waits_are_divided_like_those_of_the_processes():
    assert WaitTimes(3.0, 1.0, 0.0).scaled_to(2.0) == WaitTimes(1.5, 0.5, 0.0)
    assert WaitTimes().scaled_to(2.0) == WaitTimes(0.0, 2.0, 0.0)
    assert np.isclose(WaitTimes(1, 2, 3).plus(WaitTimes(1, 1, 1)).total_s, 9)


@pytest.mark.parametrize(("name", "expected"), GOLDEN.items())
def test_batches_are_the_golden_ones(corpora, name, expected):
    """Examples, pixels and labels of 20 steps on two ranks, augmented: a change of order or pixels changes every training."""
    found = hashlib.sha256()
    for rank in (0, 1):
        for batch in chain(*steps_of(corpora[name], input_config(6, AUGMENTED), num_steps=20, rank=rank, world_size=2)):
            several = batch.labels if isinstance(batch.labels, MultiLabels) else None
            for tensor in (batch.images, *((several.ids, several.weights) if several else (batch.labels,))):
                found.update(tensor.numpy().tobytes())
    assert found.hexdigest()[:16] == expected
