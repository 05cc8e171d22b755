"""The interface of a store: read ranges, write whole objects, create if absent, compare and swap, list, delete.

All kinds of stores give the same guarantees; `tests/infra/test_storage.py` checks them for all of them.
Readers never see a half-written object. An object that is changed by compare-and-swap must only be created and swapped: a
plain `write` would overwrite it without a check.
"""

import contextlib
import errno
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

from vitline.infra.config import canonical_json

Keys = list[str]  # inside Store the name `list` is a method

TEMPORARY, LOCK = ".tmp-", ".lock-"  # hidden from list() and refused as names in keys


class PreconditionFailed(RuntimeError):
    """A conditional write failed: the object exists already, or does not have the given tag."""


class StoreFailed(RuntimeError):
    """The service refused a request or kept failing. The message has the operation, the object, the number of attempts, and as its
    last sentence the next step.

    `status` and `code` are from its last reply, such as (403, "AccessDenied"); (0, "") if there was none.
    """

    def __init__(self, text: str, status: int = 0, code: str = "") -> None:
        super().__init__(text)
        self.status, self.code = status, code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status, self.code)


class StoreRefused(StoreFailed):
    """The service refused a request permanently: missing or wrong credentials, no permission, no such bucket, a bucket of
    another region, a key that cannot exist.

    `why` is its error message without the operation.
    """

    def __init__(self, text: str, status: int = 0, code: str = "", why: str = "") -> None:
        super().__init__(text, status, code)
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status, self.code, self.why)


class Unwritable(OSError):
    """A place on this machine cannot be written; the message names the setting that chooses it."""

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(
            f"{what} cannot be written: {error.strerror}, at {error.filename}. Choose a place that this user may write to: "
            "--root or $VITLINE_ROOT for corpora, runs and models, $VITLINE_HOME for logs (without it they are stored "
            "beside the root)."
        )
        self._made_of = what, error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of


_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT}


@contextlib.contextmanager
def raising_unwritable(what: str) -> Iterator[None]:
    """Converts errors of missing permission or folders to Unwritable. Other errors, such as a full disk, are not changed."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise Unwritable(what, error) from error
        raise


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing. `tag` changes when the object is replaced: an ETag, or a time in ns."""

    key: str
    size: int
    tag: str


