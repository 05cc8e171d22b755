"""Runs loads in background threads, the most urgent first."""

import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

NOW, SOON, AHEAD = 0, 1, 2
"""Urgencies: a batch waits for the load; the open block needs it; the next block will need it."""


class Load(Generic[T]):
    """A call that runs at most once, in the first thread that gets to it."""

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
        if self._call is None or not self._taken.acquire(blocking=False):
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
    """A few threads that run loads, the most urgent first, equally urgent ones in the order they were queued.

    The queue holds weak references only: it drops a load that nobody else refers to, and keeps no result alive.
    """

    def __init__(self, num_threads: int) -> None:
        self._queue: PriorityQueue[tuple[int, int, weakref.ref[Load[Any]] | None]] = PriorityQueue()
        self._count = itertools.count()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"row-group-loader-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, load: Load[Any], urgency: int) -> None:
        """Queues a load unless it has started. Queueing it again with more urgency moves it forward."""
        if not load.begun:
            self._queue.put((urgency, next(self._count), weakref.ref(load)))

    def close(self) -> None:
        """Drops the loads that have not started and ends the threads."""
        self._closed = True
        for _ in self._threads:
            self._queue.put((-1, next(self._count), None))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self._closed:
            queued = self._queue.get()[2]
            load = queued() if queued is not None else None
            if load is not None:
                load.run()
            del load  # otherwise this thread would keep the result alive while it waits
