"""Laws of the batches over shapes, lanes, windows, workers, micro-batches, resume points, caches, threads and mixtures, down to pixels."""

from collections import Counter
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitline.vit.input.batches import LoaderResources, Source, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig

from .conftest import make_corpus

SHAPES = {"tiny": ((37, 10), 4), "b": ((24,), 3), "cc": ((41,), 2)}
CROPS = AugmentConfig(image_size_px=8)
WHOLE = AugmentConfig(image_size_px=8, train_crop="none", flip=False)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Corpora by name; no two pictures are equal."""
    return [
        make_corpus(tmp_path_factory.mktemp(name), segments, rows, digest=name)
        for name, (segments, rows) in SHAPES.items()
    ]


def steps_of(sources, config, first=0, num=None, micro=64, **loading):
    """What each step from `first` holds, over all ranks: (pixels, label), how often."""
    world = loading.get("world_size", 1)
    ranks = [
        source_batches(
            sources,
            config,
            seed=3,
            micro_batch_size=micro,
            start_step=first,
            loading=LoaderResources(rank=r, **loading),
        )
        for r in range(world)
    ]
    try:
        steps = list(islice(zip(*ranks, strict=True), num))
    finally:
        for rank in ranks:
            rank.close()
    return [
        Counter(
            (batch.images[i].numpy().tobytes(), int(batch.labels[i]))
            for batches in of_ranks
            for batch in batches
            for i in range(batch.num_valid)
        )
        for of_ranks in steps
    ]


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_batches_are_equal_however_they_are_read_and_from_wherever(corpora, data):
    chosen = data.draw(st.lists(st.sampled_from(corpora), min_size=1, max_size=3, unique_by=id))
    sources = [Source(c.store, c.manifest, "train", data.draw(st.sampled_from([1.0, 1.5, 3.0]))) for c in chosen]
    lanes = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    config = InputConfig(
        global_batch_size=12, num_lanes=lanes, shuffle_window=data.draw(st.integers(1, 4)), augment=CROPS
    )
    uninterrupted = steps_of(sources, config, num=8)
    first = data.draw(st.integers(0, 7))
    loading = {
        "world_size": data.draw(st.integers(1, lanes)),
        "threads": data.draw(st.integers(1, 3)),
        "decoded_cache_bytes": data.draw(st.sampled_from([0, 20_000, 10**7])),
        "read_ahead_bytes": data.draw(st.sampled_from([0, 10_000, 2**31])),
    }
    micro = data.draw(st.integers(1, 13))
    assert steps_of(sources, config, first, 8 - first, micro, **loading) == uninterrupted[first:]


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_example_comes_once_in_every_epoch(corpora, data):
    corpus = data.draw(st.sampled_from(corpora))
    lanes, num_rows = data.draw(st.sampled_from([1, 2, 4])), len(corpus.pixels)
    config = InputConfig(
        global_batch_size=lanes, num_lanes=lanes, shuffle_window=data.draw(st.integers(1, 4)), augment=WHOLE
    )
    workers, epochs = data.draw(st.integers(1, lanes)), data.draw(st.integers(1, 3))
    # After as many epochs as there are lanes, batches end where an epoch ends.
    steps = steps_of(
        [Source(corpus.store, corpus.manifest, "train")], config, num=epochs * num_rows, world_size=workers
    )
    seen = sum(steps, Counter())
    assert len(seen) == num_rows
    assert set(seen.values()) == {epochs * lanes}
    if lanes == 1:
        for epoch in range(epochs):
            assert set(sum(steps[epoch * num_rows : (epoch + 1) * num_rows], Counter()).values()) == {1}