class Store(ABC):
    """Objects below one URI. Keys are relative and `/`-separated. Stores with the same URI are equal; pickle stores the URI."""

    uri: str
    high_latency: bool = False
    """True if a read mostly waits for a reply, so that several reads at once are faster."""

    @classmethod
    @abstractmethod
    def at(cls, uri: str) -> Self:
        """The store of this class at a URI."""

    @abstractmethod
    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of an object, or fewer if it ends earlier. Raises FileNotFoundError."""

    def read_all_of(self, key: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of an object that was found to have so many. Raises FileNotFoundError, and RuntimeError if it ends
        earlier."""
        data = self.read(key, start, end)
        if len(data) < end - start:
            raise RuntimeError(
                f"{self.uri_of(key)} ends after {start + len(data):,} bytes, but had at least {end:,} when it was opened or listed. "
                "Stop changing it, and run this again."
            )
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Reads from `start` into a buffer and returns the number of bytes. Raises FileNotFoundError."""
        data = self.read(key, start, start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @abstractmethod
    def read_tagged(self, key: str) -> tuple[bytes, str]:
        """The object and its tag for `compare_and_swap`. Equal bytes may have equal tags, so objects that are swapped
        contain a nonce or a counter. Raises FileNotFoundError."""

    def read_tagged_or_none(self, key: str) -> tuple[bytes | None, str | None]:
        """As `read_tagged`, but (None, None) if the object does not exist."""
        try:
            return self.read_tagged(key)
        except FileNotFoundError:
            return None, None

    @abstractmethod
    def size(self, key: str) -> int:
        """Size of an object in bytes. Raises FileNotFoundError."""

    @abstractmethod
    def writer(self, key: str) -> AbstractContextManager[BinaryIO]:
        """A context manager with a file to stream an object of any size into. The object becomes visible when the context
        ends; after an exception nothing remains."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Writes a whole object. Readers see the old one or the new one."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> str:
        """Writes an object that must not exist yet, and returns its tag. Raises PreconditionFailed if it exists."""

    def create_if_absent(self, key: str, data: bytes) -> bool:
        """Writes an object unless it exists; returns whether it was written."""
        try:
            self.create(key, data)
        except PreconditionFailed:
            return False
        return True

    @abstractmethod
    def compare_and_swap(self, key: str, data: bytes, tag: str) -> str:
        """Replaces an object that has this tag, and returns the new tag. Raises PreconditionFailed if it has another tag or
        does not exist."""

    def create_or_swap(self, key: str, data: bytes, tag: str | None) -> str:
        """Writes an object that still is as `read_tagged_or_none` found it, and returns its tag. Raises PreconditionFailed if another
        writer was first."""
        return self.create(key, data) if tag is None else self.compare_and_swap(key, data, tag)

    def list(self, prefix: str = "") -> Keys:
        """All keys that start with `prefix`, sorted. The prefix may end inside a name."""
        return sorted(found.key for found in self.scan(prefix))

    @abstractmethod
    def scan(self, prefix: str = "") -> Iterator[Listed]:
        """Like `list`, with sizes, page by page and in the order of the service: for folders of millions of objects."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes an object. A missing object is no error."""

    def discard(self, key: str) -> None:
        """Removes an object that only the caller has used, and the lock file of its compare-and-swaps."""
        self.delete(key)

    def leftovers(self, older_than_s: float) -> Keys:
        """Temporary files or unfinished uploads of killed writers, older than `older_than_s`, sorted. Readers do not see
        them. Those of other programs that write below this URI are among them."""
        return []

    def discard_leftovers(self, older_than_s: float) -> Keys:
        """Removes the leftovers and returns their names. A running writer that began more than `older_than_s` ago would
        lose its object, so use a day or more."""
        return []

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def open(self, key: str) -> BinaryIO:
        """A seekable file for random reads. Threads that share it also share its position. Raises FileNotFoundError."""
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, key), _READ_BUFFER_BYTES))

    def read_json(self, key: str) -> Any:
        """The value of a JSON object. Raises FileNotFoundError, and ValueError if it is not JSON."""
        try:
            return json.loads(self.read(key))
        except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
            raise ValueError(
                f"{self.uri_of(key)} is not JSON: {error}. vitline did not write it; restore or delete it."
            ) from error

    def read_json_or_none(self, key: str) -> Any:
        """As `read_json`, but None if the object does not exist."""
        try:
            return self.read_json(key)
        except FileNotFoundError:
            return None

    def write_json(self, key: str, value: Any) -> None:
        """Writes a value as sorted, indented JSON; equal values give equal bytes. NaN and infinities raise ValueError."""
        self.write(key, json_bytes(value))

    def child(self, prefix: str) -> "Store":
        """The store below `prefix/`."""
        return type(self).at(self.uri_of(prefix.rstrip("/")))

    def uri_of(self, key: str) -> str:
        return f"{self.uri.removesuffix('/')}/{checked_key(key)}"  # the URI of the root directory is file:///

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).at, (self.uri,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and other.uri == self.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"open_store({self.uri!r})"


def checked_key(key: str) -> str:
    """`key`. Raises ValueError if it could lead out of the store or looks like a temporary file."""
    for part in key.split("/"):
        if part in ("", ".", "..") or "\0" in part or part.startswith((TEMPORARY, LOCK)):
            raise ValueError(
                f"{key!r} is not a valid key: {part!r} cannot be part of one. Keys look like 'train/s000/part-00000'."
            )
    return key


def json_bytes(value: Any) -> bytes:
    """Sorted, indented JSON with a final newline. Equal values give equal bytes."""
    return (json.dumps(json.loads(canonical_json(value)), indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


_READ_BUFFER_BYTES = 256 * 1024  # larger reads bypass the buffer; smaller ones share a request


class _Ranges(io.RawIOBase):
    """A file over one object, whose reads are range reads of the store."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self._size, self._position = store, key, store.size(key), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise ValueError(f"cannot seek to {origin + offset}, before the start of {self._store.uri_of(self._key)}.")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        data = self._store.read_all_of(self._key, self._position, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
