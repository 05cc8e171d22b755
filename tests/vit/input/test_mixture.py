"""Properties of mixtures: exact shares, every position of every source once, and an inverse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit.input.mixture import Mixture, largest_remainder

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


def test_largest_remainder_matches_hand_calculation():
    assert largest_remainder([0.9, 0.1], 10).tolist() == [9, 1]
    assert largest_remainder([1, 1, 1], 8).tolist() == [
        3,
        3,
        2,
    ]  # 2.67 each: the two slots left over go to the first two
    assert largest_remainder([1000, 1], 10).tolist() == [9, 1]  # too small for a slot, gets one


@given(weights=WEIGHTS, block=st.integers(6, 64), seed=st.integers(0, 99))
def test_every_position_of_every_source_occurs_once_in_exact_shares(weights, block, seed):
    mixture = Mixture(weights, seed=seed, block_slots=block)
    source, position = mixture.locate(np.arange(7 * block))
    assert mixture.shares.sum() == block
    assert mixture.shares.min() >= 1
    for i, share in enumerate(mixture.shares):
        assert sorted(position[source == i].tolist()) == list(range(7 * share))
        assert (np.add.reduceat(source == i, np.arange(0, 7 * block, block)) == share).all()
    assert (mixture.slot_of(source, position) == np.arange(7 * block)).all()


def test_blocks_differ_and_distant_slots_are_located():
    mixture = Mixture([1, 1], seed=0, block_slots=64)
    source, _ = mixture.locate(np.arange(128))
    assert (source[:64] != source[64:]).any()
    far = np.arange(10**14, 10**14 + 100)
    assert (mixture.slot_of(*mixture.locate(far)) == far).all()


def test_invalid_mixtures_are_refused():
    with pytest.raises(ValueError, match="positive numbers"):
        Mixture([1, 0], seed=0, block_slots=8)
    with pytest.raises(ValueError, match="3 sources do not fit into blocks of 2 slots"):
        Mixture([1, 1, 1], seed=0, block_slots=2)
