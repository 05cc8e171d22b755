"""Moves bytes of a local file to another process within the kernel, without holding the whole range in this process."""

import errno
import os
from typing import BinaryIO, Self

from vitline.infra.storage import Store

CAN_MOVE = hasattr(os, "splice")
"""Whether the system can move bytes from a file to a pipe (Linux)."""


class LocalRange:
    """Bytes [start, start + length) of an open file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length

    @classmethod
    def of(cls, store: Store, key: str, start: int, end: int | None) -> Self | None:
        """Bytes [start, end) of an object, or up to its end; None if they cannot be moved on this system or store.
        Raises as `Store.open`."""
        if not (CAN_MOVE and store.uri.startswith("file:")):
            return None
        file = store.open(key)
        size = os.fstat(file.fileno()).st_size
        return cls(file, start, max(0, (size if end is None else min(size, end)) - start))

    def __len__(self) -> int:
        return self._length

    def write_to(self, pipe: int) -> int:
        """Move as much as the pipe has room for, and return the number of bytes. Raises BlockingIOError as os.write, and OSError
        if the file has become shorter."""
        try:
            moved = os.splice(self._file.fileno(), pipe, self._length, offset_src=self._start)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this file system does not support splice
                raise
            moved = os.write(pipe, os.pread(self._file.fileno(), self._length, self._start))
        if not moved:
            raise OSError(
                errno.EIO,
                f"the file changed while it was read: {self._length:,} bytes are missing at its end",
                self._file.name,
            )
        return moved

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length) of the range, or fewer at its end."""
        return os.pread(self._file.fileno(), max(0, min(length, self._length - offset)), self._start + offset)

    def after(self, num_bytes: int) -> "LocalRange":
        return LocalRange(self._file, self._start + num_bytes, self._length - num_bytes)

    def close(self) -> None:
        self._file.close()
