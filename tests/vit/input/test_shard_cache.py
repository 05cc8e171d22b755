"""Batches are the same with a shard cache and without, whatever happens to it; later epochs read nothing from the store."""

import contextlib
import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from vitline.data_prep.shard_format import ShardError
from vitline.infra.config import replace
from vitline.infra.storage import Store
from vitline.infra.stores.disk_cache import DiskCache, disk_cache
from vitline.infra.stores.file_store import FileStore
from vitline.vit.input import read_shards
from vitline.vit.input.batches import LoaderResources, eval_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.run.resolved import resolve

from ...batches import train_batches
from ...trainings import finish

CONFIG = InputConfig(
    global_batch_size=12, num_lanes=6, shuffle_window=2, augment=AugmentConfig(image_size_px=16, min_area_fraction=0.3)
)
EPOCH = 4  # steps, of 48 examples


class DistantStore(FileStore):
    """Files that count as objects of a remote store. Counts the reads, also those of sizes."""

    high_latency = True
    open = Store.open  # by ranges
    reads = 0

    def read(self, key, start=0, end=None):
        DistantStore.reads += 1
        return super().read(key, start, end)

    def size(self, key):
        DistantStore.reads += 1
        return super().size(key)


@pytest.fixture(autouse=True)
def processes_of_their_own():
    """Each test begins as a new process does, which has no cache open."""
    disk_cache.cache_clear()
    DistantStore.reads = 0


@pytest.fixture(scope="module")
def corpus(tiny):
    return DistantStore.at(tiny.store.uri)


@pytest.fixture
def cached(tmp_path):
    return LoaderResources(shard_cache_dir=str(tmp_path / "nvme"), shard_cache_bytes=10**8)


def train(tiny, corpus, loading, steps=2 * EPOCH, start=0):
    """The batches of some steps, with the number of reads of the store in each step."""
    given = {"seed": 1, "micro_batch_size": 12, "start_step": start, "num_steps": steps, "loading": loading}
    with train_batches(corpus, tiny.manifest, "train", CONFIG, **given) as batches:
        return [batch for step in batches for batch in step]


@pytest.fixture(scope="module")
def expected(tiny, corpus):
    return train(tiny, corpus, LoaderResources())


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def reads_of(call):
    before = DistantStore.reads
    call()
    return DistantStore.reads - before


def test_later_epochs_read_nothing_from_the_store(tiny, corpus, cached, expected):
    with train_batches(
        corpus, tiny.manifest, "train", CONFIG, seed=1, micro_batch_size=12, num_steps=12 * EPOCH, loading=cached
    ) as batches:
        first = [next(batches)[0] for _ in range(2 * EPOCH)]  # and what is read ahead
        after_first = DistantStore.reads
        assert after_first > 14  # row groups, footers and the shard list
        assert len([*batches]) == 10 * EPOCH
    assert_same(first, expected)
    assert DistantStore.reads == after_first


def test_a_process_that_comes_later_reads_the_shard_list_only(tiny, corpus, cached, expected):
    """Another rank of the machine, a restart, or an evaluation, which also reads the footers from the cache."""
    train(tiny, corpus, cached, steps=EPOCH)
    disk_cache.cache_clear()
    of_list = reads_of(lambda: corpus.open("shards.parquet").read())
    assert reads_of(lambda: assert_same(train(tiny, corpus, cached), expected)) <= of_list + 1
    halves = [of_rank(cached, rank) for rank in range(2)]
    assert reads_of(lambda: [train(tiny, corpus, half) for half in halves]) <= 2 * (of_list + 1)
    given = (corpus, tiny.manifest, "train", CONFIG.augment)
    assert reads_of(lambda: [*eval_batches(*given, batch_size=6, loading=cached)]) <= of_list + 1


def evaluated(tiny, corpus, loading):
    return [*eval_batches(corpus, tiny.manifest, "train", CONFIG.augment, batch_size=6, loading=loading)]


def test_rows_in_order_are_read_with_one_request_per_shard(tiny, corpus, cached, monkeypatch):
    """13 row groups in 5 shards. From files each is read alone; two threads may read the same footer."""
    expected = evaluated(tiny, tiny.store, LoaderResources())
    num_reads = reads_of(lambda: assert_same(evaluated(tiny, corpus, LoaderResources()), expected))
    monkeypatch.setattr(read_shards, "_LOAD_BYTES", 1)
    assert reads_of(lambda: assert_same(evaluated(tiny, corpus, LoaderResources()), expected)) >= num_reads + 13 - 5
    monkeypatch.undo()
    for loading in (cached, of_rank(cached, 0)):
        assert reads_of(lambda loading=loading: evaluated(tiny, corpus, loading)) <= num_reads
    of_list = reads_of(lambda: corpus.open("shards.parquet").read())
    assert reads_of(lambda: assert_same(evaluated(tiny, corpus, cached), expected)) <= of_list + 1


