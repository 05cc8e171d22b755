"""Stores with s3:// URIs, on any S3 service that supports conditional writes (and refuses them with 412).

Requests are repeated here with back-off, and as far as possible not in the libraries below, so that an error can tell
the number of attempts.
"""

import contextlib
import io
import logging
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, BinaryIO, Self, TypeVar, cast

import aiohttp
import fsspec.asyn
import s3fs
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from vitline.infra.settings import Settings, through_proxy
from vitline.infra.stores.hedged_reads import HedgedReads
from vitline.infra.stores.store import Keys, Listed, PreconditionFailed, Store, StoreFailed, StoreRefused, checked_key

log = logging.getLogger(__name__)
T = TypeVar("T")
Span = tuple[int, int | None]  # first byte, and the byte after the last; None: to the end of the object
Uploads = list[tuple[str, str]]  # key and upload id; inside S3Store the name `list` is a method

_ATTEMPTS = 9
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0  # 16 to 33 s of waiting in all
_RANGE_ATTEMPTS = 3  # a server under load may answer another range; a proxy that ignores the header does so every time
_PATIENCE_S = 300.0  # at least so long for a service that has answered before: it is away, and its address is right
_SILENCE_S = 30  # seconds without a byte of the reply; a store that hangs fails after five minutes
_PART_BYTES = 32 * 1024 * 1024  # at most 10,000 parts: 320 GB
_PARTS_IN_FLIGHT = 3
_TRANSIENT = (
    OSError,
    TimeoutError,
    aiohttp.ClientError,
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    ResponseParserError,
)
_WRONG_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# AWS answers 409 to two simultaneous conditional writes; the next try gets 412 or succeeds.
_TRANSIENT_STATUS = {408, 409, 429, 500, 502, 503, 504}
_THROTTLED_STATUS, _THROTTLED_CODES = {429}, {"SlowDown", "Throttling", "ThrottlingException"}
_TRANSIENT_CODES = {"RequestTimeout", "RequestTimeTooSkewed", *_THROTTLED_CODES}
_answered = set[tuple[str | None, str | None]]()
"""Endpoint and region of the services that have answered this process."""


