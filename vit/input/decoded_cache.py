"""Caches decoded pixels of small corpora in memory, so that nothing is read or decoded again after the first epoch."""

import threading
from dataclasses import dataclass

import numpy as np

Label = int | tuple[list[int], list[float] | None]
"""A class id, or class ids and their weights."""


@dataclass(frozen=True)
class CachedExample:
    """Decoded pixels (height, width, 3) uint8, and the label as the corpus stores it."""

    pixels: np.ndarray
    label: Label


class DecodedCache:
    """Decoded examples up to `budget_bytes`. Nothing is evicted, so later epochs of a larger corpus still get hits.

    Several iterators may share a cache, such as the trials of a task sweep: rows are stored under a key of split and
    decode policy. Thread-safe. The cache never changes a pixel.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._num_bytes = 0
        self.is_full = budget_bytes == 0
        """Whether an example has not fit: from then on, it is not worth decoding a whole image to cache it."""
        self._splits: dict[str, dict[int, CachedExample]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached pixels."""
        return self._num_bytes

    def split(self, key: str) -> dict[int, CachedExample]:
        """The cached rows of one split, for lookups."""
        with self._lock:
            return self._splits.setdefault(key, {})

    def offer(self, key: str, row: int, example: CachedExample) -> None:
        """Caches an example if the budget allows."""
        rows = self.split(key)
        with self._lock:
            if row in rows:
                return
            if self._num_bytes + example.pixels.nbytes > self._budget_bytes:
                self.is_full = True
                return
            rows[row] = example
            self._num_bytes += example.pixels.nbytes
