"""Stores with s3:// URIs, on any S3 service that supports conditional writes (and refuses them with 412)."""

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, BinaryIO, Self, cast

import aiohttp
import botocore.session
import s3fs
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from vitline.infra.settings import Settings
from vitline.infra.stores import remote_store
from vitline.infra.stores.remote_store import Answer, OddReply, OtherRange, RemoteStore, Span, Written, log
from vitline.infra.stores.store import Keys, Listed, checked_key

Uploads = list[tuple[str, str]]  # key and upload id; inside S3Store the name `list` is a method

_TRANSIENT = (
    OSError,
    TimeoutError,
    aiohttp.ClientError,
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    ResponseParserError,
)
_INCOMPLETE = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ParamValidationError, boto.ProfileNotFound)
_WRONG_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class S3Store(RemoteStore):
    """A prefix of a bucket. Tags are ETags. The endpoint comes from Settings; botocore finds the credentials. With a URI
    `s3+NAME://bucket/prefix` all of them are those of the profile NAME in the AWS files of this machine.

    A killed `writer` leaves an unfinished multipart upload, which readers do not see. `leftovers` lists such uploads, and
    a lifecycle rule of the bucket may end them.
    """

    settings_of_access = "bucket, credentials and endpoint"

    def __init__(self, uri: str) -> None:
        self.uri = uri
        scheme, _, rest = uri.partition("://")
        self._bucket, _, prefix = rest.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._profile = scheme.partition("+")[2] or None
        settings = Settings()
        self._endpoint, self._region = settings.s3_endpoint_url, settings.s3_region
        if self._profile:
            self._endpoint, self._region = _place_of(self._profile)

    @property
    def _service(self) -> Hashable:
        return self._endpoint, self._region, self._profile

    @property
    def _url(self) -> str:
        return self._endpoint or "https://s3.amazonaws.com"

    @classmethod
    def at(cls, uri: str) -> Self:
        return cls(uri)

    def size(self, key: str) -> int:
        size: int = self._call("head_object", key)["ContentLength"]
        return size

    def write(self, key: str, data: bytes) -> None:
        self._call("put_object", key, Body=data)

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
        return _filesystem(os.getpid(), self._endpoint, self._region, self._profile)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + checked_key(key)}

    def _call(self, method: str, key: str, **arguments: Any) -> Any:
        at = self._at(key)
        return self._retried(
            method, self.uri_of(key), lambda: _proved(method, self._client().call_s3(method, **at, **arguments))
        )

    def _page(self, method: str, prefix: str, go_on: dict[str, str]) -> dict[str, Any]:
        wanted = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, **go_on}
        return self._retried(
            method, f"{self.uri}/{prefix}", lambda: _proved(method, self._client().call_s3(method, **wanted))
        )

    async def _fetch(self, key: str, span: Span | None) -> tuple[bytes, str, int | None]:
        ranged = {"Range": _range_header(*span)} if span else {}
        try:
            reply = await self._client()._call_s3("get_object", **self._at(key), **ranged)
        except Exception as error:
            if span and self._answer(error).status == 416:  # the range begins after the end of the object
                return b"", "", 0
            raise
        async with reply["Body"] as body:
            length = _announced_bytes(reply, span)  # before reading: the body may be the whole object
            return await body.read(), _proved("get_object", reply)["ETag"], length

    async def _size_now(self, key: str) -> int:
        size: int = _proved("head_object", await self._client()._call_s3("head_object", **self._at(key)))[
            "ContentLength"
        ]
        return size

    def _put(self, key: str, data: bytes, signature: str, tag: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        reply = self._call("put_object", key, Body=data, Metadata={"writer": signature}, **condition)
        return str(reply["ETag"])

    def _signed(self, key: str) -> tuple[str, str]:
        there = self._call("head_object", key)
        return there["Metadata"].get("writer", ""), str(there["ETag"])

    def _answer(self, error: Exception) -> Answer:
        cause: BaseException | None = error
        refused = False
        while cause is not None:
            if isinstance(cause, boto.ClientError):
                reply = cause.response
                return Answer(reply["ResponseMetadata"]["HTTPStatusCode"], str(reply["Error"].get("Code", "")))
            refused = refused or isinstance(cause, _INCOMPLETE)
            cause = cause.__cause__
        wrong_certificate = _WRONG_CERTIFICATE in str(error)
        final = isinstance(error, PermissionError | FileNotFoundError) or wrong_certificate
        return Answer(
            lost=isinstance(error, _TRANSIENT) and not final, refused=refused, of_certificate=wrong_certificate
        )

    def _next_step(self, answer: Answer, other_range: bool) -> str:
        if answer.code == "AccessDenied":
            return "Grant this key the policy of its role (infra/buckets), or use another key."
        return super()._next_step(answer, other_range)


class _Upload(Written):
    """A file that uploads its data in parts while it is written. A small object is uploaded in one request at the end."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._signature = uuid.uuid4().hex
        self._parts: list[Future[Any]] = []
        self._pool = ThreadPoolExecutor(remote_store.PARTS_IN_FLIGHT, thread_name_prefix="s3-part")

    def take(self, data: memoryview) -> None:
        self._buffer += data
        while len(self._buffer) >= remote_store.PART_BYTES:
            self._send(bytes(memoryview(self._buffer)[: remote_store.PART_BYTES]))
            del self._buffer[: remote_store.PART_BYTES]

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
        if len(self._parts) >= remote_store.PARTS_IN_FLIGHT:
            self._parts[-remote_store.PARTS_IN_FLIGHT].result()  # limits the number of parts in memory
        number = len(self._parts) + 1
        self._parts.append(
            self._pool.submit(self._call, "upload_part", UploadId=self._upload_id, PartNumber=number, Body=part)
        )


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
    """`reply`. Raises OddReply if it proves no success."""
    for field in _PROOF.get(method, ()):
        if field not in reply:
            raise OddReply(f"the reply has no {field}: the service answered without doing its work")
    return reply


def _range_header(start: int, end: int | None) -> str:
    return f"bytes={start}-{'' if end is None else end - 1}"


def _announced_bytes(reply: dict[str, Any], span: Span | None) -> int | None:
    """Length of the body as the header says; None if it says nothing. Raises OtherRange unless a reply to a range holds exactly
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
    raise OtherRange(
        f"the reply to the range {_range_header(start, end)} has status {status} and "
        f"{f'the range {given}' if given else 'no range'}, but must have status 206 and exactly this range"
    )


@lru_cache
def _place_of(profile: str) -> tuple[str | None, str | None]:
    """Endpoint and region of a profile. (None, None) for an unknown one, of which requests tell."""
    session = botocore.session.Session(profile=profile)
    try:
        found = session.get_scoped_config()
    except boto.ProfileNotFound:
        return None, None
    of_services = session.full_config.get("services", {}).get(found.get("services"), {})
    return of_services.get("s3", {}).get("endpoint_url") or found.get("endpoint_url"), found.get("region")


@lru_cache
def _filesystem(pid: int, endpoint: str | None, region: str | None, profile: str | None) -> s3fs.S3FileSystem:
    """One client for all threads of a process. `pid` makes a forked child create its own."""
    fs = s3fs.S3FileSystem(
        profile=profile,
        endpoint_url=endpoint,
        client_kwargs={"region_name": region} if region else {},
        config_kwargs={
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": remote_store.SILENCE_S,
            "max_pool_connections": 40,  # those of 32 loads at a time, and second requests of late ones
            # That of the variables is not that of a profile.
            "ignore_configured_endpoint_urls": profile is not None,
            # Endpoints other than AWS have no host name per bucket.
            **({"s3": {"addressing_style": "path"}} if endpoint else {}),
        },
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    fs.retries = 1
    return fs
