"""Pictures that look alike: found by 256-bit perceptual hashes, at most MAX_DISTANCE bits apart.

Against a table of evaluation hashes the search is exact: a distance of at most 31 leaves one of 16 bands of 16 bits with
at most one differing bit, so 17 probes of each band find every match (multi-index hashing; Norouzi et al.,
arXiv:1307.2982). Within a corpus only pictures that share a whole band are compared, which finds nearly all pairs of a
few bits and fewer of the distant ones.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

MAX_DISTANCE = 31
_BANDS = 16
_BRUTE_FORCE_BELOW = 8192
_QUERIES_AT_ONCE = 256
_FLIPS = np.array([0, *(1 << bit for bit in range(16))], dtype=np.uint16)


def as_words(hashes: Iterable[bytes]) -> np.ndarray:
    """32-byte hashes as (n, 4) uint64."""
    return np.frombuffer(b"".join(hashes), dtype=np.uint64).reshape(-1, 4)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Differing bits of (..., 4) uint64 words, broadcast."""
    return np.bitwise_count(a ^ b).sum(axis=-1, dtype=np.int16)


class HashIndex:
    """A table of hashes to search. Equal hashes, as flat images have them, are looked at once."""

    def __init__(self, hashes: np.ndarray) -> None:
        """`hashes` (n, 4) uint64."""
        self._words, inverse = np.unique(hashes, axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        self._owners = np.argsort(inverse, kind="stable")
        self._owner_starts = np.searchsorted(inverse[self._owners], np.arange(len(self._words) + 1))
        if len(self._words) >= _BRUTE_FORCE_BELOW:
            bands = self._words.view(np.uint16).reshape(-1, _BANDS)
            self._order = [np.argsort(bands[:, band], kind="stable") for band in range(_BANDS)]
            values = np.arange(2**16 + 1)
            self._starts = [np.searchsorted(bands[order, i], values) for i, order in enumerate(self._order)]

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "HashIndex":
        """Of a column of 32-byte hashes."""
        return cls(as_words(column.to_pylist()))

    def search(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every pair (query, row of the table) at most MAX_DISTANCE apart, by query, then by row."""
        found = [
            self._block(queries[first : first + _QUERIES_AT_ONCE], first)
            for first in range(0, len(queries), _QUERIES_AT_ONCE)
        ]
        query, word = (np.concatenate([part[i] for part in found] or [np.empty(0, np.int64)]) for i in (0, 1))
        pair, rows = _expanded(self._owner_starts[word], self._owner_starts[word + 1])
        query, rows = query[pair], self._owners[rows]
        order = np.lexsort((rows, query))
        return query[order], rows[order]

    def matches(self, phash: pa.ChunkedArray, phash_mirror: pa.ChunkedArray) -> list[tuple[int, int]]:
        """Every (row, row of the table) where the picture or its mirror image is near."""
        found: set[tuple[int, int]] = set()
        for column in (phash, phash_mirror):
            query, row = self.search(as_words(column.to_pylist()))
            found.update(zip(query.tolist(), row.tolist(), strict=True))
        return sorted(found)

    def _block(self, queries: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
        if len(self._words) < _BRUTE_FORCE_BELOW:
            query, word = np.nonzero(distances(queries[:, None], self._words[None]) <= MAX_DISTANCE)
            return query + first, word
        bands = queries.view(np.uint16).reshape(-1, _BANDS)
        pairs = []
        for band in range(_BANDS):
            probes = bands[:, band, None] ^ _FLIPS
            starts, ends = self._starts[band][probes].ravel(), self._starts[band][probes.astype(np.int64) + 1].ravel()
            probe, place = _expanded(starts, ends)
            pairs.append((probe // len(_FLIPS)) * len(self._words) + self._order[band][place])
        keys = np.unique(np.concatenate(pairs))
        query, word = keys // len(self._words), keys % len(self._words)
        near = distances(queries[query], self._words[word]) <= MAX_DISTANCE
        return query[near] + first, word[near]


def _expanded(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of all ranges [start, end) one after another: (which range, number)."""
    lengths = ends - starts
    which = np.repeat(np.arange(len(starts)), lengths)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + starts[which]


def band_bits(num_images: int) -> int:
    """Width of the bands within a corpus: random hashes share one with about 256 others at most."""
    return int(np.clip(np.ceil(np.log2(max(1, num_images) / 256)), 16, 32))


def band_keys(hashes: np.ndarray, bits: int) -> np.ndarray:
    """(n, bands) uint64: for every hash a key of each of its whole bands of so many bits, which no other band has."""
    as_bits = np.unpackbits(hashes.view(np.uint8).reshape(len(hashes), 32), axis=1)
    num_bands = 256 // bits
    weights = (np.uint64(1) << np.arange(bits, dtype=np.uint64))[::-1]
    values = (as_bits[:, : num_bands * bits].reshape(-1, num_bands, bits).astype(np.uint64) * weights).sum(axis=2)
    return (np.arange(num_bands, dtype=np.uint64) << np.uint64(32)) | values


def pairs_within(keys: np.ndarray, hashes: np.ndarray, cap: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows with one key, at most MAX_DISTANCE apart, as arrays of pairs (i, j) of positions.

    `keys` are sorted. Each row is compared with the `cap` rows behind it that have its key.
    """
    for step in range(1, cap + 1):
        first = np.flatnonzero(keys[:-step] == keys[step:])
        if not len(first):
            return
        near = first[distances(hashes[first], hashes[first + step]) <= MAX_DISTANCE]
        yield near, near + step


def resolve(pairs: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Which pictures go, and for which: pairs of sha256 that look alike, in any order.

    Pair by pair against kept ones, no chaining: in the order of their sha256 a picture goes where one with a smaller
    sha256 that is kept looks like it; it names the smallest of these.
    """
    smaller: dict[bytes, set[bytes]] = {}
    for a, b in pairs:
        if a != b:
            smaller.setdefault(max(a, b), set()).add(min(a, b))
    goes: dict[bytes, bytes] = {}
    for picture in sorted(smaller):
        kept = [other for other in smaller[picture] if other not in goes]
        if kept:
            goes[picture] = min(kept)
    return goes