class S3Store(Store):
    """A prefix of a bucket. Tags are ETags. The endpoint comes from Settings; botocore finds the credentials. A read of a range
    that takes far longer than usual is requested once more (`hedged_reads.py`).

    A killed `writer` leaves an unfinished multipart upload, which readers do not see. `leftovers` lists such uploads, and
    a lifecycle rule of the bucket may end them. A request that is refused raises StoreFailed with operation, object and number of
    attempts. So does one that fails for five minutes, or for about half a minute where the service has never answered this process.
    """

    high_latency = True

    def __init__(self, bucket_and_prefix: str) -> None:
        self._bucket, _, prefix = bucket_and_prefix.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket_and_prefix}"
        settings = Settings()
        self._endpoint, self._region = settings.s3_endpoint_url, settings.s3_region

    @classmethod
    def at(cls, uri: str) -> Self:
        return cls(uri.removeprefix("s3://"))

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= start:
            self.size(key)
            return b""
        return self._get(key, None if start == 0 and end is None else (start, end))[0]

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        return self._get(key)

    def size(self, key: str) -> int:
        size: int = self._call("head_object", key)["ContentLength"]
        return size

    def write(self, key: str, data: bytes) -> None:
        self._call("put_object", key, Body=data)

    def create(self, key: str, data: bytes) -> str:
        return self._put_if(key, data, IfNoneMatch="*")

    def compare_and_swap(self, key: str, data: bytes, tag: str) -> str:
        return self._put_if(key, data, IfMatch=tag)

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        checked_key(key)
        upload = _Upload(lambda method, **arguments: self._call(method, key, **arguments))
        try:
            yield cast(BinaryIO, upload)
            upload.complete()
        except BaseException:
            upload.abort()
            raise

    def scan(self, prefix: str = "") -> Iterator[Listed]:
        go_on: dict[str, str] | None = {}
        while go_on is not None:
            page = self._page("list_objects_v2", prefix, go_on)
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):  # folders made in an S3 console are not objects of the store
                    yield Listed(entry["Key"][len(self._prefix) :], entry["Size"], entry["ETag"])
            go_on = {"ContinuationToken": page["NextContinuationToken"]} if page["IsTruncated"] else None

    def delete(self, key: str) -> None:
        self._call("delete_object", key)

    def leftovers(self, older_than_s: float) -> Keys:
        return sorted(f"{key}?uploadId={upload}" for key, upload in self._unfinished(older_than_s))

    def discard_leftovers(self, older_than_s: float) -> Keys:
        found = self._unfinished(older_than_s)
        for key, upload in found:
            with contextlib.suppress(FileNotFoundError):  # its writer has finished or aborted it meanwhile
                self._call("abort_multipart_upload", key, UploadId=upload)
        return sorted(f"{key}?uploadId={upload}" for key, upload in found)

    def _unfinished(self, older_than_s: float) -> Uploads:
        """(key, upload id) of unfinished uploads that began more than `older_than_s` ago."""
        before = datetime.now(UTC) - timedelta(seconds=older_than_s)
        found = []
        go_on: dict[str, str] | None = {}
        while go_on is not None:
            page = self._page("list_multipart_uploads", "", go_on)
            found += [
                (entry["Key"][len(self._prefix) :], entry["UploadId"])
                for entry in page.get("Uploads", ())
                if entry["Initiated"] < before and entry["Key"].startswith(self._prefix)
            ]
            more = page.get("IsTruncated")
            go_on = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]} if more else None
        return found

    def _client(self) -> s3fs.S3FileSystem:
        return _filesystem(os.getpid(), self._endpoint, self._region)

    def _hedged(self) -> HedgedReads:
        return hedged_reads(os.getpid(), self._endpoint, self._region)

    def _call(self, method: str, key: str, **arguments: Any) -> Any:
        at = {"Bucket": self._bucket, "Key": self._prefix + checked_key(key)}
        return self._retried(
            method, self.uri_of(key), lambda: _proved(method, self._client().call_s3(method, **at, **arguments))
        )

    def _page(self, method: str, prefix: str, go_on: dict[str, str]) -> dict[str, Any]:
        wanted = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, **go_on}
        return self._retried(
            method, f"{self.uri}/{prefix}", lambda: _proved(method, self._client().call_s3(method, **wanted))
        )

    def _get(self, key: str, span: Span | None = None) -> tuple[bytes, str]:
        """Bytes and tag of an object, or of the bytes [start, end) of it. Never fewer bytes than the object has there."""
        wanted = {"Bucket": self._bucket, "Key": self._prefix + checked_key(key)}
        start, end = span or (0, None)
        ranged = {"Range": _range_header(start, end)} if span else {}
        fs = self._client()

        async def get() -> tuple[bytes, str]:
            length: int | None = None
            try:
                reply = await fs._call_s3("get_object", **wanted, **ranged)
            except Exception as error:
                if not span or _answer(error)[0] != 416:  # 416: the range begins after the end of the object
                    raise
                data, tag = b"", ""
            else:
                async with reply["Body"] as body:
                    length = _announced_bytes(reply, span)  # before reading: the body may be the whole object
                    data, tag = await body.read(), _proved("get_object", reply)["ETag"]
            if not length:  # an empty object, or the reply of a service that gave up
                size = await size_now()
                length = max(0, min(end or size, size) - start)
            if len(data) != length:
                raise _OddReply(f"the reply has {len(data):,} bytes, but the object has {length:,} in this place")
            return data, tag

        async def size_now() -> int:
            try:
                size: int = _proved("head_object", await fs._call_s3("head_object", **wanted))["ContentLength"]
            except FileNotFoundError:
                raise
            except Exception as error:  # without its status: whatever that is, the read is to be repeated
                raise _OddReply(f"the reply has no bytes, and the size of the object is unknown: {error}") from None
            return size

        async def hedged() -> tuple[bytes, str]:
            return await (self._hedged().read(end - start, get) if end is not None else get())

        def request() -> tuple[bytes, str]:
            answer: tuple[bytes, str] = fsspec.asyn.sync(fs.loop, hedged)
            return answer

        return self._retried("get_object", self.uri_of(key), request)

    def _retried(self, operation: str, uri: str, request: Callable[[], T]) -> T:
        """The result of `request()`, which is repeated with back-off while the service is unavailable or overloaded."""
        began, attempt, service = time.monotonic(), 0, (self._endpoint, self._region)
        while True:
            attempt += 1
            try:
                result = request()
                _answered.add(service)
                return result
            except Exception as error:
                status, code = _answer(error)
                if status and status < 500:  # a refusal is an answer, too
                    _answered.add(service)
                if status == 404 and code in ("404", "NoSuchKey", "NoSuchUpload"):
                    raise FileNotFoundError(2, "no such object", uri) from error
                transient = status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES if status else _is_network(error)
                if isinstance(error, _OtherRange):
                    transient = attempt < _RANGE_ATTEMPTS
                waited_s = time.monotonic() - began
                impatient = service not in _answered or waited_s >= _PATIENCE_S
                if not transient or (attempt >= _ATTEMPTS and impatient):
                    what = f"{operation} of {uri} failed at attempt {attempt}, after {waited_s:.0f} s"
                    where = _next_step(error, transient)
                    if not status:
                        what += through_proxy(self._endpoint or "https://s3.amazonaws.com")
                    if not transient and _is_refusal(error, status, code):
                        raise StoreRefused(f"{what}: {error}. {where}", status, code, str(error)) from error
                    raise StoreFailed(f"{what}: {error}. {where}", status, code) from error
                if attempt.bit_count() == 1:  # 1, 2, 4, ...: of minutes of attempts a few lines
                    log.warning("%s of %s failed at attempt %d, trying again: %s", operation, uri, attempt, error)
            time.sleep(_wait_s(attempt, status, code))

    def _put_if(self, key: str, data: bytes, **condition: str) -> str:
        # A write that is repeated after a lost reply finds its own object and is refused. Some repetitions happen below
        # this code (aiohttp repeats a PUT if a kept-alive connection breaks), so each write carries a signature.
        signature = uuid.uuid4().hex
        try:
            reply = self._call("put_object", key, Body=data, Metadata={"writer": signature}, **condition)
            return str(reply["ETag"])
        except (StoreFailed, FileNotFoundError) as error:
            if isinstance(error, StoreFailed) and error.status != 412:
                raise
            with contextlib.suppress(FileNotFoundError):
                there = self._call("head_object", key)
                if there["Metadata"].get("writer") == signature:
                    return str(there["ETag"])
            raise PreconditionFailed(f"{self.uri_of(key)} exists already, was changed or was deleted.") from error


