"""Executors run the tasks of a stage: in this process, in threads, or (in `prepare/job.py`) by Ray Data on many machines."""

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
    """Runs `work` on every task, in any order and place, and yields the results as they finish."""

    def __call__(self, work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]: ...


def in_process(work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
    """One task after another in this process."""
    return map(work, tasks)


class Threads:
    """An executor with one thread per core that this process may use. It suits tasks that wait, or that run in other processes
    or in C libraries: Python code itself keeps no more than about 12 cores busy."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: upper limit of the number of threads."""
        self._most = most

    def __call__(self, work: Callable[[T], R], tasks: Sequence[T], /) -> Iterator[R]:
        with ThreadPoolExecutor(min(num_cores(), self._most or num_cores())) as threads:
            futures = [threads.submit(work, task) for task in tasks]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:  # after an error, do not wait for the remaining tasks
                for future in futures:
                    future.cancel()


in_threads = Threads()
_FEW_PAIRS = 2048


def for_pictures(executor: Executor, num_pairs: int) -> Executor:
    """Executor for comparing this many pairs of images: threads of this process for few, because a Ray pass takes seconds."""
    return in_threads if executor is in_process or num_pairs <= _FEW_PAIRS else executor


def for_records(executor: Executor, num_tasks: int) -> Executor:
    """Executor for sorting records. A task needs up to 0.9 GB, so within one process tasks run one at a time."""
    return in_process if num_tasks == 1 or isinstance(executor, Threads) else executor


def num_cores() -> int:
    """Cores that this process may use, limited by the machine, its CPU affinity and its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))  # "max" raises ValueError: no limit
    return cores
