"""Pairs of images with near hashes, assigned to tasks."""

import numpy as np
import pytest

from vitline.data_prep.plan.confirm import joined_groups
from vitline.data_prep.plan.similarity.near_duplicates import resolve


def num_components(a, b):
    """Number of connected groups of images, by a plain search."""
    beside: dict[int, set[int]] = {}
    for i, j in zip(a, b, strict=True):
        beside.setdefault(i, set()).add(j)
        beside.setdefault(j, set()).add(i)
    number = 0
    while beside:
        number, waiting = number + 1, [next(iter(beside))]
        while waiting:
            waiting += beside.pop(waiting.pop(), ())
    return number


def test_a_long_chain_of_images_becomes_one_group_in_few_passes():
    order = np.random.default_rng(0).permutation(200_000)
    assert len(np.unique(joined_groups(order[:-1], order[1:]))) == 1


@pytest.mark.parametrize("num_pairs", [0, 1, 60, 120, 2000])
def test_pairs_that_depend_on_each_other_are_in_one_group(num_pairs):
    rng = np.random.default_rng(num_pairs)
    a, b = rng.integers(0, 200, (2, num_pairs))
    group = joined_groups(a, b)
    seen: dict[int, int] = {}
    for pair, number in zip(zip(a.tolist(), b.tolist(), strict=True), group.tolist(), strict=True):
        assert {seen.setdefault(picture, number) for picture in pair} == {number}
    assert len(set(group.tolist())) == num_components(a.tolist(), b.tolist())
    keys = [bytes([i]) for i in range(200)]

    def same(x: bytes, y: bytes) -> bool:
        return (x[0] * 7 + y[0]) % 3 > 0

    def dropped_among(selected: np.ndarray) -> dict[bytes, bytes]:
        return resolve(((keys[i], keys[j]) for i, j in zip(a[selected], b[selected], strict=True)), same)

    separately: dict[bytes, bytes] = {}
    for number in np.unique(group):
        separately |= dropped_among(group == number)
    assert separately == dropped_among(np.ones(num_pairs, bool))
