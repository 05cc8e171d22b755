"""Search by hash, pairs within buckets, and which image is dropped."""

import itertools
import random

import numpy as np
import pyarrow as pa
import pytest

from vitline.data_prep.plan.similarity import near_duplicates
from vitline.data_prep.plan.similarity.near_duplicates import (
    MAX_DISTANCE,
    HashIndex,
    band_bits,
    band_keys,
    num_beyond,
    pairs_within,
    resolve,
)


def turned(words, num_bits, rng):
    """The same hashes with `num_bits` random bits of each flipped."""
    bits = np.unpackbits(words.view(np.uint8).reshape(len(words), 32), axis=1)
    for row, num in zip(bits, np.broadcast_to(num_bits, len(bits)), strict=True):
        row[rng.choice(256, num, replace=False)] ^= 1
    return np.packbits(bits, axis=1).view(np.uint64)


def random_hashes(num, rng):
    return rng.integers(1, 2**64, (num, 4), dtype=np.uint64)


def by_comparing_all(queries, table):
    """Sets of (query, row, distance), computed bit by bit; images without contrast match nothing."""
    q, t = (np.unpackbits(w.view(np.uint8).reshape(len(w), 32), axis=1).astype(np.int32) for w in (queries, table))
    distance = q.sum(1)[:, None] + t.sum(1)[None] - 2 * q @ t.T
    near = (distance <= MAX_DISTANCE) & (q.sum(1) > 0)[:, None] & (t.sum(1) > 0)[None]
    return {(i, j, distance[i, j]) for i, j in np.argwhere(near).tolist()}


@pytest.mark.parametrize("brute_force_below", [0, 10**9])
def test_the_index_finds_the_same_pairs_as_comparing_all(brute_force_below, monkeypatch):
    monkeypatch.setattr(near_duplicates, "_BRUTE_FORCE_BELOW", brute_force_below)
    monkeypatch.setattr(near_duplicates, "_PAIRS_AT_ONCE", 1000)  # ranges are cut in the middle
    rng = np.random.default_rng(0)
    strangers, centre = random_hashes(1500, rng), random_hashes(1, rng)
    # A thick cluster, equal hashes, flat pictures, and every distance around the limit.
    cluster = turned(np.repeat(centre, 200, axis=0), rng.integers(0, 40, 200), rng)
    table = np.concatenate([strangers, cluster, np.repeat(centre, 30, axis=0), np.zeros((40, 4), np.uint64)])
    table = table[rng.permutation(len(table))]
    copies = turned(strangers[:330], np.arange(330) % 34, rng)
    queries = np.concatenate([copies, centre, np.zeros((3, 4), np.uint64), random_hashes(20, rng)])
    query, row, distance = HashIndex(table).search(queries)
    found = list(zip(query.tolist(), row.tolist(), distance.tolist(), strict=True))
    assert set(found) == by_comparing_all(queries, table)
    assert [pair[:2] for pair in found] == sorted({pair[:2] for pair in found})  # each pair once, in order
    assert len(found) > 400


def test_index_finds_31_differing_bits_in_any_bands(monkeypatch):
    """Two differing bits in every band but one, which has one: the last case that the bands can find."""
    monkeypatch.setattr(near_duplicates, "_BRUTE_FORCE_BELOW", 0)
    stored = random_hashes(1, np.random.default_rng(0))
    for lone in range(16):
        bands = stored.copy().view(np.uint16)
        for band in range(16):
            bands[0, band] ^= 1 << 15 if band == lone else 0b100001
        query, row, distance = HashIndex(stored).search(bands.view(np.uint64))
        assert (query.tolist(), row.tolist(), distance.tolist()) == ([0], [0], [31])


def test_empty_index_or_empty_search_finds_nothing():
    some, none = random_hashes(3, np.random.default_rng(0)), np.empty((0, 4), np.uint64)
    for table, queries in ((none, some), (some, none), (none, none), (some * 0, some)):
        assert [len(column) for column in HashIndex(table).search(queries)] == [0, 0, 0]


def test_index_can_be_built_from_a_column_of_hashes():
    stored = random_hashes(3, np.random.default_rng(0))
    column = pa.chunked_array([[stored[0].tobytes()], [w.tobytes() for w in stored[1:]]])
    assert [c.tolist() for c in HashIndex.of(column).search(stored[::-1])] == [[0, 1, 2], [2, 1, 0], [0, 0, 0]]


def test_pairs_that_differ_in_few_bits_share_a_band():
    rng = np.random.default_rng(0)
    hashes = random_hashes(300, rng)
    for bits, num in ((16, 15), (24, 9), (32, 7), (48, 5)):
        # Fewer bits than disjoint bands: one of these is untouched.
        num = min(num, 256 // bits - 1)
        assert (band_keys(hashes, bits) == band_keys(turned(hashes, num, rng), bits)).any(axis=1).all()
    keys = band_keys(hashes, 48)
    assert len(np.unique(keys)) == keys.size  # bands have no key in common
    assert (keys == band_keys(random_hashes(300, rng), 48)).sum() == 0
    assert [band_bits(n) for n in (1, 5_000, 1_000_000, 14_000_000, 300_000_000)] == [16, 24, 32, 40, 48]


def test_pairs_within_compares_whole_buckets_up_to_a_limit_and_counts_the_rest():
    rng = np.random.default_rng(0)
    centres = random_hashes(3, rng)
    hashes = np.concatenate([turned(np.repeat(c[None], 20, axis=0), rng.integers(0, 24, 20), rng) for c in centres])
    hashes[7] = 0
    keys = np.repeat(np.array([5, 9], np.uint64), [20, 40])  # the last two clusters share a bucket
    near = {(i, j) for i, j, _ in by_comparing_all(hashes, hashes) if i < j and (i < 20) == (j < 20)}

    def found(cap):
        return {(i, j) for a, b in pairs_within(keys, hashes, cap) for i, j in zip(a.tolist(), b.tolist(), strict=True)}

    assert len(near) > 300
    assert found(40) == near
    assert num_beyond(keys, 40) == 0
    capped = {(i, j) for i, j in near if i - (0 if i < 20 else 20) < 3}
    assert found(3) == capped
    assert num_beyond(keys, 3) == sum(max(0, n - 3) for size in (20, 40) for n in range(size))
    assert list(pairs_within(keys[:0], hashes[:0], 3)) == []


def test_the_larger_sha256_is_dropped_without_chaining():
    a, b, c, d, e = (bytes([n]) for n in range(5))
    # b resembles a and is dropped; c resembles only b, which is dropped, so it stays; d resembles c and a.
    pairs = [(a, b), (b, c), (c, d), (d, a), (e, e)]
    for order in itertools.permutations(pairs):
        swapped = [pair[::-1] if random.random() < 0.5 else pair for pair in order]
        assert resolve(swapped) == {b: a, d: a}
    assert resolve([]) == {}


def test_resolve_compares_only_pairs_that_still_matter():
    pictures = [bytes([n]) for n in range(30)]
    compared = []

    def same(kept, other):
        compared.append((kept, other))
        return (kept[0] - other[0]) % 2 == 0  # two different images, fifteen copies of each

    dropped = resolve(itertools.combinations(pictures, 2), same)
    assert set(dropped.values()) == {pictures[0], pictures[1]}
    assert set(dropped) == set(pictures[2:])
    assert len(compared) == 1 + 14 + 2 * 14  # not 435
    confirmed = [pair for pair in itertools.combinations(pictures, 2) if same(*pair)]
    assert resolve(confirmed) == dropped
