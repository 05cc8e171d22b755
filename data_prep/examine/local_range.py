"""Bytes of a local file on their way to another process: the kernel moves them, this process never holds them."""

import errno
import os
from typing import BinaryIO, Self

from infra.storage import Store

CAN_MOVE = hasattr(os, "splice")
"""Whether the system can move bytes from a file to a pipe: Linux."""


class LocalRange:
    """Bytes [start, start + length) of an open file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length

    @classmethod
    def of(cls, store: Store, key: str, start: int, end: int | None) -> Self | None:
        """Bytes [start, end) of an object, fewer where it ends earlier; none where they cannot be moved from here.
        Raises as `Store.open`."""
        if not (CAN_MOVE and store.uri.startswith("file:")):
            return None
        file = store.open(key)
        size = os.fstat(file.fileno()).st_size
        return cls(file, start, max(0, (size if end is None else min(size, end)) - start))

    def __len__(self) -> int:
        return self._length

    def write_to(self, pipe: int) -> int:
        """Move what has room and give how much. Raises BlockingIOError as os.write, and OSError where the file has become
        shorter."""
        try:
            moved = os.splice(self._file.fileno(), pipe, self._length, offset_src=self._start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of file systems whose files cannot be moved from
                raise
            moved = os.write(pipe, os.pread(self._file.fileno(), self._length, self._start))
        if not moved:
            raise OSError(
                errno.EIO,
                f"{self._length:,} bytes are missing at its end: it changes while it is read",
                self._file.name,
            )
        return moved

    def after(self, num_bytes: int) -> "LocalRange":
        return LocalRange(self._file, self._start + num_bytes, self._length - num_bytes)

    def close(self) -> None:
        self._file.close()
