"""Prefetch: threads run the tasks of a few items ahead of the consumer, who gets the items in order."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
Work = tuple[Sequence[Callable[[], None]], T]
"""Tasks, and the item that is complete once all of them have run."""

_POLL_S = 0.1


class Prefetcher(Iterator[T], Generic[T]):
    """Iterates the items that `work` yields, each after its tasks have run. At most `depth` items are queued.

    `work` runs in its own thread. An exception of `work` or of a task is raised at the item it belongs to and ends the
    iteration. `close`, the end of the iteration and garbage collection stop the threads; then `on_close` is called.
    """

    def __init__(
        self, work: Iterator[Work[T]], *, threads: int, depth: int, on_close: Callable[[], None] = lambda: None
    ) -> None:
        self.wait_s = 0.0
        """Seconds that the consumer has spent waiting in `next`, in total."""
        self._shared = _Shared[T](queue=Queue(maxsize=depth), pool=_single_threaded_pool(threads), on_close=on_close)
        self._planner = threading.Thread(target=_plan, args=(work, self._shared), name="input-planner", daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._shared)
        self._planner.start()

    def __next__(self) -> T:
        if not self._finalizer.alive:
            raise StopIteration
        started = time.perf_counter()
        try:
            item, futures, error = self._shared.queue.get()
            for future in futures:
                future.result()
            if error is not None:
                raise error
        except BaseException:  # KeyboardInterrupt too: the threads must not outlive the loop
            self.close()
            raise
        finally:
            self.wait_s += time.perf_counter() - started
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
    stopped: threading.Event = field(default_factory=threading.Event)


def _plan(work: Iterator[Work[T]], shared: _Shared[T]) -> None:
    try:
        for tasks, item in work:
            if not _put(shared, item, [shared.pool.submit(task) for task in tasks], None):
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
