"""A cache of bytes on a local disk, which the processes of a machine share.

    <folder>/vitline-<uid>/.lock                  locked while room is taken or made; its 8 bytes are the size of all entries
    <folder>/vitline-<uid>/<namespace>/<key>      an entry: header, then the bytes
    <folder>/vitline-<uid>/<namespace>/.tmp-<id>  an entry being written, of full size from the start; its writer locks it

An entry appears by a rename, so a killed process leaves at most temporary files. Their locks end with it, and the next process
that counts the entries removes them. Nothing is synced: an entry that a power failure cut short has a wrong checksum.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from vitline.infra.stores.file_lock import lock
from vitline.infra.stores.store import TEMPORARY

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sIQ")  # mark; CRC-32 of name and bytes; number of bytes
_MARK = b"vlc1"
_COUNT = struct.Struct("<q")
_PAUSE_S = 300.0
"""Seconds without writes after a failed one, and without any use of a folder that cannot be opened."""
_WAIT_S, _BUSY_PAUSE_S = 1.0, 10.0
"""Longest wait for the lock, and seconds without writes after one in vain, so that a suspended process holds up nobody."""
_FULL_FRACTION = 0.95
"""Room is made down to this fraction of the cap, so that the entries are listed once for many writes."""


class DiskCache:
    """Entries of at most `max_bytes` in all, by namespace and key. A folder of its own below `folder`, for this user only.

    No method raises: a full, read-only or missing disk and a damaged entry are one warning each, and the caller does without
    the cache. For room, the entries that were used least recently go first, whichever process wrote them; but never those of
    the namespaces that this process has used: a pass over more than fits would remove each entry shortly before its next use.
    Thread-safe, shared by processes, safe under kill.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self.folder = Path(os.path.abspath(os.path.expanduser(folder))) / f"vitline-{os.getuid()}"
        self.max_bytes = max_bytes
        self._used_namespaces: set[str] = set()
        self._lock = threading.RLock()
        self._entries: _Entries | None = None
        self._open_after = self._write_after = 0.0  # in monotonic seconds
        self._said: set[object] = set()

    def get(self, namespace: str, key: str) -> bytes | None:
        """The bytes of an entry, which counts as used now; None if there is no such entry, or it is damaged."""
        entries = self._opened(namespace)
        try:
            return None if entries is None else entries.read(namespace, key)
        except FileNotFoundError:
            return None
        except _Damaged:
            path = self.folder / namespace / key
            self._warn("damaged", f"{path} is damaged; it was deleted, and is read from the store again.")
        except OSError as error:
            self._fail(error)
            self._open_after = time.monotonic() + _PAUSE_S
        return None

    def put(self, namespace: str, key: str, data: bytes) -> None:
        """Writes an entry, unless it exists, there is no room, or another process keeps the lock for long."""
        if time.monotonic() < self._write_after or (entries := self._opened(namespace)) is None:
            return
        try:
            entries.write(namespace, key, data, self.max_bytes, self._used_namespaces)
        except _Busy:
            self._write_after = time.monotonic() + _BUSY_PAUSE_S
        except _Full:
            self._write_after = time.monotonic() + _PAUSE_S
            full = f"{self.folder} holds {self.max_bytes:,} bytes and is full: the other row groups are read from the store."
            self._warn("full", f"{full} execution.shard_cache_bytes sets its size.")
        except OSError as error:
            self._fail(error)

    def discard(self, namespace: str, key: str) -> None:
        """Removes an entry, if it exists."""
        with contextlib.suppress(OSError):
            (self.folder / namespace / key).unlink()

    def _opened(self, namespace: str) -> "_Entries | None":
        with self._lock:
            self._used_namespaces.add(namespace)
            if self._entries is None and time.monotonic() >= self._open_after:
                try:
                    self._entries = _Entries(self.folder)
                except OSError as error:
                    self._open_after = time.monotonic() + _PAUSE_S
                    self._warn(error.errno, _advice(self.folder, error))
            return self._entries

    def _fail(self, error: OSError) -> None:
        self._warn(error.errno, _advice(self.folder, error))
        self._write_after = time.monotonic() + _PAUSE_S
        with self._lock:
            self._entries = None  # the folder may be another one by now

    def _warn(self, reason: object, text: str) -> None:
        with self._lock:
            if reason not in self._said:
                self._said.add(reason)
                log.warning("shard cache: %s", text)


@lru_cache(maxsize=8)
def disk_cache(folder: str, max_bytes: int) -> DiskCache:
    """The cache of this process in a folder."""
    return DiskCache(folder, max_bytes)


def _advice(folder: Path, error: OSError) -> str:
    return (
        f"{folder} cannot be used: {error.strerror or error}. Row groups are read from the store until it can; it is tried "
        "again every 5 minutes. Free space or correct the permissions, or choose another folder with execution.shard_cache_dir."
    )


class _Damaged(Exception):
    """An entry does not hold the bytes that were written. It has been deleted."""


