"""Runs loads in background threads, the most urgent first."""

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

NOW, SOON, AHEAD = 0, 1, 2
"""Urgencies: a batch waits for the load; the open block needs it; the next block will need it."""

_FILE_THREADS, _STORE_THREADS = 2, 32


def max_concurrent_loads(high_latency: bool) -> int:
    """How many row groups are loaded at a time, at most: from a disk, or from a store that answers over a network."""
    return _STORE_THREADS if high_latency else _FILE_THREADS


class Load(Generic[T]):
    """A call that runs once, in the first thread that gets to it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._taken = threading.Lock()
        self._future: Future[T] = Future()

    @property
    def begun(self) -> bool:
        """True once a thread has started the call."""
        return self._taken.locked()

    def run(self) -> None:
        """Runs the call unless a thread has started it."""
        if not self._taken.acquire(blocking=False) or self._call is None:
            return
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # raised where the result is used
            self._future.set_exception(error)
        self._call = None

    def result(self) -> T:
        """Returns or raises what the call did. Runs it in this thread if no other has started it."""
        self.run()
        return self._future.result()


class LoadQueue:
    """Threads that run loads, the most urgent first, equally urgent ones in the order they were queued.

    A thread starts when a load is queued and all are busy, up to `max_threads`. So there are as many as loads are under way
    at a time: the rate of loads times the seconds of one (Little's law). The queue holds weak references only: it drops a
    load that nobody else refers to, and keeps no result alive.
    """

    def __init__(self, max_threads: int) -> None:
        self._queue: PriorityQueue[tuple[int, int, weakref.ref[Load[Any]] | None]] = PriorityQueue()
        self._count = itertools.count()
        self._closed = False
        self.max_threads, self._threads = max_threads, list[threading.Thread]()
        self._unfinished = 0  # loads that are queued or run by a thread
        self._lock = threading.Lock()
        self._waited: tuple[float, float | None] = (
            0.0,
            None,
        )  # seconds of waits that ended, and when the present one began

    @property
    def num_threads(self) -> int:
        """Threads that were needed at a time until now."""
        return len(self._threads)

    @property
    def waited_s(self) -> float:
        """Seconds that were spent in `wait_for`, in total and until now."""
        ended_s, began = self._waited
        return ended_s + (0.0 if began is None else time.perf_counter() - began)

    def wait_for(self, load: Load[T]) -> T:
        """Returns or raises what a load did. Called by one thread."""
        ended_s, began = self._waited[0], time.perf_counter()
        self._waited = (ended_s, began)
        try:
            return load.result()
        finally:
            self._waited = (ended_s + time.perf_counter() - began, None)

    def put(self, load: Load[Any], urgency: int) -> None:
        """Queues a load unless it has started. Queueing it again with more urgency moves it forward."""
        if load.begun:
            return
        self._queue.put((urgency, next(self._count), weakref.ref(load)))
        with self._lock:
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self.max_threads) and not self._closed:
                name = f"row-group-loader-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """Drops the loads that have not started and ends the threads."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._queue.put((-1, next(self._count), None))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self._closed:
            queued = self._queue.get()[2]
            load = queued() if queued is not None else None
            if load is not None and not load.begun:
                load.run()
            del load  # otherwise this thread would keep the result alive while it waits
            with self._lock:
                self._unfinished -= 1
