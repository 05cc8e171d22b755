"""The share of one rank in each global batch, and the number of micro-batches that every rank makes of it.

Arithmetic only; no data is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from vit.input.mixture import Mixture
from vit.input.order import Ints, Order, Rows
from vit.input.plan import check_world_size

# Shares are computed for several steps at once, about this many slots, to spread the fixed cost of a few dozen numpy calls.
_SLOTS_AT_ONCE = 1024


@dataclass(frozen=True)
class Share:
    """The slots of one batch that a rank serves, in ascending order, and their rows."""

    step: int
    slots: Ints
    source: Ints
    rows: Rows
    num_micro_batches: int
    """As many as the rank with the most slots needs, so the number is equal on every rank."""


class Schedule:
    """The shares of one rank. `orders` has one order per source, all with the same lanes and batch size.

    Raises ValueError if the rank, the world size or the micro-batch size is out of range.
    """

    def __init__(
        self, orders: Sequence[Order], mixture: Mixture | None, *, rank: int, world_size: int, micro_batch_size: int
    ) -> None:
        check_world_size(world_size, orders[0].num_lanes)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be 0 to world_size - 1 = {world_size - 1}.")
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be 1 or more.")
        self._orders, self._mixture = list(orders), mixture
        self._rank, self._world_size, self._micro_batch_size = rank, world_size, micro_batch_size
        self._batch = orders[0].global_batch_size

    def shares(self, start_step: int, num_steps: int | None = None) -> Iterator[Share]:
        """The shares of steps `start_step` up to `num_steps`, without end if that is None. Step 0 is the first batch."""
        at_once = max(1, _SLOTS_AT_ONCE // self._batch)
        while num_steps is None or start_step < num_steps:
            stop = start_step + at_once if num_steps is None else min(start_step + at_once, num_steps)
            yield from self._shares(start_step, stop)
            start_step = stop

    def _shares(self, start_step: int, stop_step: int) -> Iterator[Share]:
        slots = np.arange(start_step * self._batch, stop_step * self._batch)
        source, position = (np.zeros_like(slots), slots) if self._mixture is None else self._mixture.locate(slots)
        served_by = np.empty_like(slots)
        columns = {f.name: np.empty_like(slots) for f in fields(Rows)}
        for i, order in enumerate(self._orders):
            of_source = np.flatnonzero(source == i)
            places = order.places(position[of_source])
            served_by[of_source] = places.lane % self._world_size
            here = served_by[of_source] == self._rank
            found = order.rows(places.where(here))
            for name, column in columns.items():
                column[of_source[here]] = getattr(found, name)
        step = slots // self._batch
        served = np.bincount((step - start_step) * self._world_size + served_by)
        served.resize((stop_step - start_step) * self._world_size)
        busiest = served.reshape(-1, self._world_size).max(axis=1)
        for s in range(start_step, stop_step):
            at = np.flatnonzero((step == s) & (served_by == self._rank))
            rows = Rows(**{name: column[at] for name, column in columns.items()})
            yield Share(s, slots[at], source[at], rows, int(-(-busiest[s - start_step] // self._micro_batch_size)))
