"""Near duplicates: images whose 256-bit perceptual hashes (images.py) differ in at most MAX_DISTANCE bits.

The search in a table of evaluation hashes is exact: with at most 31 differing bits, at least one of 16 bands of 16 bits has at
most one differing bit, so 17 probes per band find every match (multi-index hashing; Norouzi et al., arXiv:1307.2982). Within a
corpus, only images that share a whole band are compared, which finds nearly all pairs with few differing bits and fewer of the
others. Images without contrast have no hash and match nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa

MAX_DISTANCE = 31
_BANDS = 16
_BAND_VALUES = 1 << 16
# Below this number of hashes, comparing with all of them is as fast as probing the bands.
_BRUTE_FORCE_BELOW = 2048
_QUERIES_AT_ONCE = 256
_PAIRS_AT_ONCE = 1 << 15  # their columns stay in the cache of a core
K = TypeVar("K", int, bytes)
_FLIPS = np.array([0, *(1 << bit for bit in range(16))], dtype=np.uint16)


def as_words(hashes: Iterable[bytes]) -> np.ndarray:
    """32-byte hashes as (n, 4) uint64."""
    return np.frombuffer(b"".join(hashes), dtype=np.uint64).reshape(-1, 4)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Differing bits of (..., 4) uint64 words, broadcast."""
    differing: np.ndarray = np.bitwise_count(a ^ b).sum(axis=-1, dtype=np.int16)
    return differing


