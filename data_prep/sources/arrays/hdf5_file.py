"""Reads arrays in HDF5 files by rows, with h5py (extra `vtab`).

Only the given file is opened: links to other files, and arrays stored in other files, are refused.
"""

import contextlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np

from vitline.data_prep.sources.arrays.array_layouts import READ_BYTES, CorruptArray

_MAX_BLOCK_BYTES = 512 << 20
_BLOCK_BYTES = 16 << 20
"""Approximate bytes per read, unless the chunks of the file are larger."""


class _Watched(io.RawIOBase):
    """A file that remembers exceptions of its store and returns zeros afterwards.

    An exception must not pass through HDF5, and must not keep HDF5's memory alive: the process would crash at exit.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._gone = cast(io.BufferedIOBase, file), False
        self._failed: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        if not self._gone:
            try:
                return self._file.readinto(buffer)
            except Exception as error:
                self._failed, self._gone = error.with_traceback(None), True
        buffer[:] = bytes(len(buffer))
        return len(buffer)

    def failure(self) -> Exception | None:
        """The exception of the store, once."""
        failed, self._failed = self._failed, None
        return failed


@dataclass(frozen=True)
class Hdf5Array:
    """An array of an open file; its first axis is the rows."""

    uri: str
    shape: tuple[int, ...]
    dtype: np.dtype
    rows_together: int
    """Rows that are stored in one chunk: reads that begin at multiples of it read each chunk once."""
    _dataset: Any
    _file: _Watched

    def blocks(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Rows [start, stop), some at a time. Raises CorruptArray, and what the store raises."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, _BLOCK_BYTES // max(1, self.rows_together * row_bytes)) * self.rows_together
        while start < stop:
            end = min(stop, start - start % self.rows_together + step)
            with _damage_of(self.uri, self._file):
                block = self._dataset[start:end]
            yield block
            start = end


class Hdf5File:
    """An open file."""

    def __init__(self, uri: str, file: _Watched, opened: Any) -> None:
        self._uri, self._file, self._opened = uri, file, opened

    def array(self, name: str) -> Hdf5Array:
        """An array of whole numbers by its path, such as latents/classes. Raises ValueError if there is none."""
        import h5py

        with _damage_of(self._uri, self._file):
            found = self._linked(name)
            if found is None:
                raise CorruptArray(f"it does not contain the array {name} itself")
            if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
                raise CorruptArray(f"{name} is not an array, or is stored in other files")
            shape, dtype, chunks = found.shape, found.dtype, found.chunks or (1,)
        uri = f"{self._uri}!{name}"
        if not shape or dtype.kind not in "ui":
            raise ValueError(f"{uri} has shape {shape} and type {dtype}; expected rows of whole numbers.")
        block = max(math.prod(chunks), chunks[0] * math.prod(shape[1:])) * dtype.itemsize
        if block > _MAX_BLOCK_BYTES:
            raise ValueError(
                f"{uri} is stored in chunks of {chunks}: reading one row needs {block:,} bytes of memory, but at most "
                f"{_MAX_BLOCK_BYTES:,} are allowed. Write it with smaller chunks."
            )
        return Hdf5Array(uri, shape, dtype, chunks[0], found, self._file)

    def _linked(self, name: str) -> Any:
        import h5py

        found = self._opened
        for step in name.split("/"):
            if not isinstance(found, h5py.Group) or not isinstance(found.get(step, getlink=True), h5py.HardLink):
                return None
            found = found[step]
        return found


@contextlib.contextmanager
def open_hdf5(file: BinaryIO, uri: str) -> Iterator[Hdf5File]:
    """Open an HDF5 file with a large read buffer: each read is a request to an object store. `uri` is for messages.

    Raises CorruptArray, and ValueError if h5py is missing.
    """
    try:
        import h5py
    except ImportError as error:
        raise ValueError(
            f'reading {uri} needs h5py, which is not installed. Run: pip install "vitline[vtab]"'
        ) from error
    watched = _Watched(file)
    with contextlib.ExitStack() as opened:
        with _damage_of(uri, watched):
            reader: Any = io.BufferedReader(watched, READ_BYTES)
            hdf5 = opened.enter_context(h5py.File(reader, "r"))
        yield Hdf5File(uri, watched, hdf5)


@contextlib.contextmanager
def _damage_of(uri: str, file: _Watched) -> Iterator[None]:
    damage = None
    try:
        yield
    except Exception as error:
        damage = str(error).strip("'")
    if failed := file.failure():
        raise failed
    if damage is not None:
        raise CorruptArray(f"{uri} is damaged: {damage}. Copy it again.")
