"""The share of one rank in each global batch, and the number of micro-batches that every rank makes of it.

Arithmetic only; no data is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from vitline.vit.input.mixture import Mixture
from vitline.vit.input.order import Ints, Order, Places, Rows
from vitline.vit.input.plan import check_world_size

# Shares are computed for several steps at once, about this many slots, to spread the fixed cost of a few dozen numpy calls.
_SLOTS_AT_ONCE = 1024
# The size of micro-batches is chosen by the shares of these first steps.
_STEPS_OF_SIZE = 16


Part = tuple[int, int]
"""(p, P): of the lanes of a rank, the p-th of P parts, so that each lane belongs to one."""
ALL: Part = (0, 1)


@dataclass(frozen=True)
class RankBatch:
    """The slots of one batch that a rank serves, in ascending order, and the rows of those that belong to a part of its lanes."""

    step: int
    slots: Ints
    num_micro_batches: int
    """As many as the rank with the most slots needs, so the number is equal on every rank."""
    at: Ints
    """Which of `slots` belong to the part, ascending; `source` and `rows` are theirs."""
    source: Ints
    rows: Rows


class Schedule:
    """The shares of one rank. `orders` has one order per source, all with the same lanes and batch size.

    Micro-batches have at most `most_examples` examples. All of a training have one size, so that a network is compiled once:
    the size that the busiest rank of the first steps fills best, whatever the rank and the step to start with.
    Raises ValueError if the rank, the world size or the micro-batch size is out of range.
    """

    def __init__(
        self, orders: Sequence[Order], mixture: Mixture | None, *, rank: int, world_size: int, most_examples: int
    ) -> None:
        check_world_size(world_size, orders[0].num_lanes)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be 0 to world_size - 1 = {world_size - 1}.")
        if most_examples < 1:
            raise ValueError(f"micro_batch_size={most_examples} must be 1 or more.")
        self.orders, self._mixture = list(orders), mixture
        self._rank, self._world_size = rank, world_size
        self._batch = orders[0].global_batch_size
        _, _, places = self._places(0, _STEPS_OF_SIZE)
        busiest = int(self._busiest(places.lane).max())
        self.micro_batch_size = -(-busiest // -(-busiest // most_examples))
        """Examples of every micro-batch, padding included."""

    def shares(self, start_step: int, num_steps: int | None = None, part: Part | None = ALL) -> Iterator[RankBatch]:
        """The shares of steps `start_step` up to `num_steps`, without end if that is None. Step 0 is the first batch.

        None as the part finds no rows, which takes a tenth of the time.
        """
        at_once = max(1, _SLOTS_AT_ONCE // self._batch)
        while num_steps is None or start_step < num_steps:
            stop = start_step + at_once if num_steps is None else min(start_step + at_once, num_steps)
            yield from self._shares(start_step, stop, part)
            start_step = stop

    def _shares(self, start_step: int, stop_step: int, part: Part | None) -> Iterator[RankBatch]:
        slots, source, places = self._places(start_step, stop_step)
        mine = places.lane % self._world_size == self._rank
        number, num_parts = part or (-1, 1)
        wanted = mine & (places.lane // self._world_size % num_parts == number)
        columns = {f.name: np.empty_like(slots) for f in fields(Rows)}
        for i, order in enumerate(self.orders):
            here = wanted & (source == i)
            found = order.rows(places.where(here))
            for name, column in columns.items():
                column[here] = getattr(found, name)
        for n, busiest in enumerate(self._busiest(places.lane).tolist()):
            in_batch = np.flatnonzero(mine[n * self._batch : (n + 1) * self._batch]) + n * self._batch
            at = np.flatnonzero(wanted[in_batch])
            chosen = in_batch[at]
            rows = Rows(**{name: column[chosen] for name, column in columns.items()})
            num_micro_batches = -(-busiest // self.micro_batch_size)
            yield RankBatch(start_step + n, slots[in_batch], num_micro_batches, at, source[chosen], rows)

    def _places(self, start_step: int, stop_step: int) -> tuple[Ints, Ints, Places]:
        """Slots of the steps, the source of each, and the place in that source."""
        slots = np.arange(start_step * self._batch, stop_step * self._batch)
        source, position = (np.zeros_like(slots), slots) if self._mixture is None else self._mixture.locate(slots)
        places = Places(*(np.empty_like(slots) for _ in fields(Places)))
        for i, order in enumerate(self.orders):
            here = source == i
            found = order.places(position[here])
            for f in fields(Places):
                getattr(places, f.name)[here] = getattr(found, f.name)
        return slots, source, places

    def _busiest(self, lane: Ints) -> Ints:
        """Examples of the busiest rank in each step, for the lanes of all slots of some steps."""
        served_by = lane.reshape(-1, self._batch) % self._world_size
        return np.array([np.bincount(of_step).max() for of_step in served_by])
