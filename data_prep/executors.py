"""Executors run the tasks of a stage: in this process, in threads, or by Ray on many machines."""

import contextlib
import hashlib
import math
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final, Protocol, TypeVar

from vitline.infra.runs.ray_work import RayTask, run_many
from vitline.infra.runs.task_watch import TaskWatch

T = TypeVar("T")
R = TypeVar("R")
FEW_PAIRS = 2048
"""Pairs of images that threads of one process compare before a pass of Ray, which takes seconds, would start."""


class Executor(Protocol):
    """Runs `work` on every task, in any order and place, and yields the results as they finish.

    `few`: so few tasks that this process has done them before a cluster would start. `heavy`: a task needs up to 0.9 GB of memory, so one
    process runs one at a time.
    """

    def run(
        self, work: Callable[[T], R], tasks: Sequence[T], *, few: bool = False, heavy: bool = False
    ) -> Iterator[R]: ...


class InProcess:
    """One task after another in this process."""

    def run(self, work: Callable[[T], R], tasks: Sequence[T], *, few: bool = False, heavy: bool = False) -> Iterator[R]:
        return map(work, tasks)


IN_PROCESS: Final = InProcess()


class Threads:
    """One thread per core that this process may use. It suits tasks that wait, or that run in other processes or in C libraries: Python
    code itself keeps no more than about 12 cores busy."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: upper limit of the number of threads."""
        self._most = most

    def run(self, work: Callable[[T], R], tasks: Sequence[T], *, few: bool = False, heavy: bool = False) -> Iterator[R]:
        if heavy:
            yield from map(work, tasks)
            return
        with ThreadPoolExecutor(min(num_cores(), self._most or num_cores())) as threads:
            futures = [threads.submit(work, task) for task in tasks]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:  # after an error, do not wait for the remaining tasks
                for future in futures:
                    future.cancel()


class OnRay:
    """One CPU of the cluster per task; `start_ray` must have been called. `watch` ends tasks that hang."""

    def __init__(self, watch: TaskWatch | None = None) -> None:
        self._watch = watch

    def run(self, work: Callable[[T], R], tasks: Sequence[T], *, few: bool = False, heavy: bool = False) -> Iterator[R]:
        if few or not tasks:
            return Threads().run(work, tasks, heavy=heavy)
        return run_many(work, [_ray_task(work, task) for task in tasks], watch=self._watch)


def _ray_task(work: Callable[[T], object], task: T) -> RayTask[T]:
    """A task with a title notes its progress."""
    if isinstance(title := getattr(task, "title", None), str):
        return RayTask(title, task)
    name = getattr(work, "__name__", "task").strip("_")
    return RayTask(f"{name}-{hashlib.sha256(pickle.dumps(task)).hexdigest()[:12]}", task, notes_progress=False)


def num_cores() -> int:
    """Cores that this process may use, limited by the machine, its CPU affinity and its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))  # "max" raises ValueError: no limit
    return cores
