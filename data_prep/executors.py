"""How the tasks of a pass are run: here one after another, in `prepare.py` by Ray Data on many machines."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Executor(Protocol):
    """Runs `work` on every task, in any order and place, and gives the results as they come."""

    def __call__(self, work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]: ...


def in_process(work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
    """One after another in this process."""
    return map(work, tasks)


_FEW_TASKS, _MOST_THREADS = 4, 16


def for_pictures(executor: Executor, num_tasks: int) -> Executor:
    """What runs so many tasks that compare some hundred pairs of pictures each: threads of this process where there are
    few, as a pass on Ray takes seconds."""
    return in_threads if executor is in_process or num_tasks <= _FEW_TASKS else executor


def in_threads(work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
    """A thread for every core of this machine, results in the order of the tasks: for work that waits, or that other
    processes and libraries do. The rest of it, in Python, keeps no more than some 12 cores busy."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as threads:
        yield from threads.map(work, tasks)
