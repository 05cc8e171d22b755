"""Keyed randomness: permutations are bijective, invertible and unbiased, and the values of the hash never change."""

import hashlib
from collections import Counter
from itertools import permutations
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitline.vit.input.permutation import KeyedPermutation, derive_key, hash64, uniforms

KEYS = st.integers(0, 2**64 - 1)


def test_key_is_the_start_of_sha256_of_canonical_json():
    expected = int.from_bytes(hashlib.sha256(b'[7,"crop",3]').digest()[:8], "big")
    assert derive_key(7, "crop", 3) == expected
    assert len({derive_key(7, "crop"), derive_key(7, "flip"), derive_key(8, "crop"), derive_key(7, "crop", 0)}) == 4


def test_the_hash_is_splitmix64():
    """First outputs of splitmix64 from state 0, as published with xoshiro's reference code."""
    assert [int(v) for v in hash64(0, np.arange(3))] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(size=st.integers(1, 3000), key=KEYS)
def test_permutation_is_bijective_and_inverse_undoes_it(size, key):
    permutation = KeyedPermutation(size, key)
    image = permutation(np.arange(size))
    assert sorted(image.tolist()) == list(range(size))
    assert (permutation.inverse(image) == np.arange(size)).all()
    assert int(permutation(size - 1)) == image[-1]


@given(size=st.integers(1, 2**48), key=KEYS, where=st.floats(0, 1, exclude_max=True))
def test_single_indices_of_large_permutations_are_mapped_and_inverted(size, key, where):
    index = int(where * size)
    permutation = KeyedPermutation(size, key)
    image = permutation(index)
    assert 0 <= int(image) < size
    assert int(permutation.inverse(image)) == index


def test_one_call_evaluates_many_permutations():
    sizes, keys = np.array([5, 9, 1]), np.array([1, 2**63, 3], dtype=np.uint64)
    together = KeyedPermutation(sizes, keys)(np.array([4, 8, 0]))
    apart = [int(KeyedPermutation(int(n), int(k))(int(n) - 1)) for n, k in zip(sizes, keys, strict=True)]
    assert together.tolist() == apart


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_few_elements_are_equally_frequent(size):
    """Chi-square over all size! orders, 200 fixed keys for each; the bound is 4.5 standard deviations."""
    num_keys, freedom = 200 * factorial(size), factorial(size) - 1
    keys = hash64(2024, np.arange(num_keys))[:, None]
    seen = Counter(map(tuple, KeyedPermutation(size, keys)(np.arange(size)[None]).tolist()))
    chi_square = sum((seen[order] - 200) ** 2 / 200 for order in permutations(range(size)))
    assert abs(chi_square - freedom) < 4.5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [17, 64, 1000, 2**20])
def test_mapped_index_and_distance_of_neighbours_are_uniform(size):
    """Over many keys, the mapped value of an index is uniform, and so is the distance to that of its neighbour."""
    keys = hash64(7, np.arange(4000))
    first, second = (KeyedPermutation(size, keys)(np.full(4000, i)) for i in (size // 2, size // 2 + 1))
    for values, cells in ((first, size), ((second - first) % size - 1, size - 1)):
        counts = np.bincount(values * 16 // cells, minlength=16)
        expected = np.bincount(np.arange(cells) * 16 // cells) * 4000 / cells if cells < 1000 else 250
        assert np.abs(counts - expected).max() < 5 * np.sqrt(2 * 250)


@settings(max_examples=20)
@given(key=KEYS)
def test_uniforms_fill_the_unit_interval_and_do_not_depend_on_other_indices(key):
    draws = uniforms(key, np.arange(500), 3, count=8)
    assert draws.shape == (500, 8)
    assert 0 <= draws.min() < 0.01
    assert 0.99 < draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.03
    assert (uniforms(key, 17, 3, count=8) == draws[17]).all()


def test_sizes_and_indices_out_of_bounds_are_refused():
    with pytest.raises(ValueError, match="1 to 2\\^48"):
        KeyedPermutation(0, 1)
    with pytest.raises(IndexError, match="3 elements"):
        KeyedPermutation(3, 1)([0, 3])
    with pytest.raises(IndexError):
        KeyedPermutation(3, 1).inverse([-1])
