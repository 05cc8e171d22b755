"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(what: Callable[[], T], timeout_s: float = 600, awaited: str = "an answer", every_s: float = 0.25) -> T:
    """The first true answer of `what()`; `awaited` says what is missing if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"{awaited}: not within {timeout_s:g} s"
        time.sleep(every_s)
    return found
