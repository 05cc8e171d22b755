"""Properties of batches: their content depends on the recipe alone, and the ranks' shares add up to the global batch."""

import gc
import threading
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vitline.vit.input.augment import evaluation_pixels, train_draws, train_pixels
from vitline.vit.input.batches import LoaderResources, eval_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.input.order import Order

from ...batches import train_batches
from ...eventually import eventually

CONFIG = InputConfig(
    global_batch_size=12, num_lanes=6, shuffle_window=2, augment=AugmentConfig(image_size_px=16, min_area_fraction=0.3)
)
SEED = 11


def start(corpus, **changes):
    """Training batches with SEED; `changes` are arguments of `train_batches` or fields of `LoaderResources`."""
    loading = LoaderResources(**{f.name: changes.pop(f.name) for f in fields(LoaderResources) if f.name in changes})
    given = {"seed": SEED, "num_steps": 9, "micro_batch_size": 5, "loading": loading} | changes
    return train_batches(corpus.store, corpus.manifest, "train", given.pop("config", CONFIG), **given)


def by_slot(iterators, first_step=0):
    """{slot: (image, label)} of every valid example of several ranks."""
    found, order = {}, order_of_tiny()
    for step, of_ranks in enumerate(zip(*iterators, strict=True), start=first_step):
        assert len({len(batches) for batches in of_ranks}) == 1
        lanes = order.places(order.slots(step)).lane
        for rank, batches in enumerate(of_ranks):
            slots = order.slots(step)[lanes % len(of_ranks) == rank].tolist()
            for batch in batches:
                assert batch.valid.tolist() == [i < batch.num_valid for i in range(len(batch.valid))]
                assert not batch.images[batch.num_valid :].any()
                mine, slots = slots[: batch.num_valid], slots[batch.num_valid :]
                assert batch.first_slot == (mine[0] if mine else batch.first_slot)
                found |= {s: (batch.images[i], int(batch.labels[i])) for i, s in enumerate(mine)}
            assert not slots
    return found


def order_of_tiny():
    segments = (SimpleNamespace(num_rows=37), SimpleNamespace(num_rows=10))
    split = SimpleNamespace(num_rows=47, rows_per_row_group=4, segments=segments)
    return Order(split, corpus_digest="tiny", seed=SEED, global_batch_size=12, num_lanes=6, shuffle_window=2)


@pytest.fixture(scope="module")
def expected(tiny):
    """Batches by definition: row from the order, pixels from the source picture, crop from (seed, epoch, row)."""
    rows, found = order_of_tiny().locate(np.arange(9 * 12)), {}
    for slot, (epoch, row) in enumerate(zip(rows.epoch.tolist(), rows.row.tolist(), strict=True)):
        image = torch.empty(16, 16, 3, dtype=torch.uint8)
        train_pixels(tiny.pixels[row], train_draws(SEED, epoch, row).tolist(), CONFIG.augment, image)
        found[slot] = (image, row % 5)
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for slot, (image, label) in expected.items():
        assert torch.equal(found[slot][0], image), slot
        assert found[slot][1] == label


@pytest.mark.parametrize(
    ("world_size", "execution"),
    [
        (1, {"micro_batch_size": 12}),
        (1, {"micro_batch_size": 5, "threads": 3, "decoded_cache_bytes": 10**7}),
        (2, {"micro_batch_size": 4, "threads": 2}),
        (4, {"micro_batch_size": 1, "decoded_cache_bytes": 20_000}),
        (6, {"micro_batch_size": 7, "threads": 2, "decoded_cache_bytes": 10**7}),
    ],
)
def test_pixels_and_labels_depend_on_the_recipe_alone(tiny, expected, world_size, execution):
    assert_same(by_slot([start(tiny, rank=r, world_size=world_size, **execution) for r in range(world_size)]), expected)


def test_seeking_equals_iterating_bit_for_bit(tiny, expected):
    late = {slot: value for slot, value in expected.items() if slot >= 5 * 12}
    assert_same(by_slot([start(tiny, start_step=5, rank=r, world_size=3) for r in range(3)], first_step=5), late)


def test_shared_cache_does_not_change_batches_or_exceed_its_budget(tiny, expected):
    cache = DecodedCache(30_000)
    for _ in range(2):
        assert_same(by_slot([start(tiny, shared_cache=cache)]), expected)
    assert 20_000 < cache.num_bytes <= 30_000


def test_cached_corpus_is_not_read_again(tiny, expected, corpus_maker, tmp_path):
    copy = corpus_maker(tmp_path, digest="tiny")
    cache = DecodedCache(10**7)
    list(start(copy, shared_cache=cache))
    for key in copy.store.list("train/"):
        copy.store.delete(key)
    assert_same(by_slot([start(copy, shared_cache=cache)]), expected)


