"""Background loads, the most urgent first."""

import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

NOW, SOON, AHEAD = 0, 1, 2
"""Urgencies: a batch waits for it; the open block needs it; the next block will."""


class Load(Generic[T]):
    """One call, run at most once, in whichever thread comes first."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._taken = threading.Lock()
        self._future: Future[T] = Future()

    @property
    def begun(self) -> bool:
        """Whether some thread runs or ran the call."""
        return self._taken.locked()

    def run(self) -> None:
        """Run the call unless some thread does or did."""
        if self._call is None or not self._taken.acquire(blocking=False):
            return
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # it belongs to whoever waits for the result
            self._future.set_exception(error)
        self._call = None

    def result(self) -> T:
        """What the call returned or raised. Runs it here if no thread has begun."""
        self.run()
        return self._future.result()


class LoadQueue:
    """A few threads that run loads, the most urgent first, then first come first served.

    The queue does not own loads: one that nobody holds any more is forgotten, and its result is never kept alive here.
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
        """Queue a load unless it has begun; again with more urgency moves it forward."""
        if not load.begun:
            self._queue.put((urgency, next(self._count), weakref.ref(load)))

    def close(self) -> None:
        """Forget what has not begun and end the threads."""
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
            del load  # or this thread would hold the result while it waits
