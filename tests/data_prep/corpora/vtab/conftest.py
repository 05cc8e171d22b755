"""Miniature data sets in their official formats, with splits of 900 + 250 + the rest, so that VTAB-1k's 1,000 examples exist."""

from types import SimpleNamespace

import pytest

from vitline.data_prep.benchmarks.official_splits import OFFICIAL_SPLITS, OfficialSplits, Slice
from vitline.data_prep.config import Vtab

from ....pictures import noise

NUM_TRAIN, NUM_VAL = 900, 250


def one_split(total):
    """Official splits of a data set with one TFDS split."""
    return OfficialSplits(
        train=Slice("train", 0, NUM_TRAIN),
        val=Slice("train", NUM_TRAIN, NUM_TRAIN + NUM_VAL),
        test=Slice("train", NUM_TRAIN + NUM_VAL, total),
    )


def train_and_test(num_test, test="test"):
    """Official splits of a data set whose val is the end of train."""
    return OfficialSplits(
        train=Slice("train", 0, NUM_TRAIN),
        val=Slice("train", NUM_TRAIN, NUM_TRAIN + NUM_VAL),
        test=Slice(test, 0, num_test),
    )


def three_splits(num_test):
    """Official splits of a data set with three splits."""
    return OfficialSplits(
        train=Slice("train", 0, NUM_TRAIN), val=Slice("validation", 0, NUM_VAL), test=Slice("test", 0, num_test)
    )


@pytest.fixture
def mini():
    """Functions that make miniature splits."""
    return SimpleNamespace(
        num_train=NUM_TRAIN,
        num_val=NUM_VAL,
        one_split=one_split,
        train_and_test=train_and_test,
        three_splits=three_splits,
        picture=noise,
    )


@pytest.fixture
def set_splits(monkeypatch):
    """Replaces the official splits of a data set until the test ends."""

    def change(name, official_splits):
        monkeypatch.setitem(OFFICIAL_SPLITS, name, official_splits)

    return change


@pytest.fixture
def task_source():
    """Source class of the tasks of this folder."""
    return Vtab
