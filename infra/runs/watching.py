"""Watching a sign of life: whether something is dead is decided by what this process saw, never by comparing clocks."""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor

_READERS = 16
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
        self.moved = False
        """Whether the sign differed at the last look from that of the look before."""

    def unchanged_s(self, sign: Hashable) -> float:
        """Looks once: the seconds since `sign` was first seen; 0 if it differs from that of the look before."""
        now = self._clock()
        self.moved = self._looked_at is not None and sign != self._sign
        if self._looked_at is None or sign != self._sign:
            self._sign, self._unchanged_s = sign, 0.0
        else:
            self._unchanged_s += min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        return self._unchanged_s


def moving(
    looks: Mapping[str, Callable[[], Hashable]],
    for_s: float | Mapping[str, float],
    wait: Callable[[], object],
    watches: Mapping[str, Watch] | None = None,
) -> set[str]:
    """The keys whose sign of life moves while this process watches it; all others stand still for `for_s`, or their own.

    `looks` read the signs, side by side, until each has moved or stood still for so long. `wait()` is called between two looks.
    What both raise is raised here. `watches`: those of the keys, for whoever goes on watching.
    """
    watches, moved = defaultdict(Watch) if watches is None else watches, set[str]()
    long_s = for_s if isinstance(for_s, Mapping) else dict.fromkeys(looks, for_s)
    with ThreadPoolExecutor(_READERS) as pool:
        while left := [key for key in looks if key not in moved]:
            signs = pool.map(lambda key: looks[key](), left)
            still_s = {key: watches[key].unchanged_s(sign) for key, sign in zip(left, signs, strict=True)}
            moved |= {key for key in left if watches[key].moved}
            if all(still_s[key] >= long_s[key] for key in left if key not in moved):
                break
            wait()
    return moved