class _Full(Exception):
    """There is no room, though all entries that may make way are gone."""


class _Busy(Exception):
    """Another thread or process kept the lock for too long."""


class _Entry(NamedTuple):
    used_ns: int
    num_bytes: int
    path: str
    namespace: str

    @property
    def being_written(self) -> bool:
        return os.path.basename(self.path).startswith(TEMPORARY)


class _Entries:
    """The files of a cache. Methods raise OSError; so does the constructor if the folder belongs to somebody else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "it is not a folder that only this user may write to", str(folder))
        self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._file)
        self._mutex = threading.Lock()
        with contextlib.suppress(_Busy), self._locked():  # otherwise another process is counting or making room
            self._set_count(sum(entry.num_bytes for entry in self._list()))

    def read(self, namespace: str, key: str) -> bytes:
        """The bytes of an entry. Raises FileNotFoundError if there is none, and _Damaged."""
        path = self._folder / namespace / key
        with open(path, "rb", buffering=0, opener=_no_follow) as file:
            header, data = file.read(_HEADER.size), file.readall()
            with contextlib.suppress(OSError):
                os.utime(file.fileno(), ns=(now := time.time_ns(), now))  # mtime: most disks do not keep the atime
        if header != _header(path, data):
            path.unlink(missing_ok=True)
            raise _Damaged
        return data

    def write(self, namespace: str, key: str, data: bytes, max_bytes: int, keep: Collection[str]) -> None:
        """Writes an entry unless it exists. Entries of namespaces other than `keep` make way. Raises _Full and _Busy."""
        path, size = self._folder / namespace / key, _HEADER.size + len(data)
        if path.exists():
            return
        with contextlib.ExitStack() as stack:
            with self._locked():
                count = self._make_room(size, max_bytes, keep)
                with contextlib.suppress(FileExistsError):
                    path.parent.mkdir(mode=0o700)
                temporary = path.with_name(TEMPORARY + uuid.uuid4().hex)
                file = stack.enter_context(open(temporary, "xb"))
                stack.callback(temporary.unlink, missing_ok=True)
                fcntl.flock(file, fcntl.LOCK_EX)
                file.truncate(size)  # takes the room: whoever counts the entries counts it whole
                self._set_count(count + size)
            file.write(_header(path, data))
            file.write(data)
            file.flush()
            with self._locked():  # whoever lists the entries finds it once
                temporary.replace(path)

    def _make_room(self, size: int, max_bytes: int, keep: Collection[str]) -> int:
        """The bytes of all entries once there is room for `size` more, for which those used least recently are deleted."""
        count = self._count()
        if count + size <= max_bytes:
            return count
        entries = self._list()
        count = sum(entry.num_bytes for entry in entries)
        goal = min(max_bytes - size, int(max_bytes * _FULL_FRACTION)) if count + size > max_bytes else count
        for entry in sorted(entry for entry in entries if entry.namespace not in keep and not entry.being_written):
            if count <= goal:
                break
            Path(entry.path).unlink(missing_ok=True)
            count -= entry.num_bytes
        self._set_count(count)
        if count + size > max_bytes:
            raise _Full
        return count

    def _list(self) -> list[_Entry]:
        """All entries, also those that are being written. Removes those whose writer is gone, and empty namespaces."""
        entries = []
        for namespace in [each for each in os.scandir(self._folder) if each.is_dir(follow_symlinks=False)]:
            for found in os.scandir(namespace):
                with contextlib.suppress(FileNotFoundError):  # its reader found it damaged and deleted it
                    status = found.stat(follow_symlinks=False)
                    entry = _Entry(status.st_mtime_ns, status.st_size, found.path, namespace.name)
                    if entry.being_written and _abandoned(found.path):
                        os.unlink(found.path)
                    else:
                        entries.append(entry)
            with contextlib.suppress(OSError):
                os.rmdir(namespace)
        return entries

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock, against other threads and processes. Raises _Busy if it does not get free soon."""
        if not self._mutex.acquire(timeout=_WAIT_S):
            raise _Busy
        try:
            if not lock(self._file, _WAIT_S):
                raise _Busy
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _count(self) -> int:
        found = os.pread(self._file, _COUNT.size, 0)
        return int(_COUNT.unpack(found)[0]) if len(found) == _COUNT.size else 0

    def _set_count(self, num_bytes: int) -> None:
        os.pwrite(self._file, _COUNT.pack(num_bytes), 0)


def _abandoned(path: str) -> bool:
    """True if nobody writes a temporary file any more: its writer would hold its lock."""
    file = _no_follow(path, os.O_RDWR)
    try:
        return lock(file)
    finally:
        os.close(file)


def _header(path: Path, data: bytes) -> bytes:
    name = zlib.crc32(f"{path.parent.name}/{path.name}".encode())  # bytes of another entry are damage, too
    return _HEADER.pack(_MARK, zlib.crc32(data, name), len(data))


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
