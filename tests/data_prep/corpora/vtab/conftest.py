"""Miniature data sets in their official formats: carved into 900 + 250 + the rest, so that VTAB-1k's thousand are there."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from data_prep.config import Vtab
from data_prep.corpora.official.official_splits import OFFICIAL_SPLITS, OfficialSplits, Slice

NUM_TRAIN, NUM_VAL = 900, 250


def one_split(total):
    """The carving of a data set of one split of TFDS."""
    return OfficialSplits(
        train=Slice("train", 0, NUM_TRAIN),
        val=Slice("train", NUM_TRAIN, NUM_TRAIN + NUM_VAL),
        test=Slice("train", NUM_TRAIN + NUM_VAL, total),
    )


def train_and_test(num_test, test="test"):
    """Of one whose val is cut off train."""
    return OfficialSplits(
        train=Slice("train", 0, NUM_TRAIN),
        val=Slice("train", NUM_TRAIN, NUM_TRAIN + NUM_VAL),
        test=Slice(test, 0, num_test),
    )


def three_splits(num_test):
    """Of one that comes with three."""
    return OfficialSplits(
        train=Slice("train", 0, NUM_TRAIN), val=Slice("validation", 0, NUM_VAL), test=Slice("test", 0, num_test)
    )


def picture(number, size=(8, 8), kind="PNG"):
    """A file of noise; of the same number the same bytes."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.fixture
def mini():
    """What makes a miniature."""
    return SimpleNamespace(
        num_train=NUM_TRAIN,
        num_val=NUM_VAL,
        one_split=one_split,
        train_and_test=train_and_test,
        three_splits=three_splits,
        picture=picture,
    )


@pytest.fixture
def carved(monkeypatch):
    """carved(data set, carving): until the test ends."""

    def carve(name, official_splits):
        monkeypatch.setitem(OFFICIAL_SPLITS, name, official_splits)

    return carve


@pytest.fixture
def task_source():
    """Of the tasks of this folder."""
    return Vtab
