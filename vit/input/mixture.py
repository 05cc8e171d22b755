"""Mixtures: the source of the example at any slot, computed without a stored list (docs/design.md, "Reading order").

A keyed permutation assigns the M slots of a block to the sources, and each source has a fixed number of them by its
weight. So the position in the source can be computed as well, and every position of every source comes exactly once.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from vit.input.keyed import KeyedPermutation, derive_key, hash64
from vit.input.order import Ints


class Mixture:
    """Slot <-> (source, position in the source), in both directions. `shares` is the number of slots per block and source.

    Raises ValueError if a weight is not positive, or if there are more sources than slots in a block.
    """

    def __init__(self, weights: Sequence[float], *, seed: int, block_slots: int) -> None:
        self.shares = largest_remainder(weights, block_slots)
        self.block_slots = block_slots
        self._stops = np.cumsum(self.shares)
        self._key = derive_key(seed, "mixture")

    def locate(self, slots: ArrayLike) -> tuple[Ints, Ints]:
        """(source, position in the source) of slots, as arrays of the same shape."""
        slots = np.asarray(slots, dtype=np.int64)
        block = slots // self.block_slots
        drawn = self._shuffle(block)(slots % self.block_slots)
        source = np.searchsorted(self._stops, drawn, side="right")
        return source, block * self.shares[source] + drawn - (self._stops - self.shares)[source]

    def slot_of(self, source: ArrayLike, position: ArrayLike) -> Ints:
        """The slot of a position of a source, the inverse of `locate`."""
        source, position = np.asarray(source), np.asarray(position, dtype=np.int64)
        block, rank = position // self.shares[source], position % self.shares[source]
        drawn = (self._stops - self.shares)[source] + rank
        slots: Ints = block * self.block_slots + self._shuffle(block).inverse(drawn)
        return slots

    def _shuffle(self, block: Ints) -> KeyedPermutation:
        return KeyedPermutation(self.block_slots, hash64(self._key, block))


def largest_remainder(weights: Sequence[float], total: int) -> Ints:
    """Distributes `total` slots in proportion to the weights, at least one to each source; shape (sources,).

    Each source gets the integer part of its share. The remaining slots go to the largest remainders, ties to the earlier
    source. A source that would get no slot takes one from the source with the most.
    """
    given = np.asarray(weights, dtype=np.float64)
    if not given.size or not (np.isfinite(given) & (given > 0)).all():
        raise ValueError(f"Mixture weights must be positive numbers, one per source, not {list(weights)}.")
    if given.size > total:
        raise ValueError(f"{given.size} sources do not fit into blocks of {total} slots. Use larger blocks.")
    exact = given / given.sum() * total
    shares: Ints = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: total - int(shares.sum())]] += 1
    while not shares.all():
        shares[shares.argmin()] += 1
        shares[shares.argmax()] -= 1
    return shares
