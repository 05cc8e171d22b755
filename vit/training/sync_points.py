"""After which steps the host waits for its device, and what all ranks agree about then."""

import time
from collections.abc import Callable

import torch

from vitline.infra.runs.run_state import RunState
from vitline.vit.training.world import World

STOP_CODES: tuple[RunState | None, ...] = (None, "preempted", "out_of_time", "cancelled", "paused", "suspended")
"""The possible answers to "is a stop requested?"; ranks exchange the index."""
EVERY_S = 1.0
"""Seconds between two meetings of ranks that compute on GPUs."""


class SyncPoints:
    """The steps after which all ranks meet: after each one, or, where the device works on while the host queues more, about once a
    second.

    `stop_requested`, of rank 0, must return immediately. The number of steps to the next meeting is rank 0's, too, so the ranks need no
    common clock. A meeting between two of these, which all ranks hold after the same step, moves the next one.
    """

    def __init__(
        self, step: int, world: World, *, every_step: bool, stop_requested: Callable[[], RunState | None]
    ) -> None:
        """`step` is the last finished one."""
        self._world, self._every_step, self._stop_requested = world, every_step, stop_requested
        self._last, self._next, self._met_at = step, step + 1, time.monotonic()

    def due(self, step: int) -> bool:
        return step >= self._next

    def sync(self, step: int, num_bad: int) -> tuple[RunState | None, int, int]:
        """Rank 0's stop request, the bad examples of all ranks, and the number of steps, since the last meeting."""
        code, steps = STOP_CODES.index(self._stop_requested()) if self._world.rank == 0 else 0, step - self._last
        own = [code, num_bad, self._steps_to_next(steps) if self._world.rank == 0 else 0]
        code, num_bad, until_next = self._world.sum(torch.tensor(own)).tolist()
        self._last, self._next, self._met_at = step, step + until_next, time.monotonic()
        return STOP_CODES[code], num_bad, steps

    def _steps_to_next(self, steps: int) -> int:
        if self._every_step:
            return 1
        return max(1, int(EVERY_S * steps / max(time.monotonic() - self._met_at, 1e-3)))
