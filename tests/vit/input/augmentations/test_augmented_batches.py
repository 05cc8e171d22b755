"""Batches with RandAugment, MixUp and CutMix equal their definition for every number of workers, split, cache and start."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitline.vit.input.augment import train_draws, train_pixels
from vitline.vit.input.augmentations.mixing import draw_mix, mix_lane
from vitline.vit.input.batches import LoaderResources, Source, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.order import Order

from ....batches import train_batches

AUGMENT = AugmentConfig(
    image_size_px=16, randaugment_layers=2, randaugment_magnitude=9, mixup_alpha=0.8, cutmix_alpha=1.0
)
SEED, STEPS = 11, 8


def defined(corpus, config, steps=STEPS, bad=()):
    """{slot: (image, label, partner's label, own share)}, worked out position by position from the order of all lanes."""
    order = Order(
        corpus.manifest.split("train"),
        corpus_digest=corpus.manifest.digest,
        seed=SEED,
        global_batch_size=config.global_batch_size,
        num_lanes=config.num_lanes,
        shuffle_window=config.shuffle_window,
    )
    found = {}
    for step in range(steps):
        rows = order.locate(order.slots(step))
        views = torch.zeros(config.global_batch_size, 16, 16, 3, dtype=torch.uint8)
        for i, (epoch, row) in enumerate(zip(rows.epoch.tolist(), rows.row.tolist(), strict=True)):
            if row not in bad:
                draws = train_draws(SEED, epoch, row, config.augment.randaugment_layers).tolist()
                train_pixels(corpus.pixels[row], draws, config.augment, views[i])
        mix, labels = draw_mix(SEED, step, config.augment), [corpus.labels[row] for row in rows.row.tolist()]
        for lane in range(config.num_lanes):
            here = np.flatnonzero(rows.lane == lane).tolist()
            images = [views[i].clone() for i in here]
            mixed = mix_lane(images, [rows.row[i] not in bad for i in here], mix) if here else []
            for n, i in enumerate(here):
                slot = step * config.global_batch_size + i
                found[slot] = (images[n], labels[i], labels[here[n - 1]], mix.share if mixed[n] else 1.0, rows.lane[i])
    return found


def given_batches(corpus, config, workers, expected, first_step=0, **loading):
    """Compares the batches of all ranks with the definition, example by example."""
    seen = set()
    for rank in range(workers):
        mine = [slot for slot in sorted(expected) if expected[slot][4] % workers == rank]
        mine = [slot for slot in mine if slot >= first_step * config.global_batch_size]
        given = {"rank": rank, "world_size": workers} | loading
        micro, mask = given.pop("micro_batch_size"), given.pop("mask_bad", False)
        batches = train_batches(
            corpus.store, corpus.manifest, "train", config, seed=SEED, micro_batch_size=micro, start_step=first_step,
            num_steps=STEPS, mask_bad=mask, loading=LoaderResources(**given),
        )  # fmt: skip
        for batch in (batch for step in batches for batch in step):
            for i in range(batch.num_examples):
                slot = mine.pop(0)
                image, label, partner, share, _ = expected[slot]
                assert torch.equal(batch.images[i], image), slot
                assert (int(batch.labels[i]), int(batch.mixed_labels[i])) == (label, partner)
                assert float(batch.lam[i]) == pytest.approx(share, abs=1e-7)
                seen.add(slot)
            assert (batch.lam[batch.num_examples :] == 1).all()
        assert not mine
    assert seen == {slot for slot in expected if slot >= first_step * config.global_batch_size}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_batches_equal_their_definition(tiny, data):
    lanes = data.draw(st.sampled_from((1, 3, 6)), "lanes")
    config = InputConfig(
        global_batch_size=lanes * data.draw(st.integers(2, 12 // lanes), "per lane"),
        num_lanes=lanes,
        shuffle_window=data.draw(st.integers(1, 3), "window"),
        augment=AUGMENT,
    )
    loading = {
        "micro_batch_size": data.draw(st.integers(1, 13), "micro-batch"),
        "threads": data.draw(st.integers(1, 3), "threads"),
        "decoded_cache_bytes": data.draw(st.sampled_from((0, 20_000, 10**7)), "cache"),
    }
    workers, first = data.draw(st.integers(1, lanes), "workers"), data.draw(st.integers(0, STEPS - 1), "resume")
    given_batches(tiny, config, workers, defined(tiny, config), first, **loading)


def test_both_kinds_occur_and_lone_examples_stay_unmixed(corpus_maker, tmp_path):
    """Ten rows in groups of four on two lanes: lane 1 ends after four or six of them, so batches of four get lone rows."""
    corpus = corpus_maker(tmp_path, segments=(10,))
    config = InputConfig(global_batch_size=4, num_lanes=2, shuffle_window=1, augment=AUGMENT)
    expected = defined(corpus, config)
    assert {draw_mix(SEED, step, AUGMENT).box is None for step in range(STEPS)} == {True, False}
    alone = [s for s, e in expected.items() if [o[4] for t, o in expected.items() if t // 4 == s // 4].count(e[4]) == 1]
    assert alone
    assert all(expected[slot][3] == 1 for slot in alone)
    given_batches(corpus, config, 2, expected, micro_batch_size=1)


def test_a_bad_example_is_mixed_into_no_other(corpus_maker, tmp_path):
    corpus = corpus_maker(tmp_path, undecodable={3, 20})
    config = InputConfig(global_batch_size=12, num_lanes=3, shuffle_window=2, augment=AUGMENT)
    expected = defined(corpus, config, bad={3, 20})
    given_batches(corpus, config, 3, expected, micro_batch_size=3, mask_bad=True)
    given_batches(corpus, config, 1, expected, micro_batch_size=12, mask_bad=True, threads=2)


def test_several_labels_and_sources_are_mixed(corpus_maker, tmp_path):
    """Lanes of all sources with one number belong to one rank, so the partner may come from another source."""
    lists = [[i % 5, (i + 2) % 5] for i in range(30)]
    corpora = [corpus_maker(tmp_path / name, segments=(30,), digest=name, labels=lists) for name in ("a", "bb")]
    sources = [Source(c.store, c.manifest, "train") for c in corpora]
    config = InputConfig(global_batch_size=12, num_lanes=3, shuffle_window=2, augment=AUGMENT)
    found = []
    for micro, workers in ((12, 1), (5, 1), (12, 3)):
        of_ranks = [
            source_batches(
                sources, config, seed=SEED, micro_batch_size=micro, num_steps=4,
                loading=LoaderResources(rank=rank, world_size=workers),
            )
            for rank in range(workers)
        ]  # fmt: skip
        rows = []
        for rank in of_ranks:
            for batch in (batch for step in rank for batch in step):
                labels, mixed_labels = batch.labels.dense(5), batch.mixed_labels.dense(5)
                columns = (batch.images, labels, mixed_labels, batch.lam)
                rows += [b"".join(c[i].numpy().tobytes() for c in columns) for i in range(batch.num_examples)]
                assert (mixed_labels[: batch.num_examples].sum(dim=1) == 2).all()
        found.append(sorted(rows))
    assert found[0] == found[1] == found[2]


def test_mixing_draws_nothing_from_global_state_and_is_off_by_default(tiny):
    plain = InputConfig(global_batch_size=12, num_lanes=6, augment=AugmentConfig(image_size_px=16))
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    for config in (plain, changed_augment(plain, AUGMENT)):
        with train_batches(tiny.store, tiny.manifest, "train", config, seed=1, micro_batch_size=12) as batches:
            [[batch]] = islice(batches, 1)
        assert (batch.mixed_labels is None) == (batch.lam is None) == (config is plain)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == np.random.get_state()[1].tolist()


def changed_augment(config, augment):
    return InputConfig(global_batch_size=config.global_batch_size, num_lanes=config.num_lanes, augment=augment)
