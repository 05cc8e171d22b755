"""Objects under a URI: read a range, write whole, create if absent, compare and set, list, delete (DESIGN 5).

Every backend keeps the same promises; `tests/infra/test_storage.py` checks them over file://, memory:// and s3://.
Nothing half-written is ever visible. A key that is swapped must only ever be created and swapped: a plain `write`
to it is not part of the race and would win it unseen.
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

from infra.config import canonical_json

Keys = list[str]  # inside Store the name `list` is the operation

TEMPORARY, LOCK = ".tmp-", ".lock-"  # hidden from list() and refused as names in keys


class PreconditionFailed(RuntimeError):
    """A conditional write was refused: the object exists already, or is not the one that the tag names."""


class StoreFailed(RuntimeError):
    """A service that refused a request, or went on failing: operation, object and attempts are in the text.

    `status` and `code` are of its last answer, as (403, "AccessDenied"); (0, "") where there was none.
    """

    def __init__(self, text: str, status: int = 0, code: str = "") -> None:
        super().__init__(text)
        self.status, self.code = status, code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status, self.code)


class StoreRefused(StoreFailed):
    """A service that refused a request for good: no or wrong credentials, no permission, no such bucket. `why` is what it
    said, without the operation."""

    def __init__(self, text: str, status: int = 0, code: str = "", why: str = "") -> None:
        super().__init__(text, status, code)
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status, self.code, self.why)


class Unwritable(OSError):
    """A place on this machine that cannot be written, and which setting names it."""

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(
            f"{what} cannot be written: {error.strerror}, at {error.filename}. Name a place that this user may write to: "
            "--root or $VITLINE_ROOT gives that of corpora, runs and models, $VITLINE_HOME that of logs, which are kept "
            "beside the root where it is not set."
        )
        self._made_of = what, error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of


_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT}


@contextlib.contextmanager
def raising_unwritable(what: str) -> Iterator[None]:
    """Raises Unwritable where a place is not ours to write to. A full disk stays what it is: no other setting helps it."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise Unwritable(what, error) from error
        raise


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing shows it. `tag` is another text when the object was replaced: ETag, or time in ns."""

    key: str
    size: int
    tag: str


class Store(ABC):
    """Objects below one URI. Keys are relative and `/`-separated. Stores of one URI are equal and pickle by it."""

    uri: str
    reads_wait: bool = False
    """Whether a read is mostly waiting for an answer, so that several at once are quicker."""

    @classmethod
    @abstractmethod
    def at(cls, uri: str) -> Self:
        """The store of this kind at a URI, as `uri` gives it."""

    @abstractmethod
    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of an object, fewer where it ends earlier. Raises FileNotFoundError."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill a buffer with the bytes from `start` on and give how many there were. Raises FileNotFoundError."""
        data = self.read(key, start, start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @abstractmethod
    def read_tagged(self, key: str) -> tuple[bytes, str]:
        """The object and the tag that `swap` wants. Equal bytes may have equal tags, so what is swapped
        carries a nonce or a counter. Raises FileNotFoundError."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of an object. Raises FileNotFoundError."""

    @abstractmethod
    def writer(self, key: str) -> AbstractContextManager[BinaryIO]:
        """A file to stream an object of any size into. It becomes visible at a clean exit; after an
        exception nothing of it remains."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Write an object whole; readers see the old one or the new one."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> str:
        """Write an object that must not exist yet and give its tag. Raises PreconditionFailed: of many creators one wins."""

    @abstractmethod
    def compare_and_swap(self, key: str, data: bytes, tag: str) -> str:
        """Replace the object that `tag` names and give the new tag. Raises PreconditionFailed if another stands there, or none."""

    @abstractmethod
    def list(self, prefix: str = "") -> Keys:
        """Every key that starts with `prefix`, sorted. The prefix is plain text: it may end inside a name."""

    @abstractmethod
    def scan(self, prefix: str = "") -> Iterator[Listed]:
        """As `list`, with sizes and in the order of the service, a page at a time: for folders of millions of objects."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def discard(self, key: str) -> None:
        """Remove an object that nobody but the caller has ever known, and all that swapping it left behind."""
        self.delete(key)

    def leftovers(self, older_than_s: float) -> Keys:
        """What writers that were killed more than `older_than_s` ago left behind, sorted: temporary files or
        unfinished uploads, as `discard_leftovers` names them. No reader ever sees them."""
        return []

    def discard_leftovers(self, older_than_s: float) -> Keys:
        """Remove them and name them. A writer that has been at work for longer than `older_than_s` would lose its
        object, so let this be a day or more."""
        return []

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def open(self, key: str) -> BinaryIO:
        """A seekable file for random reads, safe to share between threads that do not mind each other's position.
        Raises FileNotFoundError."""
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, key), _READ_BUFFER_BYTES))

    def read_json(self, key: str) -> Any:
        """The value of a JSON object. Raises FileNotFoundError, and ValueError when it is not JSON."""
        try:
            return json.loads(self.read(key))
        except ValueError as error:
            raise ValueError(f"{self.uri_of(key)} is not JSON: {error}. It was written by something else.") from error

    def write_json(self, key: str, value: Any) -> None:
        """Write a value as sorted, indented JSON, equal for equal values. NaN and infinities raise ValueError."""
        self.write(key, json_bytes(value))

    def child(self, prefix: str) -> "Store":
        """The store of the keys below `prefix/`."""
        return type(self).at(self.uri_of(prefix.rstrip("/")))

    def uri_of(self, key: str) -> str:
        return f"{self.uri.removesuffix('/')}/{checked_key(key)}"  # the store of a whole disk is file:///

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).at, (self.uri,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and other.uri == self.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"open_store({self.uri!r})"


def checked_key(key: str) -> str:
    """`key`, or ValueError where it could leave the store or be taken for a temporary file."""
    for part in key.split("/"):
        if part in ("", ".", "..") or "\0" in part or part.startswith((TEMPORARY, LOCK)):
            raise ValueError(f"{key!r} is no key: {part!r} is not a name. Keys look like 'train/s000/part-00000'.")
    return key


def json_bytes(value: Any) -> bytes:
    """Sorted, indented JSON with a final newline; the bytes are equal for equal values."""
    return (json.dumps(json.loads(canonical_json(value)), indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


_READ_BUFFER_BYTES = 256 * 1024  # Larger reads go past the buffer; smaller ones share a request


class _Ranges(io.RawIOBase):
    """Random reads of one object, each a range read of the store."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self._size, self._position = store, key, store.size(key), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise ValueError(f"seek to {origin + offset} in {self._store.uri_of(self._key)}: before its start.")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        data = self._store.read(self._key, self._position, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
