"""How a scenario says that a promise is broken or was not tried."""

import time
from collections.abc import Callable


class PromiseBroken(AssertionError):
    """A promise does not hold here; the text says what was found instead."""


class NotTried(RuntimeError):
    """A fault cannot be injected here; the text says why."""


def require(holds: bool, otherwise: str) -> None:
    """Raises PromiseBroken with the text unless `holds`."""
    if not holds:
        raise PromiseBroken(otherwise)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Returns once `condition()` is true. Raises PromiseBroken if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        require(time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)
