"""Laws of mixtures: exact shares after any batch, every position of every source once, equal from any slot on."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitline.vit.input.mixture import Mixture, whole_weights

# The smallest share is one example of the smallest batch.
WEIGHTS = st.lists(st.integers(1_000, 9_999).map(lambda n: n / 1000), min_size=1, max_size=4)
BATCHES = st.integers(40, 100)


def counts_of(mixture, batch, start, stop):
    """Examples of every source in each of the batches [start, stop), shape (batches, sources), by counting."""
    source, _ = mixture.locate(np.arange(start * batch, stop * batch))
    return np.stack([np.bincount(part, minlength=len(mixture.weights)) for part in source.reshape(-1, batch)])


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [1, float("nan")], [float("inf")]])
def test_weights_that_are_not_positive_are_refused(weights):
    with pytest.raises(ValueError, match="must be positive numbers, one per corpus"):
        Mixture(weights, seed=0, global_batch_size=8)


def test_weights_whose_shares_cannot_be_exact_are_refused():
    with pytest.raises(ValueError, match="so many digits"):
        whole_weights([1, 1 / 3])
    assert whole_weights([14_197_122, 1_281_167]).sum() == 15_478_289


def test_a_share_of_less_than_one_example_of_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"is 0.79 examples of a batch of 80, and at least one is needed"):
        Mixture([100, 1], seed=0, global_batch_size=80)
    Mixture([99, 1], seed=0, global_batch_size=100)


def test_weights_are_taken_as_they_are_written():
    assert whole_weights([1, 0.3]).tolist() == [10, 3]
    assert whole_weights([0.1, 0.2]).tolist() == [1, 2]
    assert whole_weights([4, 2, 2]).tolist() == [2, 1, 1]


@given(weights=WEIGHTS, batch=BATCHES, seed=st.integers(0, 99))
def test_every_source_has_its_share_to_within_one_example_after_any_batch(weights, batch, seed):
    mixture = Mixture(weights, seed=seed, global_batch_size=batch)
    counts = counts_of(mixture, batch, 0, 40).cumsum(axis=0)
    exact = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    for steps, row in enumerate(counts.tolist(), start=1):
        assert row == mixture.counts(steps).tolist()
        assert all(abs(have - share * steps * batch) < 1 for have, share in zip(row, exact, strict=True))


@given(weights=WEIGHTS, batch=BATCHES, start=st.integers(0, 10**9), length=st.integers(1, 30))
def test_a_window_of_steps_has_the_exact_shares(weights, batch, start, length):
    mixture = Mixture(weights, seed=1, global_batch_size=batch)
    found = counts_of(mixture, batch, start, start + length).sum(axis=0)
    exact = mixture.weights / mixture.weights.sum() * length * batch
    assert (abs(found - exact) < (1 if len(weights) <= 2 else 2) + 1e-6).all()


@given(weights=WEIGHTS, batch=BATCHES, seed=st.integers(0, 99))
def test_every_position_of_every_source_comes_once_and_batch_after_batch(weights, batch, seed):
    mixture = Mixture(weights, seed=seed, global_batch_size=batch)
    source, position = mixture.locate(np.arange(9 * batch))
    for i, count in enumerate(mixture.counts(9).tolist()):
        mine = position[source == i]
        assert sorted(mine.tolist()) == list(range(count))
        in_batch = np.arange(9 * batch)[source == i] // batch
        assert (np.diff(in_batch[np.argsort(mine)]) >= 0).all()


@given(weights=WEIGHTS, batch=BATCHES, start=st.integers(0, 10**12))
def test_slots_are_located_alone_as_among_others(weights, batch, start):
    mixture = Mixture(weights, seed=3, global_batch_size=batch)
    slots = np.arange(start, start + 3 * batch)
    source, position = mixture.locate(slots)
    for i in (0, len(slots) // 2, -1):
        alone = mixture.locate(int(slots[i]))
        assert (int(alone[0]), int(alone[1])) == (source[i], position[i])
    assert position.min() >= 0


def test_batches_are_shuffled_each_in_its_own_way():
    mixture = Mixture([1, 1], seed=0, global_batch_size=64)
    source, _ = mixture.locate(np.arange(128))
    assert (source[:64] != source[64:]).any()
