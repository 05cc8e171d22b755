"""Which rank all the others wait for. They sum their gradients at every step, so that each of them shows the speed of the slowest."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median_low
from typing import NamedTuple

import torch

from vitline.vit.training.timing.input_waits import NOTED_FRACTION
from vitline.vit.training.world import World

log = logging.getLogger(__name__)

EVERY_S = 60.0
"""Seconds of training between two comparisons of the ranks."""
_PASSES = 3
"""Times of a forward pass that a rank computes for itself: a backward pass takes about two."""


class _Share(NamedTuple):
    """What a rank does for itself in a step."""

    own_s: float
    data_wait_s: float
    machine: str


class SlowRanks:
    """Measures what each rank does before it has to wait for the others, its forward passes and its wait for data, and names the slowest.

    The time of the backward pass shows no slow rank: in it the ranks wait for each other's gradients. With sharded weights they
    also wait in the forward pass; then only waits for data are compared.
    """

    def __init__(self, world: World) -> None:
        self._world, self._machine = world, socket.gethostname()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._noted: int | None = None
        self._restart()

    def _restart(self) -> None:
        self._forward_s = self._data_wait_s = self._elapsed_s = 0.0
        self._steps = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass. Does not wait for the device."""
        if self._world.size == 1:
            yield
        elif self._world.device.type == "cpu":
            started = time.perf_counter()
            yield
            self._forward_s += time.perf_counter() - started
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))

    def compare(self, steps: int, data_wait_s: float, elapsed_s: float) -> dict[str, float]:
        """To be called at logged steps, when the device has been waited for, with what has passed since the last one; `elapsed_s` must be
        equal on every rank. Once a minute returns the metrics, and rank 0 logs a rank that is newly slow; else empty."""
        self._forward_s += sum(start.elapsed_time(end) for start, end in self._events) / 1_000
        self._events.clear()
        self._steps, self._data_wait_s = self._steps + steps, self._data_wait_s + data_wait_s
        self._elapsed_s += elapsed_s
        if self._world.size == 1 or self._elapsed_s < EVERY_S or not self._steps:
            return {}
        own_s = (_PASSES * self._forward_s + self._data_wait_s) / self._steps
        texts = self._world.gather(f"{own_s} {self._data_wait_s / self._steps} {self._machine}")
        shares = [_Share(float(own), float(wait), machine) for own, wait, machine in map(str.split, texts)]
        slowest = max(range(len(shares)), key=lambda rank: shares[rank].own_s)
        usual_s, step_s = median_low(share.own_s for share in shares), self._elapsed_s / self._steps
        fraction = min(1.0, (shares[slowest].own_s - usual_s) / step_s)
        self._note(slowest, shares[slowest], usual_s, fraction)
        self._restart()
        return {"time/slowest_rank": float(slowest), "time/slowest_rank_wait_fraction": fraction}

    def _note(self, rank: int, share: _Share, usual_s: float, fraction: float) -> None:
        slow = rank if fraction >= NOTED_FRACTION else None
        if slow is not None and slow != self._noted and self._world.rank == 0:
            log.warning(
                "the other ranks wait %.0f %% of the time for rank %d on %s. It needs %.3f s of a step for itself, %.3f s of it for data; "
                "the rank in the middle needs %.3f s. Look at the clocks, the temperature and the other processes of that machine.",
                *(100 * fraction, rank, share.machine, share.own_s, share.data_wait_s, usual_s),
            )
        self._noted = slow


def slow_rank_text(rank: float, fraction: float) -> str:
    """`waits 18 % of the time for rank 3`; empty where it is little."""
    return f"waits {100 * fraction:.0f} % of the time for rank {rank:.0f}" if fraction >= NOTED_FRACTION else ""
