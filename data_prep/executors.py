"""How the tasks of a pass are run: here one after another, in `prepare.py` by Ray Data on many machines."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Executor(Protocol):
    """Runs `work` on every task, in any order and place, and gives the results as they come."""

    def __call__(self, work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]: ...


def in_process(work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
    """One after another in this process."""
    return map(work, tasks)


class Threads:
    """An executor: a thread for every core that this process may use, results as they come. For work that waits, or that
    other processes and libraries do: Python itself keeps no more than some 12 cores busy."""

    def __init__(self, most: int | None = None) -> None:
        """`most` threads at most."""
        self._most = most

    def __call__(self, work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        with ThreadPoolExecutor(min(num_cores(), self._most or num_cores())) as threads:
            futures = [threads.submit(work, task) for task in tasks]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:  # of an error nobody waits for the rest
                for future in futures:
                    future.cancel()


in_threads = Threads()
_FEW_PAIRS = 2048


def for_pictures(executor: Executor, num_pairs: int) -> Executor:
    """What compares so many pairs of pictures: threads of this process where they are few, as a pass on Ray takes seconds."""
    return in_threads if executor is in_process or num_pairs <= _FEW_PAIRS else executor


def for_records(executor: Executor, num_tasks: int) -> Executor:
    """What sorts records: such a task needs up to 0.9 GB, so in one process there is one at a time."""
    return in_process if num_tasks == 1 or isinstance(executor, Threads) else executor


def num_cores() -> int:
    """Cores that this process may use: of the machine, its affinity and its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))  # "max": no number, and no limit
    return cores
