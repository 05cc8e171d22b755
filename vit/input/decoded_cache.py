"""Decoded pixels of small corpora, kept in memory: after the first epoch nothing is read or decoded again."""

import threading
from dataclasses import dataclass

import numpy as np

Label = int | tuple[list[int], list[float] | None]
"""A class, or classes and their weights."""


@dataclass(frozen=True)
class CachedExample:
    """Pixels (height, width, 3) uint8 as decoded, and the label as stored."""

    pixels: np.ndarray
    label: Label


class DecodedCache:
    """Decoded examples up to `budget_bytes`; what comes first stays, so epochs of a larger corpus still profit.

    One cache may serve many iterators, as in a sweep over one small corpus: rows are kept by a key that names split
    and decode policy. Safe in threads. What it holds never changes a pixel.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._num_bytes = 0
        self._splits: dict[str, dict[int, CachedExample]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of pixels held."""
        return self._num_bytes

    def split(self, key: str) -> dict[int, CachedExample]:
        """The rows held of one split, for lookups."""
        with self._lock:
            return self._splits.setdefault(key, {})

    def offer(self, key: str, row: int, example: CachedExample) -> None:
        """Keep an example if the budget allows."""
        rows = self.split(key)
        with self._lock:
            if row not in rows and self._num_bytes + example.pixels.nbytes <= self._budget_bytes:
                rows[row] = example
                self._num_bytes += example.pixels.nbytes
