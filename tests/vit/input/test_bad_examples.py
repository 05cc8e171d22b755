"""An example that cannot be decoded: masked in training, the same for every execution; an error everywhere else."""

from dataclasses import fields

import numpy as np
import pytest

import vitline.vit.input.read_shards
from vitline.data_prep.decode import decode
from vitline.data_prep.shard_format import ShardError
from vitline.vit.input.batches import LoaderResources, Source, eval_batches, row_batches, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.input.mapped_labels import MappedLabels
from vitline.vit.input.order import Order

from ...batches import train_batches

CONFIG = InputConfig(
    global_batch_size=12, num_lanes=6, shuffle_window=2, augment=AugmentConfig(image_size_px=16, min_area_fraction=0.3)
)
BAD = frozenset({13, 30})


@pytest.fixture
def damaged(corpus_maker, tmp_path):
    """The corpus `tiny`, two rows of which are no images any more."""
    return corpus_maker(tmp_path / "damaged", undecodable=BAD)


def start(corpus, **changes):
    loading = LoaderResources(**{f.name: changes.pop(f.name) for f in fields(LoaderResources) if f.name in changes})
    given = {"seed": 11, "num_steps": 9, "micro_batch_size": 5, "loading": loading, "mask_bad": True} | changes
    return train_batches(corpus.store, corpus.manifest, "train", CONFIG, **given)


def steps_of(corpus, world_size=1, **changes):
    """Of each step, over all ranks: the images and labels that may be used, and the texts of the bad examples, sorted."""
    found = []
    for of_ranks in zip(
        *(start(corpus, rank=r, world_size=world_size, **changes) for r in range(world_size)), strict=True
    ):
        batches = [batch for batches in of_ranks for batch in batches]
        for batch in batches:
            masked = set(range(batch.num_examples, len(batch.valid))) | {i for i, _ in batch.bad}
            assert masked == {i for i, valid in enumerate(batch.valid.tolist()) if not valid}
            assert not batch.images[~batch.valid].any()
            assert batch.num_valid == int(batch.valid.sum())
        used = [(b.images[i].numpy().tobytes(), int(b.labels[i])) for b in batches for i in b.valid.nonzero().flatten()]
        found.append((sorted(used), sorted(text for b in batches for _, text in b.bad)))
    return found


def test_a_bad_example_leaves_its_place_empty_and_changes_no_other(tiny, damaged):
    missing = []
    for (whole, none_bad), (used, bad) in zip(steps_of(tiny), steps_of(damaged), strict=True):
        assert not none_bad
        assert set(used) < set(whole) if bad else used == whole
        left_out = [label for image, label in whole if (image, label) not in used]
        assert sorted(int(text.split("(row ")[1].split()[0]) % 5 for text in bad) == sorted(left_out)
        missing += bad
    order = Order(
        tiny.manifest.split("train"),
        corpus_digest="tiny",
        seed=11,
        **CONFIG.model_dump(include={"global_batch_size", "num_lanes", "shuffle_window"}),
    )
    assert len(missing) == np.isin(order.locate(np.arange(9 * 12)).row, list(BAD)).sum() > 2 * len(BAD)
    assert set(missing) == {
        f"{damaged.store.uri}/train/s000/{shard}-of-00004.parquet, row {row} (row {of_split} of split 'train'): "
        "not_an_image: 8 bytes in no known image format"
        for shard, row, of_split in (("part-00001", 1, 13), ("part-00002", 6, 30))
    }


@pytest.mark.parametrize(
    ("world_size", "execution"),
    [
        (1, {"micro_batch_size": 12, "threads": 3}),
        (1, {"micro_batch_size": 1, "decoded_cache_bytes": 10**7}),
        (2, {"micro_batch_size": 4, "threads": 2}),
        (3, {"micro_batch_size": 3, "decoded_cache_bytes": 20_000}),
        (6, {"micro_batch_size": 7, "threads": 2, "decoded_cache_bytes": 10**7}),
    ],
)
def test_batches_with_bad_examples_depend_on_the_recipe_alone(damaged, world_size, execution):
    assert steps_of(damaged, world_size, **execution) == steps_of(damaged)


def test_seeking_equals_iterating_with_bad_examples(damaged):
    assert steps_of(damaged, 3, start_step=4) == steps_of(damaged)[4:]


def test_a_bad_example_is_never_cached(damaged):
    cache = DecodedCache(10**7)
    first = steps_of(damaged, shared_cache=cache)
    (rows,) = cache._splits.values()
    assert set(rows) == set(range(47)) - BAD
    assert steps_of(damaged, shared_cache=cache) == first


def test_a_mixture_masks_bad_examples(damaged):
    source = Source(damaged.store, damaged.manifest, "train", 1.0, MappedLabels((4, 3, 2, 1, 0), 5, True))
    given = {"seed": 0, "num_steps": 4, "micro_batch_size": 12}
    batches = [batch for step in source_batches([source], CONFIG, mask_bad=True, **given) for batch in step]
    assert {text.split("(")[1].split(" of")[0] for b in batches for _, text in b.bad} == {"row 13", "row 30"}
    with pytest.raises(ValueError, match="cannot be decoded"):
        list(source_batches([source], CONFIG, **given))


def test_evaluation_and_training_without_mask_raise_at_a_bad_example(damaged):
    split = (damaged.store, damaged.manifest, "train", CONFIG.augment)
    for batches in (
        eval_batches(*split, batch_size=6),
        row_batches(*split, [range(12, 16)], batch_size=2),
        start(damaged, mask_bad=False),
    ):
        with pytest.raises(ValueError, match=r"row 13 of split 'train'\) cannot be decoded: not_an_image"):
            list(batches)


def test_a_damaged_shard_and_lack_of_memory_are_no_bad_examples(tiny, damaged, monkeypatch):
    def without_memory(data, policy):
        if len(data) % 7 == 0:
            raise MemoryError("insufficient memory")
        return decode(data, policy)

    with monkeypatch.context() as patch:
        patch.setattr(vitline.vit.input.read_shards, "decode", without_memory)
        with pytest.raises(MemoryError):
            list(start(tiny))
    key = "train/s000/part-00001-of-00004.parquet"
    damaged.store.write(key, damaged.store.read(key)[:1000])
    with pytest.raises(ShardError, match="part-00001"):
        list(start(damaged))


def test_an_error_of_the_augmentation_is_no_bad_example(tiny, monkeypatch):
    def refuse(image, draws, config, out):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("vitline.vit.input.decoding.native_view.train_pixels", refuse)
    with pytest.raises(ValueError, match="a mistake of ours"):
        list(start(tiny))
