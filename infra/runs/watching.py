"""Watching a sign of life: whether something is dead is decided by what this process saw, never by comparing clocks."""

import time
from collections.abc import Callable, Hashable

_LONGEST_LOOK_S = 5.0
"""The most that the time between two looks counts. A process that was stopped in between saw nothing."""


class Watch:
    """How long a sign of life, such as the counter of a claim, has stood still while this process looked at it.

    Time is counted on the monotonic clock of this machine, so neither a clock that is ahead nor a suspended machine makes
    something old. A process that stands still itself, with all others of its machine, counts next to nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sign: Hashable = None
        self._looked_at: float | None = None
        self._unchanged_s = 0.0

    def unchanged_s(self, sign: Hashable) -> float:
        """Looks once: the seconds since `sign` was first seen; 0 if it differs from that of the look before."""
        now = self._clock()
        if self._looked_at is None or sign != self._sign:
            self._sign, self._unchanged_s = sign, 0.0
        else:
            self._unchanged_s += min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        return self._unchanged_s
