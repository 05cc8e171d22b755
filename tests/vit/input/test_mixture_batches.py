"""Batches of mixtures: the same for every execution and from every step on, each corpus in its own order, dropped classes left out."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from vitline.vit.input.batches import LoaderResources, Source, eval_batches, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.input.mapped_labels import MappedLabels, find_kept_rows, keeps
from vitline.vit.input.mixture import Mixture
from vitline.vit.input.order import Order
from vitline.vit.input.schedule import Schedule

from .conftest import make_corpus

CONFIG = InputConfig(
    global_batch_size=12, num_lanes=3, shuffle_window=2, augment=AugmentConfig(image_size_px=16, min_area_fraction=0.3)
)
SEED = 5
DROPS = (2, None, 3, None, 0)
"""A class map that drops labels 1 and 3 of the five."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    large = make_corpus(tmp_path_factory.mktemp("large"), segments=(61, 10), digest="large one")
    return large, make_corpus(tmp_path_factory.mktemp("small"), segments=(23,), digest="small")


@pytest.fixture(scope="module")
def sources(corpora):
    """Three parts of the large corpus to one of the small one, of which two classes are dropped."""
    large, small = corpora
    kept = find_kept_rows(small.store, small.manifest, "train", DROPS)
    return [
        Source(large.store, large.manifest, "train", 3.0, MappedLabels((0, 1, 2, 3, 4), 5, True)),
        Source(small.store, small.manifest, "train", 1.0, MappedLabels(DROPS, 5, True, kept)),
    ]


def steps_of(sources, world_size=1, num_steps=12, **changes):
    """For every step, what each valid example shows and its label, sorted; the order inside a step is that of the ranks."""
    loading = {f.name: changes.pop(f.name) for f in fields(LoaderResources) if f.name in changes}
    given = {"seed": SEED, "num_steps": num_steps, "micro_batch_size": 5} | changes
    ranks = [
        source_batches(sources, CONFIG, **given, loading=LoaderResources(rank, world_size, **loading))
        for rank in range(world_size)
    ]
    found = []
    for of_ranks in zip(*ranks, strict=True):
        assert len({len(batches) for batches in of_ranks}) == 1
        shown = [
            (b.images[i].numpy().tobytes(), int(b.labels[i])) for r in of_ranks for b in r for i in range(b.num_valid)
        ]
        found.append(sorted(shown))
    return found


@pytest.fixture(scope="module")
def expected(sources):
    return steps_of(sources)


@pytest.mark.parametrize(
    ("world_size", "execution"),
    [
        (1, {"micro_batch_size": 12, "threads": 3}),
        (2, {"micro_batch_size": 4, "decoded_cache_bytes": 10**7}),
        (3, {"micro_batch_size": 1, "threads": 2, "decoded_cache_bytes": 20_000}),
    ],
)
def test_batches_depend_on_the_recipe_alone(sources, expected, world_size, execution):
    assert [len(step) for step in expected] == [12] * 12
    assert steps_of(sources, world_size, **execution) == expected


def test_seeking_equals_iterating_bit_for_bit(sources, expected):
    assert steps_of(sources, 3, start_step=7) == expected[7:]


def test_a_cache_that_another_class_map_filled_changes_nothing(sources, corpora, expected):
    cache, small = DecodedCache(10**8), corpora[1]
    steps_of([Source(small.store, small.manifest, "train")], num_steps=4, shared_cache=cache)
    assert steps_of(sources, shared_cache=cache) == expected


def test_each_corpus_follows_its_own_order_through_its_epochs(sources):
    """In one pass over the large corpus the small one is read several times, each time in the keyed order of that epoch."""
    orders = [Order.of(s.manifest, s.split, CONFIG, SEED, s.labels.kept and s.labels.kept.groups) for s in sources]
    mixture = Mixture([3, 1], seed=SEED, global_batch_size=12)
    schedule = Schedule(orders, mixture, rank=0, world_size=1, most_examples=12)
    shares = list(schedule.shares(0, 24))
    for i, order in enumerate(orders):
        read = [
            (e, r)
            for s in shares
            for at in [s.source == i]
            for e, r in zip(s.rows.epoch[at], s.rows.row[at], strict=True)
        ]
        alone = order.locate(np.arange(len(read)))
        assert sorted(read) == sorted(zip(alone.epoch, alone.row, strict=True))
        whole = [sorted(row for epoch, row in read if epoch == e) for e in range(read[-1][0])]
        assert all(epoch == list(range(order.num_rows)) for epoch in whole)
    assert orders[0].num_rows == 71 < 24 * 9
    assert orders[1].num_rows == 14 < 24 * 3
    assert [(s.source == 1).sum() for s in shares] == [3] * 24


def test_dropped_classes_are_never_read_and_evaluation_counts_the_others(sources, corpora, expected):
    small, labels = corpora[1], sources[1].labels
    assert {label for step in expected for _, label in step} == {0, 1, 2, 3, 4}
    found = [
        int(batch.labels[i])
        for rank in range(3)
        for batch in eval_batches(
            small.store,
            small.manifest,
            "train",
            CONFIG.augment,
            batch_size=4,
            loading=LoaderResources(rank, 3),
            labels=labels,
        )
        for i in range(batch.num_valid)
    ]
    assert found == [DROPS[row % 5] for row in range(23) if DROPS[row % 5] is not None]


def test_several_labels_keep_those_that_are_mapped(corpus_maker, tmp_path):
    """An example stays unless all of its classes are dropped; one without classes stays, too."""
    labels = [[0, 1], [1], [], [1, 3], [4]] * 4
    corpus = corpus_maker(tmp_path, segments=(20,), labels=labels, weights=[[0.5] * len(each) for each in labels])
    kept = find_kept_rows(corpus.store, corpus.manifest, "train", DROPS)
    mapped = MappedLabels(DROPS, 4, False, kept)
    batches = eval_batches(corpus.store, corpus.manifest, "train", CONFIG.augment, batch_size=12, labels=mapped)
    [batch] = batches
    assert batch.num_valid == 12
    assert torch.equal(batch.labels.dense(4)[:3], torch.tensor([[0, 0, 0.5, 0], [0, 0, 0, 0], [0.5, 0, 0, 0]]))
    assert [keeps((each, None), DROPS) for each in labels[:5]] == [True, False, True, False, True]


def test_a_map_that_drops_all_or_names_another_class_is_refused(corpora):
    small = corpora[1]
    with pytest.raises(ValueError, match="drops every example of split 'train'"):
        find_kept_rows(small.store, small.manifest, "train", (None,) * 5)
    with pytest.raises(ValueError, match="has classes 0 to 7, but the mixture has classes 0 to 4"):
        MappedLabels((0, 7), 5, True)
    with pytest.raises(ValueError, match="has 2 entries, but the corpus has 5 classes"):
        steps_of([Source(small.store, small.manifest, "train", 1.0, MappedLabels((0, 1), 10, False))])


def test_an_example_that_cannot_be_decoded_is_named_where_rows_are_dropped(corpus_maker, tmp_path):
    corpus = corpus_maker(tmp_path, undecodable={10}, segments=(23,))
    kept = find_kept_rows(corpus.store, corpus.manifest, "train", DROPS)
    source = Source(corpus.store, corpus.manifest, "train", 1.0, MappedLabels(DROPS, 5, True, kept))
    with pytest.raises(ValueError, match=r"part-00000-of-00002.parquet, example 1 of those kept in row group 2"):
        steps_of([source])
