"""The result of one check of the doctor, and how checks run side by side."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vitline.infra.local.processes import is_busy, load

DEADLINE_S = 20.0
BUSY = 5
"""Factor of all timeouts on a busy machine."""
BUSY_ADVICE = "This may not be a fault: run the doctor again when the machine is less busy."
_NONE: Mapping[str, float] = {}


class Check(NamedTuple):
    """One result; `advice` says what to do about it and is empty if nothing is wrong."""

    name: str
    ok: bool
    found: str
    advice: str = ""

    @property
    def mark(self) -> str:
        """A result that is good enough, and could be better, is a warning."""
        return "FAIL" if not self.ok else "WARN" if self.advice else "ok"


Checks = Sequence[tuple[str, Callable[[], "Check | Sequence[Check]"]]]
"""Names of checks, and functions that return their results."""


def patience() -> int:
    """The factor of all timeouts at this moment."""
    return BUSY if is_busy() else 1


def side_by_side(checks: Checks, longer: Mapping[str, float] = _NONE) -> list[Check]:
    """The results of all checks, in their order. Each runs in a thread of its own and is waited for no longer than `DEADLINE_S`, or as long
    as `longer` says. A check that raises or does not return in time is a failure."""
    found: dict[str, Check | Sequence[Check]] = {}
    threads = {
        name: threading.Thread(target=lambda n=name, c=check: found.update({n: _attempt(n, c)}), daemon=True)
        for name, check in checks
    }
    for thread in threads.values():
        thread.start()
    began = time.monotonic()
    for name, thread in threads.items():
        # `patience` is asked again each time: the machine may have become busy meanwhile.
        while thread.is_alive() and time.monotonic() - began < longer.get(name, DEADLINE_S) * patience():
            thread.join(0.1)
    results = [found.get(name) or _late(name, time.monotonic() - began) for name in threads]
    return [check for result in results for check in ([result] if isinstance(result, Check) else result)]


def _late(name: str, waited_s: float) -> Check:
    """The failure of a check that has not returned in time."""
    if is_busy():
        return Check(name, False, f"no answer within {waited_s:.0f} s, and this machine is busy: {load()}", BUSY_ADVICE)
    advice = "Look at the service or disk that it checks; a firewall may drop its requests."
    return Check(name, False, f"no answer within {waited_s:.0f} s, though this machine is not busy", advice)


def _attempt(name: str, check: Callable[[], Check | Sequence[Check]]) -> Check | Sequence[Check]:
    try:
        return check()
    except Exception as error:  # the other checks must still be reported
        message = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return Check(name, False, message[:300], "Fix what the message names, then run the doctor again.")