class HashIndex:
    """A searchable table of hashes. Bands and hashes take about 110 bytes per hash, plus 8 MiB. Equal hashes are compared once."""

    def __init__(self, hashes: np.ndarray) -> None:
        """`hashes`: (n, 4) uint64; those of images without contrast are left out."""
        order = np.lexsort(hashes.T)
        order = order[hashes[order].any(axis=1)]
        ordered = hashes[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        # Rows of hash i are _owners[_owner_starts[i] : _owner_starts[i + 1]], ascending because lexsort is stable.
        self._owners, self._owner_starts = order, np.append(np.flatnonzero(new), len(order))
        distinct = np.ascontiguousarray(ordered[new])
        self._num_distinct, self._table = len(distinct), _halves(distinct)
        self._bands: list[tuple[np.ndarray, np.ndarray]] = []
        if len(distinct) >= _BRUTE_FORCE_BELOW:
            bands = distinct.view(np.uint16)
            self._bands = [_by_value(bands[:, band]) for band in range(_BANDS)]

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "HashIndex":
        """Index of a column of 32-byte hashes."""
        return cls(as_words(column.to_pylist()))

    def search(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every pair (query, row of the table, distance) with at most MAX_DISTANCE differing bits, sorted by query and row.

        `queries`: (m, 4) uint64. Memory: the result, and the near pairs of 256 queries.
        """
        blocks = [
            self._block(queries[first : first + _QUERIES_AT_ONCE], first)
            for first in range(0, len(queries), _QUERIES_AT_ONCE)
        ]
        query, row, distance = (_joined([block[i] for block in blocks]) for i in range(3))
        return query, row, distance

    def _block(self, queries: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        searched = np.flatnonzero(queries.any(axis=1))
        halves = _halves(queries[searched])
        found = [_near(halves, query, self._table, word) for query, word in self._candidates(queries[searched])]
        query, word, distance = (_joined([part[i] for part in found]) for i in range(3))
        # Near pairs share several bands.
        _, unique_pairs = np.unique(query * self._num_distinct + word, return_index=True)
        query, word, distance = query[unique_pairs], word[unique_pairs], distance[unique_pairs]
        parts = list(_expanded(np.arange(len(word)), self._owner_starts[word], self._owner_starts[word + 1]))
        pair, row = (_joined([part[i] for part in parts]) for i in range(2))
        row = self._owners[row]
        order = np.lexsort((row, query[pair]))
        pair, row = pair[order], row[order]
        return searched[query[pair]] + first, row, distance[pair]

    def _candidates(self, queries: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches of pairs (query, hash) that include all near pairs, some of them several times."""
        every = np.arange(len(queries))
        if not self._bands:
            yield from _expanded(every, np.zeros_like(every), np.full_like(every, self._num_distinct))
            return
        bands = np.ascontiguousarray(queries).view(np.uint16)
        query_of_probe = np.repeat(every, len(_FLIPS))
        for band, (starts, order) in enumerate(self._bands):
            probes = (bands[:, band, None] ^ _FLIPS).astype(np.int64).ravel()
            for query, place in _expanded(query_of_probe, starts[probes], starts[probes + 1]):
                yield query, order[place]


def _by_value(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and numbers: the positions with value v are numbers[starts[v] : starts[v + 1]]."""
    starts = np.zeros(_BAND_VALUES + 1, dtype=np.int64)
    starts[1:] = np.cumsum(np.bincount(values, minlength=_BAND_VALUES))
    return starts, np.argsort(values, kind="stable").astype(np.int32)


def _halves(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(hashes[:, :2]), np.ascontiguousarray(hashes[:, 2:])


def _near(
    queries: Sequence[np.ndarray], query: np.ndarray, table: Sequence[np.ndarray], word: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pairs with at most MAX_DISTANCE differing bits, and their distances. Most pairs are excluded by the first half."""
    distance = np.zeros(len(query), dtype=np.uint8)
    for queries_half, table_half in zip(queries, table, strict=True):
        bits = queries_half.take(query, axis=0)
        bits ^= table_half.take(word, axis=0)
        ones = np.bitwise_count(bits)
        distance += ones[:, 0] + ones[:, 1]  # at most 31 + 128
        keep = np.flatnonzero(distance <= MAX_DISTANCE)
        query, word, distance = query[keep], word[keep], distance[keep]
    return query, word.astype(np.int64), distance


def _expanded(labels: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The numbers of all ranges [start, end), concatenated, each with the label of its range, in batches."""
    stops = np.cumsum(ends - starts)
    offsets = ends - stops  # difference between a number and its place in the sequence
    total = int(stops[-1]) if len(stops) else 0
    for low in range(0, total, _PAIRS_AT_ONCE):
        high = min(low + _PAIRS_AT_ONCE, total)
        first, last = np.searchsorted(stops, [low, high - 1], side="right")
        inside = np.diff(np.concatenate(([low], stops[first:last], [high])))
        here = slice(first, last + 1)
        yield np.repeat(labels[here], inside), np.arange(low, high) + np.repeat(offsets[here], inside)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def band_bits(num_images: int) -> int:
    """Width of the bands within a corpus, 16 to 48 bits, such that few unrelated photographs share a band.

    One bit separates unrelated photographs as well as 0.7 of a random bit, and drawings as well as 0.4; this assumes 0.6.
    Narrower bands would find more of the distant pairs, but their cost grows with the square of the corpus.
    """
    return int(np.clip(8 * round(math.log2(max(2, num_images)) / 0.6 / 8), 16, 48))


def band_keys(hashes: np.ndarray, bits: int) -> np.ndarray:
    """(n, 16) uint64: keys of 16 bands of `bits` bits (a multiple of 8) for every hash. Keys of different bands never coincide.

    Bands start 16 bits apart and overlap. For pairs that differ in 4, 8, 16 and 31 random bits, bands of 16 bits find 100, 100,
    100 and 92 %; bands of 32 bits 100, 100, 86 and 17 %; bands of 48 bits 100, 95, 36 and 2 %.
    """
    width = bits // 8
    own = np.ascontiguousarray(hashes).view(np.uint8).reshape(-1, 32)
    around = np.concatenate([own, own[:, :width]], axis=1)
    keys = np.zeros((len(own), _BANDS, 8), dtype=np.uint8)
    for band in range(_BANDS):
        keys[:, band, :width] = around[:, 2 * band : 2 * band + width]
    numbered: np.ndarray = keys.view("<u8")[..., 0] | (np.arange(_BANDS, dtype=np.uint64) << np.uint64(48))
    return numbered


def pairs_within(keys: np.ndarray, hashes: np.ndarray, cap: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs (i, j) of positions, i before j, of rows with one key and at most MAX_DISTANCE differing bits, as arrays.

    `keys` must be sorted. Each row is compared with the first `cap` rows of its key, so time is linear in the rows. If the rows
    are sorted by sha256, these first rows are the ones that stay.
    """
    rows = np.arange(len(keys))
    first = _first_of_key(keys)
    has_hash = np.asarray(hashes.any(axis=1))
    ends = np.where(has_hash, np.minimum(rows, first + cap), first)
    for second, other in _expanded(rows, first, ends):
        near = np.flatnonzero((distances(hashes[second], hashes[other]) <= MAX_DISTANCE) & has_hash[other])
        yield other[near], second[near]


def num_beyond(keys: np.ndarray, cap: int) -> int:
    """Number of pairs of rows with one key that `pairs_within` skips because the key has more than `cap` rows."""
    return int(np.maximum(np.arange(len(keys)) - _first_of_key(keys) - cap, 0).sum())


def _first_of_key(keys: np.ndarray) -> np.ndarray:
    rows = np.arange(len(keys))
    new = np.ones(len(keys), dtype=bool)
    new[1:] = keys[1:] != keys[:-1]
    return np.maximum.accumulate(np.where(new, rows, 0)) if len(keys) else rows


def resolve(pairs: Iterable[tuple[K, K]], same: Callable[[K, K], bool] | None = None) -> dict[K, K]:
    """Which images are dropped, each with the image that stays instead, from pairs of keys of similar images in any order.

    Images are processed in the order of their keys. An image is dropped if it is
    similar to one that stays and has a smaller key; the smallest such key is recorded. Similarity is not chained. With `same`,
    pairs are candidates, and same(smaller, larger) is called only if the result still depends on it: for a thousand similar
    images a thousand times, not half a million.
    """
    smaller: dict[K, set[K]] = {}
    for a, b in pairs:
        if a != b:
            smaller.setdefault(max(a, b), set()).add(min(a, b))
    dropped: dict[K, K] = {}
    for image in sorted(smaller):
        for other in sorted(smaller[image]):
            if other not in dropped and (same is None or same(other, image)):
                dropped[image] = other
                break
    return dropped
