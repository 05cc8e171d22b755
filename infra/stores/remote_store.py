"""What stores of services have in common: repeated requests, hedged reads, and conditional writes whose reply was lost.

Requests are repeated here with back-off, and as far as possible not in the libraries below, so that an error can tell
the number of attempts.
"""

import contextlib
import io
import logging
import os
import random
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import fsspec.asyn

from vitline.infra.environment.certificates import CERTIFICATE_ADVICE
from vitline.infra.environment.proxies import through_proxy
from vitline.infra.stores.hedged_reads import HedgedReads
from vitline.infra.stores.store import PreconditionFailed, Store, StoreFailed, StoreRefused

log = logging.getLogger(__name__)
T = TypeVar("T")
Span = tuple[int, int | None]  # first byte, and the byte after the last; None: to the end of the object

_ATTEMPTS = 9
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0  # 16 to 33 s of waiting in all
_RANGE_ATTEMPTS = 3  # a server under load may answer another range; a proxy that ignores the header does so every time
_PATIENCE_S = 300.0  # at least so long for a service that has answered before: it is away, and its address is right
SILENCE_S = 30  # seconds without a byte of the reply; a store that hangs fails after five minutes
PART_BYTES = 32 * 1024 * 1024  # at most 10,000 parts: 320 GB
PARTS_IN_FLIGHT = 3
# AWS answers 409 to two simultaneous conditional writes; the next try gets 412 or succeeds.
_TRANSIENT_STATUS = {408, 409, 429, 500, 502, 503, 504}
_THROTTLED_STATUS, _THROTTLED_CODES = {429}, {"SlowDown", "Throttling", "ThrottlingException", "ServerBusy"}
_TRANSIENT_CODES = {"RequestTimeout", "RequestTimeTooSkewed", *_THROTTLED_CODES}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_NO_OBJECT = {"", "404", "NoSuchKey", "NoSuchUpload", "BlobNotFound"}
_answered = set[Hashable]()
"""The services that have answered this process."""


class OtherRange(Exception):
    """The reply does not contain the requested range."""


class OddReply(OSError):
    """A reply of success that lacks what every such reply has: a server sends `200` without a body if it gives up early."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the error of a client says."""

    status: int = 0
    """HTTP status of the service's reply; 0 without one."""
    code: str = ""
    """Code of the service's reply, such as AccessDenied."""
    lost: bool = False
    """Without a reply: another try may get one."""
    refused: bool = False
    """Without a reply: no try gets one until somebody changes a setting."""
    of_certificate: bool = False
    """Without a reply: the certificate of the service is not trusted."""
    why: str = ""
    """The message, where that of the error itself is longer than anybody reads."""

    @property
    def transient(self) -> bool:
        if not self.status:
            return self.lost
        return self.status in _TRANSIENT_STATUS or self.code in _TRANSIENT_CODES

    @property
    def permanent(self) -> bool:
        """True if the request cannot succeed until somebody changes credentials, permissions, the bucket or the key.

        400 is the answer for a bucket of another region and for an impossible key, 414 for a key that is too long for the server.
        Expired credentials do not count, because they were valid before.
        """
        if self.status:
            return "Expired" not in self.code and (self.status in (301, 400, 401, 403, 414) or self.code in _NO_BUCKET)
        return self.refused

    def wait_s(self, attempt: int) -> float:
        """Seconds to wait after an attempt that failed. A service that asks to slow down gets twice the time. A connection that broke
        is one of many, so the second attempt, on another, comes after a tenth of it."""
        factor = 1.0
        if self.status in _THROTTLED_STATUS or self.code in _THROTTLED_CODES:
            factor = 2.0
        elif not self.status and attempt == 1:
            factor = 0.1
        wait_s: float = min(factor * _FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S)
        return wait_s * random.uniform(0.5, 1.0)  # random, so that workers that failed together retry apart


class Written(io.RawIOBase):
    """A file that is only written; `take` gets the bytes."""

    _position = 0

    @abstractmethod
    def take(self, data: memoryview) -> None: ...

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.take(view)
        self._position += view.nbytes
        return view.nbytes


