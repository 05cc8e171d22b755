"""Splits and order: pure functions of ids on every machine; the pinned values must never change."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitline.data_prep.sources.splits import filled_splits, hashed_split, order_key, split_hash

ids = st.text(min_size=1, max_size=30)
fractions = st.floats(0, 0.49)


def test_split_and_order_hashes_are_unchanged():
    # sha256("vitline split\0" + "cat/1.jpg") and sha256("vitline order\0" + "0\0cat/1.jpg"), by coreutils' sha256sum
    assert split_hash("cat/1.jpg") == 0x9FA10472E0A07ECE
    assert order_key(0, "cat/1.jpg") == 0xEE7B166ED0E04CC8
    assert order_key(1, "cat/1.jpg") != order_key(0, "cat/1.jpg")


@given(ids, fractions, fractions, fractions)
def test_test_split_is_unchanged_when_val_grows(group, val, larger_val, test):
    before, after = hashed_split(group, min(val, larger_val), test), hashed_split(group, max(val, larger_val), test)
    assert (before == "test") == (after == "test")
    assert not (before == "val" and after == "train")
    assert hashed_split(group, 0, 0) == "train"


def test_hashed_splits_have_the_requested_fractions():
    counts = Counter(hashed_split(f"group {i}", 0.2, 0.3) for i in range(20_000))
    assert counts["val"] / 20_000 == pytest.approx(0.2, abs=0.02)
    assert counts["test"] / 20_000 == pytest.approx(0.3, abs=0.02)


@given(st.dictionaries(ids, st.integers(0, 5), max_size=60), st.integers(0, 20), st.integers(0, 40))
def test_filled_splits_have_exactly_the_requested_sizes_or_fail(sizes, num_val, num_train):
    try:
        splits = filled_splits(sizes, num_val, num_train)
    except ValueError:
        return
    assert splits.keys() == sizes.keys()
    held = Counter()
    for group, split in splits.items():
        held[split] += sizes[group]
    assert (held["val"], held["train"]) == (num_val, num_train)


def test_filled_splits_do_not_depend_on_the_order_of_the_groups():
    sizes = {f"g{i}": i % 4 for i in range(300)}
    assert filled_splits(sizes, 50, 200) == filled_splits(dict(reversed(sizes.items())), 50, 200)


def test_impossible_split_sizes_are_an_error():
    with pytest.raises(ValueError, match="3 examples in 1 groups"):
        filled_splits({"three together": 3}, 1, 1)
