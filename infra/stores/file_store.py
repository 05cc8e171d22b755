"""Stores with file:// URIs: a folder on a local disk, or on one that several machines share."""

import contextlib
import errno
import hashlib
import io
import math
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self, cast

from vitline.infra.stores.file_lock import lock
from vitline.infra.stores.store import (
    LOCK,
    TEMPORARY,
    Keys,
    Listed,
    PreconditionFailed,
    Store,
    StoreFailed,
    checked_key,
    raising_unwritable,
)

_LOCK_WAIT_S = 60.0


class FileStore(Store):
    """A directory. Writes use a temporary file and a rename, a hard link or a locked rename. The tag is the sha256."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.uri = f"file://{directory}"

    @classmethod
    def at(cls, uri: str) -> Self:
        return cls(Path(uri.removeprefix("file://")))

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
                os.link(temporary, path)  # opening with O_EXCL and writing would show readers a half-written file
            except FileExistsError as error:
                raise PreconditionFailed(f"{self.uri_of(key)} exists already.") from error
        return hashlib.sha256(data).hexdigest()

    def compare_and_swap(self, key: str, data: bytes, tag: str) -> str:
        path = self._path(key)
        if not path.parent.is_dir():
            raise PreconditionFailed(f"{self.uri_of(key)} does not exist.")
        locked = path.with_name(LOCK + path.name)
        with open(locked, "ab") as file:  # never unlinked, as another process may have it open
            if not lock(file.fileno(), _LOCK_WAIT_S):
                raise StoreFailed(
                    f"{self.uri_of(key)} cannot be replaced: another process has held {locked} for {_LOCK_WAIT_S:g} s. It stands "
                    f"still, or its disk does. Find it with `fuser {locked}`; resume it (`kill -CONT`), or end it."
                )
            try:
                found = self.read_tagged(key)[1]
            except FileNotFoundError as error:
                raise PreconditionFailed(f"{self.uri_of(key)} does not exist.") from error
            if found != tag:
                raise PreconditionFailed(f"{self.uri_of(key)} was changed: it has tag {found[:12]}, not {tag[:12]}.")
            self.write(key, data)
        return hashlib.sha256(data).hexdigest()

    def list(self, prefix: str = "") -> Keys:
        folder = prefix.rpartition("/")[0]
        top = self._path(folder) if folder else self._directory
        keys = []
        for parent, _, names in os.walk(top):
            relative = Path(parent).relative_to(self._directory).as_posix()
            below = "" if relative == "." else f"{relative}/"
            keys += [below + name for name in names if not name.startswith((TEMPORARY, LOCK))]
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
            elif key.startswith(prefix) and not entry.name.startswith((TEMPORARY, LOCK)):
                status = _status(entry)
                if status and stat.S_ISREG(status.st_mode):
                    yield Listed(key, status.st_size, str(status.st_mtime_ns))

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._path(key).unlink()

    def discard(self, key: str) -> None:
        self.delete(key)
        path = self._path(key)
        path.with_name(LOCK + path.name).unlink(missing_ok=True)

    def leftovers(self, older_than_s: float) -> Keys:
        before = time.time() - older_than_s
        found = [Path(parent, name) for parent, _, names in os.walk(self._directory) for name in names]
        return sorted(
            path.relative_to(self._directory).as_posix()
            for path in found
            if path.name.startswith(TEMPORARY) and _modified(path) < before
        )

    def discard_leftovers(self, older_than_s: float) -> Keys:
        found = self.leftovers(older_than_s)
        for key in found:
            (self._directory / key).unlink(missing_ok=True)
        return found

    def _path(self, key: str) -> Path:
        return self._directory / checked_key(key)

    def _reading(self, key: str) -> BinaryIO:
        try:  # making a Path takes longer than a small read
            return open(f"{self._directory}/{checked_key(key)}", "rb", opener=_open_regular)
        except OSError as error:
            if error.errno not in _NO_OBJECT:
                raise
            raise FileNotFoundError(error.errno, _NO_OBJECT[error.errno], self.uri_of(key)) from error

    @contextlib.contextmanager
    def _temporary(self, path: Path) -> Iterator[tuple[Path, BinaryIO]]:
        temporary = path.with_name(TEMPORARY + uuid.uuid4().hex)  # not mkstemp, whose files only their owner can read
        with raising_unwritable(self.uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(temporary, "xb")  # noqa: SIM115 - only errors of opening are converted
        try:
            with file:
                yield temporary, file
        finally:
            temporary.unlink(missing_ok=True)


# Errors of a path at which no file can be. As on S3, a folder is not an object.
_NO_OBJECT = {
    errno.EISDIR: "no such object: the path is a folder",
    errno.ENOTDIR: "no such object: a folder of the path is a file",
    errno.ENAMETOOLONG: "no such object: the path, or a name in it, is too long for this disk",
    errno.ELOOP: "no such object: the path leads through links in a circle, or through too many",
}
_OTHER_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def _open_regular(path: str, flags: int) -> int:
    """A descriptor of a regular file; never waits. Raises FileNotFoundError for anything else: opening a pipe waits for its
    writer, and opening a device may change it."""
    _check_regular(os.stat(path), path)
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        _check_regular(os.fstat(descriptor), path)  # it may have been replaced meanwhile
    except FileNotFoundError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _OTHER_KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise FileNotFoundError(errno.ENOENT, f"no such object: the path is {kind}, not a file", path)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Status of the file that an entry is or leads to; None for a link that leads to none."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno == errno.ENOENT or error.errno in _NO_OBJECT:
            return None
        raise


def _modified(path: Path) -> float:
    """Time of the last change in Unix seconds; infinite for a file that is gone, which then is no leftover."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _settle(file: BinaryIO) -> None:
    # A rename may reach the disk before the bytes. After a power failure a manifest must not exist without its data.
    if not file.closed:
        file.flush()
        os.fsync(file.fileno())
