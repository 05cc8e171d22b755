"""A second request for a read that takes far longer than usual: the first answer counts, the other request is cancelled.

Of thousands of requests to an object store a few meet a server that answers late, or that stops within its reply, and a batch
that waits for one of them waits with all workers. So the slowest are asked for once more, as in Dean and Barroso, "The Tail at
Scale" (2013); a budget bounds the further load, as in the retry throttling of gRPC.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_RECENT, _FEW = 128, 8  # reads that are remembered, by size; with fewer there is no usual time yet
_FIRST_PATIENCE_S, _FIRST_BYTES_PER_S = 1.0, 4e6  # until then: 1 s for a footer, 3 s for 8 MB
_LEAST_PATIENCE_S = 0.1
# A second request takes a median itself, so one before twice the median is mostly in vain. Where more than one read in twenty is
# late, the 95th percentile is that of late ones: five medians are enough.
_LEAST_MEDIANS, _MOST_MEDIANS = 2.0, 5.0
_SHARE, _BURST = 0.1, 8.0


class HedgedReads:
    """The reads of one client, in one event loop.

    A read gets at most one second request, once it has taken as long as 95 % of the recent reads of its size. Second requests
    are at most `_SHARE` of all reads that succeeded, and `_BURST` at first; a request that fails costs one of them, so that a
    store in trouble is not asked more.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._budget = _BURST
        self.num_reads, self.num_second = 0, 0
        """Reads, and second requests among them, until now."""

    async def read(self, num_bytes: int, request: Callable[[], Awaitable[T]]) -> T:
        """What `request()` returns, of one or two requests. Raises what the first one raised if none succeeds."""
        self.num_reads += 1
        recent = self._seconds.setdefault(num_bytes.bit_length() // 2, deque(maxlen=_RECENT))
        requests = [asyncio.ensure_future(self._timed(request, recent))]
        try:
            await asyncio.wait(requests, timeout=_patience_s(recent, num_bytes))
            if not requests[0].done() and self._budget >= 1:
                self._budget -= 1
                self.num_second += 1
                requests.append(asyncio.ensure_future(self._timed(request, recent)))
            waiting = set(requests)
            while waiting:
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in ended:
                    if one.exception() is None:
                        self._budget = min(_BURST, self._budget + _SHARE)
                        return one.result()
            return requests[0].result()
        finally:
            for one in requests:
                if one.done() and not one.cancelled():
                    one.exception()  # asyncio logs an error that nobody has looked at
                one.cancel()

    async def _timed(self, request: Callable[[], Awaitable[T]], recent: deque[float]) -> T:
        began = asyncio.get_running_loop().time()
        try:
            answer = await request()
        except Exception:
            self._budget = max(0.0, self._budget - 1)
            raise
        recent.append(asyncio.get_running_loop().time() - began)
        return answer


def _patience_s(recent: deque[float], num_bytes: int) -> float:
    """Seconds after which a read is late."""
    if len(recent) < _FEW:
        return _FIRST_PATIENCE_S + num_bytes / _FIRST_BYTES_PER_S
    median, late = statistics.median(recent), sorted(recent)[int(0.95 * len(recent))]
    return max(_LEAST_PATIENCE_S, min(max(late, _LEAST_MEDIANS * median), _MOST_MEDIANS * median))
