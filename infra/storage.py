"""Objects under a URI: read a range, write whole, create if absent, compare and set, list, delete (DESIGN 5).

Every backend keeps the same promises; `tests/infra/test_storage.py` checks them over file://, memory:// and s3://.
Nothing half-written is ever visible. A key that is swapped must only ever be created and swapped: a plain `write`
to it is not part of the race and would win it unseen.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import stat
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from infra.config import canonical_json

Keys = list[str]  # inside Store the name `list` is the operation

_TEMPORARY, _LOCK = ".tmp-", ".lock-"  # hidden from list() and refused as names in keys


class Lost(RuntimeError):
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
def told_unwritable(what: str) -> Iterator[None]:
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
        """Write an object that must not exist yet and give its tag. Raises Lost: of many creators one wins."""

    @abstractmethod
    def swap(self, key: str, data: bytes, tag: str) -> str:
        """Replace the object that `tag` names and give the new tag. Raises Lost if another stands there, or none."""

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
        return open_store(self.uri_of(prefix.rstrip("/")))

    def uri_of(self, key: str) -> str:
        return f"{self.uri.removesuffix('/')}/{checked_key(key)}"  # the store of a whole disk is file:///

    def __reduce__(self) -> tuple[Any, ...]:
        return open_store, (self.uri,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and other.uri == self.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"open_store({self.uri!r})"


def open_store(uri: str | os.PathLike[str]) -> Store:
    """The store below a URI: a plain path, file://, memory:// (one process) or s3://bucket/prefix.

    Nothing is read or made. Raises ValueError for another scheme.
    """
    text = os.fspath(uri)
    scheme, _, rest = text.partition("://") if "://" in text else ("file", "", text)
    if scheme == "file" and rest:
        return FileStore(Path(os.path.abspath(rest)))
    rest = rest.rstrip("/")
    if scheme == "memory" and rest:
        return MemoryStore(rest)
    if scheme == "s3" and rest and not rest.startswith("/"):
        from infra.s3_store import S3Store  # s3fs takes half a second and is an extra

        return S3Store(rest)
    raise ValueError(f"{text!r} is no store; use a path, file:///path, s3://bucket/prefix or memory://name.")


def probe_conditional_writes(store: Store) -> None:
    """Try both conditional writes on a key of its own. Raises RuntimeError when the store accepts one that it
    should refuse: claims would not hold there, and two jobs could write one run."""
    key = f"probe-{uuid.uuid4().hex}"
    first = store.create(key, b"first")
    try:
        second = store.swap(key, b"second", first)
        refused = (
            ("create over an object", lambda: store.create(key, b"third")),
            ("swap with a stale tag", lambda: store.swap(key, b"third", first)),
            ("swap of an absent object", lambda: store.swap(f"{key}-absent", b"third", second)),
        )
        for what, attempt in refused:
            with contextlib.suppress(Lost):
                attempt()
                raise RuntimeError(
                    f"{store.uri} accepted a {what}, so it does not honour conditional writes and cannot hold claims. "
                    "Use a store that answers 412 to them."
                )
    finally:
        store.discard(key)
        store.discard(f"{key}-absent")


def check_writable(store: Store) -> None:
    """Raises Unwritable where this machine does not let us write there."""
    key = f"probe-{uuid.uuid4().hex}"
    store.write(key, b"")
    store.discard(key)


def checked_key(key: str) -> str:
    """`key`, or ValueError where it could leave the store or be taken for a temporary file."""
    for part in key.split("/"):
        if part in ("", ".", "..") or "\0" in part or part.startswith((_TEMPORARY, _LOCK)):
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


class FileStore(Store):
    """A directory. Temporary file plus rename, hard link or locked rename; the tag is the sha256 of the bytes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.uri = f"file://{directory}"

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._reading(key) as file:
            file.seek(start)
            return file.read(-1 if end is None else max(0, end - start))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        with self._reading(key) as file:
            file.seek(start)
            return cast(io.BufferedReader, file).readinto(buffer)

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        data = self.read(key)
        return data, hashlib.sha256(data).hexdigest()

    def size(self, key: str) -> int:
        with self._reading(key) as file:
            return os.fstat(file.fileno()).st_size

    def open(self, key: str) -> BinaryIO:
        return self._reading(key)

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        path = self._path(key)
        with self._temporary(path) as (temporary, file):
            yield file
            _settle(file)
            os.replace(temporary, path)

    def write(self, key: str, data: bytes) -> None:
        with self.writer(key) as file:
            file.write(data)

    def create(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with self._temporary(path) as (temporary, file):
            file.write(data)
            _settle(file)
            try:
                os.link(temporary, path)  # O_EXCL and a write would show readers a half-written file
            except FileExistsError as error:
                raise Lost(f"{self.uri_of(key)} exists already.") from error
        return hashlib.sha256(data).hexdigest()

    def swap(self, key: str, data: bytes, tag: str) -> str:
        path = self._path(key)
        if not path.parent.is_dir():
            raise Lost(f"{self.uri_of(key)} does not exist.")
        with open(path.with_name(_LOCK + path.name), "ab") as lock:  # never unlinked: the next one may hold it open
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                found = self.read_tagged(key)[1]
            except FileNotFoundError as error:
                raise Lost(f"{self.uri_of(key)} does not exist.") from error
            if found != tag:
                raise Lost(f"{self.uri_of(key)} was changed: its tag is {found[:12]}, not {tag[:12]}.")
            self.write(key, data)
        return hashlib.sha256(data).hexdigest()

    def list(self, prefix: str = "") -> Keys:
        folder = prefix.rpartition("/")[0]
        top = self._path(folder) if folder else self._directory
        keys = []
        for parent, _, names in os.walk(top):
            relative = Path(parent).relative_to(self._directory).as_posix()
            below = "" if relative == "." else f"{relative}/"
            keys += [below + name for name in names if not name.startswith((_TEMPORARY, _LOCK))]
        return sorted(key for key in keys if key.startswith(prefix))

    def scan(self, prefix: str = "") -> Iterator[Listed]:
        folder = prefix.rpartition("/")[0]
        yield from self._scan(self._path(folder) if folder else self._directory, f"{folder}/" if folder else "", prefix)

    def _scan(self, folder: Path, below: str, prefix: str) -> Iterator[Listed]:
        try:
            found = [*os.scandir(folder)]
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in sorted(found, key=lambda entry: entry.name):
            key = below + entry.name
            if entry.is_dir(follow_symlinks=False):
                if key.startswith(prefix) or prefix.startswith(f"{key}/"):
                    yield from self._scan(Path(entry.path), f"{key}/", prefix)
            elif key.startswith(prefix) and not entry.name.startswith((_TEMPORARY, _LOCK)):
                with contextlib.suppress(FileNotFoundError):  # a link to nothing
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):
                        yield Listed(key, status.st_size, str(status.st_mtime_ns))

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._path(key).unlink()

    def discard(self, key: str) -> None:
        self.delete(key)
        path = self._path(key)
        path.with_name(_LOCK + path.name).unlink(missing_ok=True)

    def leftovers(self, older_than_s: float) -> Keys:
        before = time.time() - older_than_s
        found = [Path(parent, name) for parent, _, names in os.walk(self._directory) for name in names]
        return sorted(
            path.relative_to(self._directory).as_posix()
            for path in found
            if path.name.startswith(_TEMPORARY) and _modified(path) < before
        )

    def discard_leftovers(self, older_than_s: float) -> Keys:
        found = self.leftovers(older_than_s)
        for key in found:
            (self._directory / key).unlink(missing_ok=True)
        return found

    def _path(self, key: str) -> Path:
        return self._directory / checked_key(key)

    def _reading(self, key: str) -> BinaryIO:
        try:
            return open(f"{self._directory}/{checked_key(key)}", "rb")  # a Path takes longer than a small read
        except (IsADirectoryError, NotADirectoryError) as error:  # a folder is no object, as on S3
            raise FileNotFoundError(2, "no such object", self.uri_of(key)) from error

    @contextlib.contextmanager
    def _temporary(self, path: Path) -> Iterator[tuple[Path, BinaryIO]]:
        temporary = path.with_name(_TEMPORARY + uuid.uuid4().hex)  # mkstemp would hide it from other users: mode 0600
        with told_unwritable(self.uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(temporary, "xb")  # noqa: SIM115 - only the opening is judged
        try:
            with file:
                yield temporary, file
        finally:
            temporary.unlink(missing_ok=True)


def _modified(path: Path) -> float:
    """Unix seconds; infinite for a file that has gone meanwhile, which is therefore no leftover."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _settle(file: BinaryIO) -> None:
    # A rename may reach the disk before the bytes do; a manifest must not outlive a power cut that its data did not.
    if not file.closed:
        file.flush()
        os.fsync(file.fileno())


_OBJECTS: dict[str, bytes] = {}
_OBJECTS_LOCK = threading.Lock()


class MemoryStore(Store):
    """Objects of this process, shared by all stores of it; for tests. The tag is the sha256 of the bytes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.uri = f"memory://{name}"

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._get(key)[start:end]

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        data = self._get(key)
        return data, hashlib.sha256(data).hexdigest()

    def size(self, key: str) -> int:
        return len(self._get(key))

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        checked_key(key)
        file = _KeptBytes()
        yield file
        self.write(key, file.getvalue())

    def write(self, key: str, data: bytes) -> None:
        with _OBJECTS_LOCK:
            _OBJECTS[self.uri_of(key)] = bytes(data)

    def create(self, key: str, data: bytes) -> str:
        with _OBJECTS_LOCK:
            if self.uri_of(key) in _OBJECTS:
                raise Lost(f"{self.uri_of(key)} exists already.")
            _OBJECTS[self.uri_of(key)] = bytes(data)
        return hashlib.sha256(data).hexdigest()

    def swap(self, key: str, data: bytes, tag: str) -> str:
        with _OBJECTS_LOCK:
            found = _OBJECTS.get(self.uri_of(key))
            if found is None or hashlib.sha256(found).hexdigest() != tag:
                raise Lost(f"{self.uri_of(key)} was changed or does not exist.")
            _OBJECTS[self.uri_of(key)] = bytes(data)
        return hashlib.sha256(data).hexdigest()

    def list(self, prefix: str = "") -> Keys:
        with _OBJECTS_LOCK:
            start = f"{self.uri}/{prefix}"
            return sorted(uri[len(self.uri) + 1 :] for uri in _OBJECTS if uri.startswith(start))

    def scan(self, prefix: str = "") -> Iterator[Listed]:
        for key in self.list(prefix):
            data, tag = self.read_tagged(key)
            yield Listed(key, len(data), tag)

    def delete(self, key: str) -> None:
        with _OBJECTS_LOCK:
            _OBJECTS.pop(self.uri_of(key), None)

    def _get(self, key: str) -> bytes:
        with _OBJECTS_LOCK:
            try:
                return _OBJECTS[self.uri_of(key)]
            except KeyError:
                raise FileNotFoundError(2, "no such object", self.uri_of(key)) from None


class _KeptBytes(io.BytesIO):
    """Keeps its bytes when a writer library closes it early."""

    def close(self) -> None:
        pass
