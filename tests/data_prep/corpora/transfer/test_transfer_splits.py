"""The splits on which the ViT paper trains, selects settings and tests."""

from typing import get_args

import pytest

from vitline.data_prep.benchmarks.tfds_order import order_prefix, tfds_order
from vitline.data_prep.benchmarks.transfer.transfer_splits import OFFICIAL_SPLITS, TEST_SETS, VIEWS
from vitline.data_prep.config import TransferTaskName
from vitline.vit.evaluation.tasks import ROBUSTNESS

# Sizes of training and test sets, and the part of train on which the learning rate is selected.
SIZES = {
    "imagenet": (1_281_167, 1, 12_812, 50_000),
    "cifar10": (50_000, 2, 1000, 10_000),
    "cifar100": (50_000, 2, 1000, 10_000),
    "pets": (3680, 10, 368, 3669),
    "flowers102": (1020, 10, 102, 6149),
}


@pytest.mark.parametrize("name", SIZES)
def test_splits_are_those_of_the_released_configs(name):
    trainval, percent, val, test = SIZES[name]
    official_splits = OFFICIAL_SPLITS[name]
    assert official_splits.num_rows == {"train": trainval - val, "val": val, "test": test}
    assert (official_splits.train.stop, official_splits.val.stop) == (official_splits.val.start, trainval)
    assert val == pytest.approx(trainval * percent / 100, abs=0.5)
    tfds = pytest.importorskip("tensorflow_datasets")
    train = {"train": tfds.core.SplitInfo(name="train", shard_lengths=[trainval], num_bytes=0)}
    for spec, part in (
        (f"train[:{100 - percent}%]", official_splits.train),
        (f"train[{100 - percent}%:]", official_splits.val),
    ):
        (cut,) = tfds.core.ReadInstruction.from_spec(spec).to_absolute(train)
        assert (cut.splitname, cut.from_ or 0, cut.to or trainval) == part


def test_every_task_has_split_sizes_and_its_own_joined_splits():
    assert OFFICIAL_SPLITS.keys() == SIZES.keys()
    assert list(TEST_SETS.items())[:6] == [
        ("imagenet-real", 46_837),
        ("imagenet-v2", 10_000),
        ("imagenet-a", 7500),
        ("imagenet-r", 30_000),
        ("imagenet-sketch", 50_889),
        ("objectnet", 18_574),
    ]
    assert list(TEST_SETS.values())[6:] == [250_000] * 15
    assert tuple(TEST_SETS)[2:] == ROBUSTNESS
    assert {*OFFICIAL_SPLITS, *TEST_SETS} == {*get_args(TransferTaskName)}
    assert VIEWS == {"trainval": ("train", "val")}


@pytest.mark.parametrize("keys", [range(2000), [f"n01440764_{i}.JPEG" for i in range(2000)]])
def test_the_position_of_an_example_does_not_depend_on_others(keys):
    assert sorted(range(len(keys)), key=lambda i: order_prefix("train", keys[i])) == tfds_order("train", keys)
    assert all(0 <= order_prefix("train", key) < 2**64 for key in keys)
