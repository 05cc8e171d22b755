"""Results of small tasks, in order, computed by threads a few items ahead of the consumer."""

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
"""Tasks, and the item that is complete when all of them have run."""

_POLL_S = 0.1


class Prefetcher(Iterator[T], Generic[T]):
    """Iterates the items that `work` yields, each after its tasks have run. At most `depth` items wait finished.

    `work` runs in a thread of its own. What it or a task raises is raised here, at the item it belongs to, and ends the
    iteration. `close`, the end of the iteration and garbage collection stop the threads; the last of them calls
    `on_close`.
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
        """Stop the threads; nothing is left running. May be called twice."""
        self._finalizer()
        self._planner.join()

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Shared(Generic[T]):
    """What planner and consumer share; the planner must not keep the consumer alive."""

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
    """False if the consumer has gone."""
    while not shared.stopped.is_set():
        try:
            shared.queue.put((item, futures, error), timeout=_POLL_S)
            return True
        except Full:
            continue
    return False


def _stop(shared: _Shared[T]) -> None:
    """Waits for nothing: garbage may be collected in one of the threads."""
    shared.stopped.set()
    with suppress(Empty):
        while True:  # room for a planner that waits in put
            shared.queue.get_nowait()


def _single_threaded_pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads run torch operations alone: with OpenMP's helpers, its barriers cost 50 x a resize.

    torch's setting is the thread's own, but also becomes the default of threads that use torch later; so each thread
    sets it once at the start and the caller's value is put back last.
    """
    before = torch.get_num_threads()
    all_set = threading.Barrier(threads + 1)

    def alone() -> None:
        torch.get_num_threads()  # else torch's first use in this thread sets the default over ours
        torch.set_num_threads(1)
        all_set.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="input", initializer=alone)
    for _ in range(threads):  # the pool starts a thread per waiting task
        pool.submit(lambda: None)
    all_set.wait()
    torch.set_num_threads(before)
    return pool