class _Upload(io.RawIOBase):
    """A file that uploads its data in parts while it is written. A small object is uploaded in one request at the end."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._buffer, self._position = bytearray(), 0
        self._upload_id: str | None = None
        self._signature = uuid.uuid4().hex
        self._parts: list[Future[Any]] = []
        self._pool = ThreadPoolExecutor(_PARTS_IN_FLIGHT, thread_name_prefix="s3-part")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._buffer += view
        self._position += view.nbytes
        while len(self._buffer) >= _PART_BYTES:
            self._send(bytes(memoryview(self._buffer)[:_PART_BYTES]))
            del self._buffer[:_PART_BYTES]
        return view.nbytes

    def complete(self) -> None:
        if self._upload_id is None:
            self._call("put_object", Body=bytes(self._buffer))
        else:
            if self._buffer:
                self._send(bytes(self._buffer))
            parts = [{"PartNumber": n, "ETag": part.result()["ETag"]} for n, part in enumerate(self._parts, start=1)]
            try:
                self._call("complete_multipart_upload", UploadId=self._upload_id, MultipartUpload={"Parts": parts})
            except FileNotFoundError:  # an earlier try finished it, but its reply was lost; or the upload was aborted
                if self._call("head_object")["Metadata"].get("writer") != self._signature:
                    raise
        self._pool.shutdown()

    def abort(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._upload_id is not None:
            try:
                self._call("abort_multipart_upload", UploadId=self._upload_id)
            except Exception:  # the error that caused the abort is raised, not this one
                log.warning("an unfinished upload could not be aborted", exc_info=True)

    def _send(self, part: bytes) -> None:
        if self._upload_id is None:
            self._upload_id = self._call("create_multipart_upload", Metadata={"writer": self._signature})["UploadId"]
        if len(self._parts) >= _PARTS_IN_FLIGHT:
            self._parts[-_PARTS_IN_FLIGHT].result()  # limits the number of parts in memory
        number = len(self._parts) + 1
        self._parts.append(
            self._pool.submit(self._call, "upload_part", UploadId=self._upload_id, PartNumber=number, Body=part)
        )


class _OtherRange(Exception):
    """A reply does not hold the range that was asked for."""


class _OddReply(OSError):
    """A reply of success that lacks what every such reply has: a server sends `200` without a body if it gives up early."""


_PROOF = {
    "get_object": ("ETag",),
    "head_object": ("ETag", "ContentLength"),
    "put_object": ("ETag",),
    "create_multipart_upload": ("UploadId",),
    "upload_part": ("ETag",),
    "complete_multipart_upload": ("ETag",),
    "list_objects_v2": ("IsTruncated",),
}
"""What a reply of success has for certain, by operation. Without it nothing was read, written or listed."""


def _proved(method: str, reply: Any) -> Any:
    """`reply`. Raises _OddReply if it proves no success."""
    for field in _PROOF.get(method, ()):
        if field not in reply:
            raise _OddReply(f"the reply has no {field}: the service answered without doing its work")
    return reply


def _range_header(start: int, end: int | None) -> str:
    return f"bytes={start}-{'' if end is None else end - 1}"


def _announced_bytes(reply: dict[str, Any], span: Span | None) -> int | None:
    """Length of the body as the header says; None if it says nothing. Raises _OtherRange unless a reply to a range holds exactly
    these bytes of the object, or those up to its end."""
    announced: int | None = reply.get("ContentLength")
    status, given = reply["ResponseMetadata"]["HTTPStatusCode"], reply.get("ContentRange", "")
    if not span or (
        status == 200 and announced == 0
    ):  # of an empty object there is no range; some answer 416, others this
        return announced
    start, end = span
    parts = _CONTENT_RANGE.fullmatch(given)
    if status == 206 and parts:
        first, last, total = map(int, parts.groups())
        length = last + 1 - first
        if (first, last + 1) == (start, min(total, end or total)) and announced in (None, length):
            return length
    raise _OtherRange(
        f"the reply to the range {_range_header(start, end)} has status {status} and "
        f"{f'the range {given}' if given else 'no range'}, but must have status 206 and exactly this range"
    )


def _wait_s(attempt: int, status: int, code: str) -> float:
    """Seconds to wait after an attempt that failed. A service that asks to slow down gets twice the time. A connection that broke is
    one of many, so the second attempt, on another, comes after a tenth of it."""
    factor = 1.0
    if status in _THROTTLED_STATUS or code in _THROTTLED_CODES:
        factor = 2.0
    elif not status and attempt == 1:
        factor = 0.1
    wait_s: float = min(factor * _FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S)
    return wait_s * random.uniform(0.5, 1.0)  # random, so that workers that failed together retry apart


def _next_step(error: Exception, transient: bool) -> str:
    if isinstance(error, _OtherRange):
        return "Let the proxy or cache before the store pass on the header Range, or read the store without it."
    if _WRONG_CERTIFICATE in str(error):
        return "Set AWS_CA_BUNDLE to a file with the certificates of your authority."
    if _answer(error)[1] == "AccessDenied":
        return "Grant this key the policy of its role (infra/buckets), or use another key."
    return "Check that the store runs." if transient else "Check bucket, credentials and endpoint."


def _answer(error: BaseException | None) -> tuple[int, str]:
    """HTTP status and code of the S3 reply that caused an error; (0, "") if there was no reply, (0, "OtherRange") if it held
    another range than the one asked for."""
    if isinstance(error, _OtherRange):
        return 0, "OtherRange"
    while error is not None:
        if isinstance(error, boto.ClientError):
            answer = error.response
            return answer["ResponseMetadata"]["HTTPStatusCode"], str(answer["Error"].get("Code", ""))
        error = error.__cause__
    return 0, ""


def _is_refusal(error: BaseException | None, status: int, code: str) -> bool:
    """True if the request cannot succeed until somebody changes credentials, permissions, the bucket or the key.

    400 is the answer for a bucket of another region and for an impossible key, 414 for a key that is too long for the server.
    Expired credentials do not count, because they were valid before.
    """
    if status:
        return "Expired" not in code and (status in (301, 400, 401, 403, 414) or code == "NoSuchBucket")
    while error is not None:
        if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.ParamValidationError):
            return True
        error = error.__cause__
    return False


def _is_network(error: Exception) -> bool:
    final = isinstance(error, PermissionError | FileNotFoundError) or _WRONG_CERTIFICATE in str(error)
    return isinstance(error, _TRANSIENT) and not final


@lru_cache
def hedged_reads(pid: int, endpoint: str | None, region: str | None) -> HedgedReads:
    """The reads of all threads of a process from one service."""
    return HedgedReads()


@lru_cache
def _filesystem(pid: int, endpoint: str | None, region: str | None) -> s3fs.S3FileSystem:
    """One client for all threads of a process. `pid` makes a forked child create its own."""
    fs = s3fs.S3FileSystem(
        endpoint_url=endpoint,
        client_kwargs={"region_name": region} if region else {},
        config_kwargs={
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": _SILENCE_S,
            "max_pool_connections": 40,  # those of 32 loads at a time, and second requests of late ones
            # Endpoints other than AWS have no host name per bucket.
            **({"s3": {"addressing_style": "path"}} if endpoint else {}),
        },
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    fs.retries = 1
    return fs