class RemoteStore(Store):
    """A prefix of a bucket of a service. A read of a range that takes far longer than usual is requested once more
    (`hedged_reads.py`).

    A request that is refused raises StoreFailed with operation, object and number of attempts. So does one that fails for five
    minutes, or for about half a minute where the service has never answered this process.
    """

    high_latency = True
    settings_of_access: str
    """What an error without a better advice tells to check."""

    @property
    @abstractmethod
    def _service(self) -> Hashable:
        """The service, for what its stores in a process share."""

    @property
    @abstractmethod
    def _url(self) -> str:
        """An address of the service, to find the proxy that leads to it."""

    @abstractmethod
    def _answer(self, error: Exception) -> Answer:
        """What an error of the client says."""

    @abstractmethod
    async def _fetch(self, key: str, span: Span | None) -> tuple[bytes, str, int | None]:
        """Bytes and tag of an object or of the bytes [start, end) of it, and the number of bytes that the reply announces: None or 0
        if it is to be compared with the object's size. Raises OtherRange."""

    @abstractmethod
    async def _size_now(self, key: str) -> int:
        """Size of an object. Raises FileNotFoundError."""

    @abstractmethod
    def _put(self, key: str, data: bytes, signature: str, tag: str | None) -> str:
        """Writes an object that has this tag (None: that does not exist), with a signature in its metadata. Returns the new tag; raises
        StoreFailed with status 412 if it has another one."""

    @abstractmethod
    def _signed(self, key: str) -> tuple[str, str]:
        """Signature and tag of an object."""

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= start:
            self.size(key)
            return b""
        return self._get(key, None if start == 0 and end is None else (start, end))[0]

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        return self._get(key)

    def create(self, key: str, data: bytes) -> str:
        return self._put_if(key, data, None)

    def compare_and_swap(self, key: str, data: bytes, tag: str) -> str:
        return self._put_if(key, data, tag)

    def _get(self, key: str, span: Span | None = None) -> tuple[bytes, str]:
        """Bytes and tag of an object, or of the bytes [start, end) of it. Never fewer bytes than the object has there."""
        start, end = span or (0, None)

        async def get() -> tuple[bytes, str]:
            data, tag, length = await self._fetch(key, span)
            if not length:  # an empty object, or the reply of a service that gave up
                size = await size_now()
                length = max(0, min(end or size, size) - start)
            if len(data) != length:
                raise OddReply(f"the reply has {len(data):,} bytes, but the object has {length:,} in this place")
            return data, tag

        async def size_now() -> int:
            try:
                return await self._size_now(key)
            except FileNotFoundError:
                raise
            except Exception as error:  # without its status: whatever that is, the read is to be repeated
                raise OddReply(f"the reply has no bytes, and the size of the object is unknown: {error}") from None

        async def hedged() -> tuple[bytes, str]:
            reads = hedged_reads(os.getpid(), self._service)
            return await (reads.read(end - start, get) if end is not None else get())

        def request() -> tuple[bytes, str]:
            answer: tuple[bytes, str] = fsspec.asyn.sync(fsspec.asyn.get_loop(), hedged)
            return answer

        return self._retried("get_object", self.uri_of(key), request)

    def _put_if(self, key: str, data: bytes, tag: str | None) -> str:
        # A write that is repeated after a lost reply finds its own object and is refused. Some repetitions happen below
        # this code (aiohttp repeats a PUT if a kept-alive connection breaks), so each write carries a signature.
        signature = uuid.uuid4().hex
        try:
            return self._put(key, data, signature, tag)
        except (StoreFailed, FileNotFoundError) as error:
            if isinstance(error, StoreFailed) and error.status != 412:
                raise
            with contextlib.suppress(FileNotFoundError):
                writer, found = self._signed(key)
                if writer == signature:
                    return found
            raise PreconditionFailed(f"{self.uri_of(key)} exists already, was changed or was deleted.") from error

    def _retried(self, operation: str, uri: str, request: Callable[[], T], repeat: bool = True) -> T:
        """The result of `request()`, which is repeated with back-off while the service is unavailable or overloaded. With
        `repeat=False` the first error counts: that of a request which its client repeats, or that cannot be repeated."""
        began, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                result = request()
                _answered.add(self._service)
                return result
            except Exception as error:
                other_range = isinstance(error, OtherRange)
                answer = Answer(0, "OtherRange", lost=attempt < _RANGE_ATTEMPTS) if other_range else self._answer(error)
                if answer.status and answer.status < 500:  # a refusal is an answer, too
                    _answered.add(self._service)
                if answer.status == 404 and answer.code in _NO_OBJECT:
                    raise FileNotFoundError(2, "no such object", uri) from error
                waited_s, why = time.monotonic() - began, answer.why or str(error)
                impatient = self._service not in _answered or waited_s >= _PATIENCE_S
                if not (answer.transient and repeat) or (attempt >= _ATTEMPTS and impatient):
                    what = f"{operation} of {uri} failed at attempt {attempt}, after {waited_s:.0f} s"
                    if not answer.status:
                        what += through_proxy(self._url)
                    text = f"{what}: {why}. {self._next_step(answer, other_range)}"
                    if not answer.transient and answer.permanent:
                        raise StoreRefused(text, answer.status, answer.code, why) from error
                    raise StoreFailed(text, answer.status, answer.code) from error
                if attempt.bit_count() == 1:  # 1, 2, 4, ...: of minutes of attempts a few lines
                    log.warning("%s of %s failed at attempt %d, trying again: %s", operation, uri, attempt, why)
            time.sleep(answer.wait_s(attempt))

    def _next_step(self, answer: Answer, other_range: bool) -> str:
        if other_range:
            return "Let the proxy or cache before the store pass on the header Range, or read the store without it."
        if answer.of_certificate:
            return CERTIFICATE_ADVICE
        return "Check that the store runs." if answer.transient else f"Check {self.settings_of_access}."


@lru_cache
def hedged_reads(pid: int, service: Hashable) -> HedgedReads:
    """The reads of all threads of a process from one service."""
    return HedgedReads()
