"""How the tasks of a pass are run: here one after another, in `prepare.py` by Ray Data on many machines."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Executor(Protocol):
    """Runs `work` on every task, in any order and place, and gives the results as they come."""

    def __call__(self, work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]: ...


def in_process(work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
    """One after another in this process."""
    return map(work, tasks)
