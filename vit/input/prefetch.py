"""Prefetch: threads run the tasks of a few items ahead of the consumer, who gets the items in order."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")
Work = tuple[Sequence[Callable[[], None]], T]
"""Tasks, and the item that is complete once all of them have run."""

_POLL_S = 0.1
_EXIT_S = 5.0


class WaitTimes(NamedTuple):
    """Seconds that a consumer has waited for items, by what they waited for."""

    store_s: float = 0.0
    """The store: data that is not there yet."""
    decode_s: float = 0.0
    """The tasks of the item: decoding and augmentation."""
    hand_over_s: float = 0.0
    """All else: planning which examples come next, labels, memory for the pixels."""

    @property
    def total_s(self) -> float:
        return sum(self)

    def since(self, earlier: "WaitTimes") -> "WaitTimes":
        return WaitTimes(*(now - then for now, then in zip(self, earlier, strict=True)))

    def plus(self, other: "WaitTimes") -> "WaitTimes":
        return WaitTimes(*(mine + others for mine, others in zip(self, other, strict=True)))

    def scaled_to(self, total_s: float) -> "WaitTimes":
        """The same shares of another total; all of it decoding where nothing was waited for."""
        if self.total_s <= 0:
            return WaitTimes(decode_s=total_s)
        return WaitTimes(*(part * total_s / self.total_s for part in self))


class WorkTimes(NamedTuple):
    """What the items have cost so far, in seconds."""

    tasks_s: float = 0.0
    """From the start to the end of each task, added up over all threads."""
    tasks_cpu_s: float = 0.0
    """CPU time of the tasks."""
    planner_cpu_s: float = 0.0
    """CPU time of the thread in which `work` runs."""

    def plus(self, other: "WorkTimes") -> "WorkTimes":
        return WorkTimes(*(mine + others for mine, others in zip(self, other, strict=True)))


class Processes(Protocol):
    """Processes that do what the tasks wait for."""

    @property
    def waits(self) -> WaitTimes:
        """What they have waited for until now, all together."""

    @property
    def effort(self) -> WorkTimes:
        """What their work has cost until now."""

    @property
    def cpu_s(self) -> float:
        """CPU time of the processes."""

    def kill(self) -> None:
        """Ends them, whatever they do. Never waits; any thread may call it."""


class Prefetcher(Iterator[T], Generic[T]):
    """Iterates the items that `work` yields, each after its tasks have run. At most `depth` items are queued.

    `work` runs in its own thread. An exception of `work` or of a task is raised at the item it belongs to and ends the
    iteration. `close`, the end of the iteration and garbage collection stop the threads; then `on_close` is called.
    `store_waited_s()` returns the seconds that `work` has waited for the store until now. Where the tasks only wait for
    `processes`, these are killed as soon as the iteration stops, and say what waits for the tasks were waits for.
    """

    def __init__(
        self,
        work: Iterator[Work[T]],
        *,
        threads: int,
        depth: int,
        on_close: Callable[[], None] = lambda: None,
        store_waited_s: Callable[[], float] = lambda: 0.0,
        processes: Processes | None = None,
    ) -> None:
        self.waits = WaitTimes()
        """Seconds that the consumer has spent waiting in `next`."""
        self._store_waited_s = store_waited_s
        self._processes = processes
        pool = _single_threaded_pool(threads)
        self._shared = _Shared[T](Queue(maxsize=depth), pool, on_close, processes)
        self._planner = threading.Thread(target=_plan, args=(work, self._shared), name="input-planner", daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._shared)
        _planners[self._planner] = self._shared
        self._planner.start()

    @property
    def effort(self) -> WorkTimes:
        """What the items have cost so far, those that the consumer has not taken yet included."""
        mine = self._shared.effort
        return mine if self._processes is None else WorkTimes(0.0, 0.0, mine.planner_cpu_s).plus(self._processes.effort)

    @property
    def processes_cpu_s(self) -> float:
        """CPU time of the processes that work for this iterator, beside that of this process."""
        return 0.0 if self._processes is None else self._processes.cpu_s

    @property
    def is_ready(self) -> bool:
        """Whether `next` would return an item without a wait. Asked by the thread that calls `next`."""
        with self._shared.queue.mutex:
            first = self._shared.queue.queue[0] if self._shared.queue.queue else None
        return first is not None and first[0] is not None and all(future.done() for future in first[1])

    def __next__(self) -> T:
        if not self._finalizer.alive:
            raise StopIteration
        began, store_s = time.perf_counter(), self._store_waited_s()
        elsewhere = self._processes.waits if self._processes else None
        try:
            item, futures, error = self._shared.queue.get()
            planned = time.perf_counter()
            store_s = min(self._store_waited_s() - store_s, planned - began)
            for future in futures:
                future.result()
            if error is not None:
                raise error
        except BaseException:  # KeyboardInterrupt too: the threads must not outlive the loop
            self.close()
            raise
        for_tasks = WaitTimes(decode_s=time.perf_counter() - planned)
        if self._processes and elsewhere:
            for_tasks = self._processes.waits.since(elsewhere).scaled_to(for_tasks.total_s)
        self.waits = self.waits.plus(WaitTimes(store_s=store_s, hand_over_s=planned - began - store_s)).plus(for_tasks)
        if item is None:
            self.close()
            raise StopIteration
        return item

    def close(self) -> None:
        """Stops all threads and waits for them. May be called twice."""
        self._finalizer()
        self._planner.join()

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Shared(Generic[T]):
    """The state that planner and consumer share. The planner must not hold a reference to the consumer."""

    queue: "Queue[tuple[T | None, list[Future[None]], BaseException | None]]"
    pool: ThreadPoolExecutor
    on_close: Callable[[], None]
    processes: Processes | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    effort: WorkTimes = field(default_factory=WorkTimes)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, task: Callable[[], None]) -> Future[None]:
        return self.pool.submit(self._run, task)

    def spend(self, tasks_s: float, tasks_cpu_s: float, planner_cpu_s: float) -> None:
        with self.lock:
            spent = self.effort
            self.effort = WorkTimes(
                spent.tasks_s + tasks_s, spent.tasks_cpu_s + tasks_cpu_s, spent.planner_cpu_s + planner_cpu_s
            )

    def _run(self, task: Callable[[], None]) -> None:
        began, cpu_s = time.perf_counter(), time.thread_time()
        task()
        self.spend(time.perf_counter() - began, time.thread_time() - cpu_s, 0.0)


_planners: "weakref.WeakKeyDictionary[threading.Thread, _Shared[Any]]" = weakref.WeakKeyDictionary()


@atexit.register
def _end_planners() -> None:
    """Ends the threads of iterations that a program leaves open at its end. A thread that wants Python's lock back when Python has ended
    is unwound, and where C++ of torch or Arrow is on its stack, that aborts the process."""
    planners = list(_planners.items())
    for _, shared in planners:
        _stop(shared)
    until = time.monotonic() + _EXIT_S  # a store that hangs must not hold the process
    for planner, _ in planners:
        planner.join(max(0.0, until - time.monotonic()))


def _plan(work: Iterator[Work[T]], shared: _Shared[T]) -> None:
    cpu_s = time.thread_time()
    try:
        for tasks, item in work:
            futures, before = [shared.submit(task) for task in tasks], cpu_s
            cpu_s = time.thread_time()
            shared.spend(0.0, 0.0, cpu_s - before)
            if not _put(shared, item, futures, None):
                return
        _put(shared, None, [], None)
    except BaseException as error:  # raised at the consumer
        _put(shared, None, [], error)
    finally:
        shared.pool.shutdown(wait=True, cancel_futures=shared.stopped.is_set())
        shared.on_close()


def _put(shared: _Shared[T], item: T | None, futures: "list[Future[None]]", error: BaseException | None) -> bool:
    """Queues an item; False if the consumer has stopped."""
    while not shared.stopped.is_set():
        try:
            shared.queue.put((item, futures, error), timeout=_POLL_S)
            return True
        except Full:
            continue
    return False


def _stop(shared: _Shared[T]) -> None:
    """Stops without waiting, because garbage collection may call this in one of the threads."""
    shared.stopped.set()
    if shared.processes is not None:
        shared.processes.kill()
    with suppress(Empty):
        while True:  # make room for a planner that waits in put
            shared.queue.get_nowait()


def _single_threaded_pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads run torch operations on one OpenMP thread each: with more, its barriers cost 50 x a resize.

    The setting belongs to the thread, but it also becomes the default of threads that use torch later. So each thread
    sets it once at the start, and the caller's value is restored last.
    """
    before = torch.get_num_threads()
    all_set = threading.Barrier(threads + 1)

    def use_one_thread() -> None:
        torch.get_num_threads()  # otherwise torch's first use in this thread overwrites the setting with the default
        torch.set_num_threads(1)
        all_set.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="input", initializer=use_one_thread)
    for _ in range(threads):  # the pool starts one thread per waiting task
        pool.submit(lambda: None)
    all_set.wait()
    torch.set_num_threads(before)
    return pool
