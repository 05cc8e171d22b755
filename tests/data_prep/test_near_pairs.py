"""Pairs of pictures with near hashes, dealt out to tasks."""

import numpy as np
import pytest

from data_prep.near_duplicates import resolve
from data_prep.near_pairs import _joined


@pytest.mark.parametrize("num_pairs", [0, 1, 60, 120, 2000])
def test_pairs_that_depend_on_each_other_stay_together(num_pairs):
    rng = np.random.default_rng(num_pairs)
    a, b = rng.integers(0, 200, (2, num_pairs))
    group = _joined(a, b, 200)
    seen: dict[int, int] = {}
    for pair, number in zip(zip(a.tolist(), b.tolist(), strict=True), group.tolist(), strict=True):
        assert {seen.setdefault(picture, number) for picture in pair} == {number}
    keys = [bytes([i]) for i in range(200)]

    def same(x: bytes, y: bytes) -> bool:
        return (x[0] * 7 + y[0]) % 3 > 0

    def goes(some: np.ndarray) -> dict[bytes, bytes]:
        return resolve(((keys[i], keys[j]) for i, j in zip(a[some], b[some], strict=True)), same)

    apart: dict[bytes, bytes] = {}
    for number in np.unique(group):
        apart |= goes(group == number)
    assert apart == goes(np.ones(num_pairs, bool))
