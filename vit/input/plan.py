"""Plans a reading order without reading data: balance over workers, memory, and a proposed number of lanes."""

from dataclasses import dataclass

import numpy as np

from vitline.data_prep.shard_format import SplitInfo
from vitline.vit.input.order import Order, RowGroups


@dataclass(frozen=True)
class OrderPlan:
    """The figures that `vitline pretrain run --plan` prints."""

    max_lanes_per_rank: int
    min_lanes_per_rank: int
    rank_imbalance_fraction: float
    """How many more examples than the mean the busiest rank reads in an epoch; 0 if all ranks read the same number."""
    thin_fraction: float
    """Fraction of an epoch in which some lane has ended, so that batches come from fewer lanes."""
    open_memory_bytes: int
    """Encoded bytes of the row groups that one rank keeps open: ceil(L / W) * w. Reading ahead has a separate budget."""
    proposed_num_lanes: int
    """As `propose_num_lanes` computes it."""


def plan_order(
    order: Order, *, world_size: int, mean_row_group_bytes: int, memory_budget_bytes: int = 2**31
) -> OrderPlan:
    """The plan of an order for W ranks. Raises ValueError unless W is between 1 and L."""
    check_world_size(world_size, order.num_lanes)
    num_lanes, sizes = order.num_lanes, order.lane_sizes(0)
    per_rank = np.bincount(np.arange(num_lanes) % world_size, weights=sizes, minlength=world_size)
    return OrderPlan(
        max_lanes_per_rank=-(-num_lanes // world_size),
        min_lanes_per_rank=num_lanes // world_size,
        rank_imbalance_fraction=float(per_rank.max() / per_rank.mean() - 1),
        thin_fraction=float(1 - sizes.min() * num_lanes / order.num_rows),
        open_memory_bytes=-(-num_lanes // world_size) * order.shuffle_window * mean_row_group_bytes,
        proposed_num_lanes=_propose(
            order.groups,
            order.global_batch_size,
            order.shuffle_window,
            world_size,
            mean_row_group_bytes,
            memory_budget_bytes,
        ),
    )


def propose_num_lanes(
    split: SplitInfo,
    *,
    global_batch_size: int,
    shuffle_window: int,
    mean_row_group_bytes: int,
    world_size: int = 1,
    memory_budget_bytes: int = 2**31,
) -> int:
    """A number of lanes for a recipe.

    It is a divisor of the batch between the number of ranks and the number of row groups. Preferred, in this order: open
    memory fits the budget; every lane fills a shuffle window; all ranks get the same number of lanes; as many lanes as
    possible (as few, if one of the first two fails). Raises ValueError if there is no such divisor.
    """
    return _propose(
        RowGroups.of(split),
        global_batch_size,
        shuffle_window,
        world_size,
        mean_row_group_bytes,
        memory_budget_bytes,
    )


def check_world_size(world_size: int, num_lanes: int) -> None:
    """Raises ValueError unless every rank has a lane to serve."""
    if not 1 <= world_size <= num_lanes:
        raise ValueError(
            f"world_size={world_size} must be 1 to num_lanes={num_lanes}, because each worker serves whole lanes. "
            "Use fewer workers, or a recipe with more lanes."
        )


def _propose(groups: RowGroups, batch: int, window: int, world_size: int, group_bytes: int, budget: int) -> int:
    divisors = [n for n in range(world_size, min(batch, groups.num_groups) + 1) if batch % n == 0]
    if not divisors:
        raise ValueError(
            f"No divisor of global_batch_size={batch} is between world_size={world_size} and the "
            f"{groups.num_groups} row groups of the split. Use fewer workers or another batch size."
        )

    def preference(lanes: int) -> tuple[bool, bool, bool, int]:
        fits = -(-lanes // world_size) * window * group_bytes <= budget
        full, even = lanes * window <= groups.num_groups, lanes % world_size == 0
        return fits, full, even, lanes if fits and full else -lanes

    return max(divisors, key=preference)
