"""Mixtures: the source of the example at any slot, computed without a stored list.

After t batches the sources 0 to j together have had floor(C_j t B) examples, where C_j is their exact share. So the count of
every source differs from its share by less than one example after any batch, and how many a source has had, and with it its
position, can be computed for any slot. A keyed permutation of the B slots of a batch says which slots are whose.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, lcm

import numpy as np
from numpy.typing import ArrayLike

from vitline.vit.input.order import Ints
from vitline.vit.input.permutation import KeyedPermutation, derive_key, hash64

_MOST_SHARES = 2**31
"""Sum of the whole weights, at most: its square must fit into an int64."""


class Mixture:
    """Slot -> (source, position in the source), for every slot from 0 without end, by arithmetic.

    `weights` are positive numbers, one per source; their decimal digits count as they are written, without rounding. Of any
    number of batches from the first one, and of any batches of two sources, a source has its share to within one example; of
    three sources or more a window that begins later may differ by nearly two.
    Raises ValueError for weights that are not positive or have too many digits, and for a share of less than one example of a
    batch, whose positions this arithmetic could not keep in order.
    """

    def __init__(self, weights: Sequence[float], *, seed: int, global_batch_size: int) -> None:
        self.weights = whole_weights(weights)
        self._total, self._ends = int(self.weights.sum()), np.cumsum(self.weights)[:-1]
        self._batch = global_batch_size
        least = int(self.weights.min())
        if least * global_batch_size < self._total:
            raise ValueError(
                f"The smallest of the weights {list(weights)} is {least * global_batch_size / self._total:.2g} examples of a batch of "
                f"{global_batch_size:,}, and at least one is needed. Use a larger weight or batch, or leave that corpus out."
            )
        self._key = derive_key(seed, "mixture")

    def locate(self, slots: ArrayLike) -> tuple[Ints, Ints]:
        """(source, position in the source) of slots, as arrays of the same shape."""
        slots = np.asarray(slots, dtype=np.int64)
        batches, at = np.unique(slots // self._batch, return_inverse=True)
        before, after = self._boundaries(batches), self._boundaries(batches + 1)
        keys = hash64(self._key, batches)
        # One permutation for all slots, as of a large batch, takes less time than one for each slot.
        shuffle = KeyedPermutation(self._batch, keys[0] if len(batches) == 1 else keys[at])
        drawn = shuffle(slots % self._batch)
        had, first = np.diff(before, axis=0), after - before  # of every source; of the sources before it, in this batch
        source: Ints = (drawn >= first[1:-1, at]).sum(axis=0)
        position: Ints = had[source, at] + drawn - first[source, at]
        return source, position

    def counts(self, num_batches: int) -> Ints:
        """Examples of every source in the first batches, shape (sources,)."""
        counts: Ints = np.diff(self._boundaries(np.array(num_batches)))
        return counts

    def _boundaries(self, batches: Ints) -> Ints:
        """Examples that the sources before each source, and all of them, have had; shape (sources + 1, *batches.shape)."""
        slots = batches * self._batch
        whole, rest = slots // self._total, slots % self._total  # divided first, so that no product overflows
        inner = [whole * end + rest * end // self._total for end in self._ends]
        return np.stack([np.zeros_like(slots), *inner, slots])


def whole_weights(weights: Sequence[float]) -> Ints:
    """The weights as the smallest whole numbers of the same ratios: [1, 0.3] -> [10, 3]; shape (sources,)."""
    if not weights or not all(isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"The weights of a mixture must be positive numbers, one per corpus, not {list(weights)}.")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = np.gcd.reduce(np.array(whole, dtype=object))
    whole = [weight // divisor for weight in whole]
    if sum(whole) > _MOST_SHARES:
        raise ValueError(
            f"The weights {list(weights)} have so many digits that their shares cannot be computed exactly. Use whole numbers, such "
            "as 2 and 1, or at most six digits."
        )
    return np.array(whole, dtype=np.int64)