def test_small_split_is_read_once_and_held(tiny, corpus, expected, monkeypatch):
    assert_same(train(tiny, tiny.store, LoaderResources()), expected)
    once = reads_of(lambda: assert_same(train(tiny, corpus, LoaderResources(), steps=EPOCH), expected[:EPOCH]))
    assert reads_of(lambda: assert_same(train(tiny, corpus, LoaderResources()), expected)) == once
    monkeypatch.setattr(read_shards, "_HELD_BYTES", 0)
    assert reads_of(lambda: assert_same(train(tiny, corpus, LoaderResources()), expected)) >= once + 13 - 5


def test_failed_read_of_a_held_split_is_tried_again(tiny, corpus, monkeypatch):
    with contextlib.closing(read_shards.SplitReader(corpus, tiny.manifest, "train", DecodedCache(0))) as reader:
        with monkeypatch.context() as failing:
            failing.setattr(DistantStore, "read", lambda *_: (_ for _ in ()).throw(OSError("the store is away")))
            with pytest.raises((OSError, ShardError), match="away"):  # the latter where the shard list is read first
                reader.load(5)
        assert reader.load(5).num_bytes
        num_reads = DistantStore.reads
        assert reader.load(4).num_bytes
        assert DistantStore.reads == num_reads


def of_rank(loading, rank):
    return dataclasses.replace(loading, rank=rank, world_size=2)


def test_files_are_not_cached(tiny, cached, expected, tmp_path):
    assert_same(train(tiny, tiny.store, cached), expected)
    assert not (tmp_path / "nvme").exists()


def flip(path):
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


def folder_for_a_file(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, cut, folder_for_a_file])
def test_damaged_entries_are_read_from_the_store(tiny, corpus, cached, expected, caplog, damage):
    caplog.set_level(logging.WARNING)
    train(tiny, corpus, cached)
    disk_cache.cache_clear()
    entries = [*(DiskCache(cached.shard_cache_dir, 1).folder).glob("*/*")]
    assert len(entries) > 12
    for path in entries:
        damage(path)
    assert_same(train(tiny, corpus, cached), expected)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("room_bytes", [0, 300, 3000])
def test_full_disk_changes_no_batch(tiny, corpus, cached, expected, caplog, full_disk, room_bytes):
    caplog.set_level(logging.WARNING)
    with full_disk(room_bytes):
        assert_same(train(tiny, corpus, cached), expected)
    assert len(caplog.records) == 1


def test_folder_that_vanishes_during_training_changes_no_batch(tiny, corpus, cached, expected, caplog, tmp_path):
    caplog.set_level(logging.WARNING)
    given = {"seed": 1, "micro_batch_size": 12, "num_steps": 2 * EPOCH, "loading": cached}
    with train_batches(corpus, tiny.manifest, "train", CONFIG, **given) as batches:
        found = next(batches)
        Path(cached.shard_cache_dir).rename(tmp_path / "elsewhere")
        found += [batch for step in batches for batch in step]
    assert_same(found, expected)
    assert len(caplog.records) <= 1  # none if all had been read by then


def test_cache_smaller_than_the_corpus_keeps_its_part(tiny, corpus, cached, expected):
    part = LoaderResources(shard_cache_dir=cached.shard_cache_dir, shard_cache_bytes=40_000)
    train(tiny, corpus, part)
    assert_same(train(tiny, corpus, part), expected)
    folder = DiskCache(cached.shard_cache_dir, 1).folder
    assert 20_000 < sum(path.stat().st_size for path in folder.glob("*/*")) <= 40_000


def test_footer_of_an_earlier_file_does_not_make_a_shard_seem_damaged(tiny, corpus, cached, expected, caplog):
    """The shard was written again, with other places of its row groups but equal rows and size."""
    caplog.set_level(logging.WARNING)
    cache = disk_cache(cached.shard_cache_dir, cached.shard_cache_bytes)
    put, footers = cache.put, []

    def mix_footers_up(group, key, data):
        if data[:1] == b"x":  # compressed
            footers.append(data)
            data = footers[0]
        put(group, key, data)

    cache.put = mix_footers_up
    train(tiny, corpus, cached)
    assert len(footers) > 2
    disk_cache.cache_clear()
    assert_same(train(tiny, corpus, cached), expected)


def test_a_damaged_shard_is_an_error_with_a_cache_too(corpus_maker, tmp_path, cached):
    made = corpus_maker(tmp_path / "corpus")
    key = "train/s000/part-00001-of-00004.parquet"
    data = bytearray(made.store.read(key))
    data[300] ^= 1
    made.store.write(key, bytes(data))
    corpus = DistantStore.at(made.store.uri)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="part-00001-of-00004"):
            train(made, corpus, cached)


def test_training_uses_the_cache_of_its_config(train_config, root, tmp_path, monkeypatch):
    config = train_config("cached", steps=3, shard_cache_dir=str(tmp_path / "nvme"), shard_cache_bytes=10**7)
    run_key = resolve(config, root).spec().run_key
    assert run_key == resolve(train_config("cached", steps=3), root).spec().run_key
    monkeypatch.setattr(FileStore, "high_latency", True)
    finish(config, root)
    assert [*(tmp_path / "nvme").glob("vitline-*/*/*")]
    with pytest.raises(ValueError, match="shard_cache_dir='nvme' is not an absolute path"):
        replace(config.execution, shard_cache_dir="nvme")