def test_a_rank_without_rows_yields_padding(corpus_maker, tmp_path):
    """Two row groups of 4 and 1 rows on 2 lanes, B = 2: lane 1 ends after one round, then rank 0 has all rows."""
    corpus = corpus_maker(tmp_path, segments=(5,))
    config = InputConfig(global_batch_size=2, num_lanes=2, shuffle_window=1, augment=CONFIG.augment)
    counts = [
        [[b.num_valid for b in step] for step in start(corpus, config=config, rank=r, world_size=2, micro_batch_size=1)]
        for r in range(2)
    ]
    assert [len(s) for s in counts[0]] == [len(s) for s in counts[1]]
    assert all(sum(a) + sum(b) == 2 for a, b in zip(*counts, strict=True))
    assert [0, 0] in counts[0] + counts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "most", "sizes"),
    [(1, 32, [12]), (1, 11, [6, 6]), (1, 5, [4, 4, 4]), (3, 32, [4]), (6, 32, [2]), (5, 3, [2, 2])],
)
def test_micro_batches_have_one_size_that_fits_the_busiest_rank(corpus_maker, tmp_path, world_size, most, sizes):
    """12 examples of 6 lanes per step: the busiest of 5 ranks has two lanes, 4 examples."""
    corpus = corpus_maker(tmp_path, segments=(1200,))
    for rank in (0, world_size - 1):
        for first in (0, 70):
            given = {"rank": rank, "world_size": world_size, "micro_batch_size": most}
            steps = start(corpus, config=CONFIG, start_step=first, num_steps=first + 3, **given)
            assert [[len(b.images) for b in step] for step in steps] == [sizes] * 3


def test_several_labels_are_ids_with_weights(corpus_maker, tmp_path):
    labels, weights = [[0, 3], [], [4]] * 4, [[1.0, 0.25], [], [0.5]] * 4
    corpus = corpus_maker(tmp_path, segments=(12,), labels=labels, weights=weights)
    [batch] = eval_batches(corpus.store, corpus.manifest, "train", CONFIG.augment, batch_size=13)
    dense = batch.labels.dense(5)
    assert batch.labels.ids.shape == (13, 2)
    assert dense[:3].tolist() == [[1, 0, 0, 0.25, 0], [0] * 5, [0, 0, 0, 0, 0.5]]
    assert not dense[12].any()
    assert dense.dtype == torch.float32


@pytest.mark.parametrize("world_size", [1, 2, 5, 47, 50])
def test_evaluation_counts_every_example_once(tiny, world_size):
    def of_rank(rank):
        split = (tiny.store, tiny.manifest, "train", CONFIG.augment)
        return list(eval_batches(*split, batch_size=6, loading=LoaderResources(rank, world_size, threads=2)))

    ranks = [of_rank(rank) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    valid = [(b.first_slot + i, int(b.labels[i]), b.images[i]) for r in ranks for b in r for i in range(b.num_valid)]
    assert [row for row, _, _ in valid] == list(range(47))
    assert all(label == row % 5 for row, label, _ in valid)
    assert all(len(b.valid) == 6 and int(b.valid.sum()) == b.num_valid for r in ranks for b in r)
    assert all((im.numpy() == evaluation_pixels(tiny.pixels[row], CONFIG.augment)).all() for row, _, im in valid)


def input_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith(("input", "row-group-loader"))]


def test_closed_finished_and_dropped_iterators_leave_no_thread(tiny):
    torch_threads = torch.get_num_threads()
    with start(tiny, num_steps=None, threads=3) as batches:
        next(batches)
        assert torch.get_num_threads() == torch_threads
        assert input_threads()
    assert not input_threads()
    assert list(batches) == []
    list(start(tiny))
    assert not input_threads()
    forgotten = start(tiny, num_steps=None)
    next(forgotten)
    del forgotten
    gc.collect()
    eventually(lambda: not input_threads())


def test_invalid_requests_are_refused_before_iteration(tiny):
    with pytest.raises(ValueError, match="world_size=7 must be 1 to num_lanes=6"):
        start(tiny, world_size=7)
    with pytest.raises(ValueError, match="rank=2 must be 0 to world_size - 1 = 1"):
        start(tiny, rank=2, world_size=2)
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        start(tiny, micro_batch_size=0)
    with pytest.raises(ValueError, match="has no split 'nope'"):
        train_batches(tiny.store, tiny.manifest, "nope", CONFIG, seed=0, micro_batch_size=1)
