"""Reads Parquet through Python file objects, in the calling thread.

pyarrow reads ahead by default, in threads of Arrow. Such a thread may release the Python file while the interpreter shuts
down, which aborts the process (exit code 134, in up to a third of the runs on a busy machine). Here nothing reads ahead.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq


def open_parquet(file: Any, **options: Any) -> pq.ParquetFile:
    """`pq.ParquetFile` of a file object, with verified page checksums."""
    return pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True, **options)


def read_parquet(file: BinaryIO, columns: Sequence[str] | None = None) -> pa.Table:
    """Read all columns of a file, or the given ones in the given order."""
    table = open_parquet(file).read(columns=columns and list(columns), use_threads=False)
    return table.select(columns) if columns else table


class RowGroupFile:
    """A Parquet file that reads the chosen columns of a row group with one read of the file.

    That read includes what lies between the columns. Not thread-safe.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = _HoldingFile(file)
        self._parquet = open_parquet(pa.PythonFile(self._file, mode="r"))
        self.metadata: pq.FileMetaData = self._parquet.metadata
        self.schema: pa.Schema = self._parquet.schema_arrow
        self.num_bytes: int = self._file.seek(0, io.SEEK_END)

    @property
    def data_bytes(self) -> int:
        """Bytes up to the end of the last row group; footer and length follow."""
        last = self.metadata.num_row_groups - 1
        return _byte_range(self.metadata.row_group(last), None)[1] if last >= 0 else 0

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Columns of all row groups."""
        return pa.concat_tables([self.row_group(group, columns) for group in range(self.metadata.num_row_groups)])

    def row_group(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Row group `group`, with all columns or the named ones. Raises IndexError if there is no such row group."""
        with self._file.holding(*_byte_range(self.metadata.row_group(group), columns)):
            return self._parquet.read_row_group(group, columns=columns and list(columns), use_threads=False)

    def close(self) -> None:
        self._parquet.close(force=True)  # without `force`, pyarrow does not close a file that was passed in open

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _HoldingFile:
    """A file for Arrow that can hold a range of its bytes in memory and serves reads inside it from there."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._position = file, 0
        self._start, self._held = 0, memoryview(b"")

    @contextlib.contextmanager
    def holding(self, start: int, end: int) -> Iterator[None]:
        self._file.seek(start)
        self._start, self._held = start, memoryview(self._file.read(end - start))
        try:
            yield
        finally:
            self._held = memoryview(b"")

    def read(self, size: int = -1) -> memoryview | bytes:
        start = self._position - self._start
        data: memoryview | bytes
        if start >= 0 and size >= 0 and start + size <= len(self._held):
            data = self._held[start : start + size]
        else:
            self._file.seek(self._position)
            data = self._file.read(size)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            self._position = self._file.seek(offset, whence)
        else:
            self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self.closed = True
        self._file.close()


def _byte_range(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> tuple[int, int]:
    """Start and end of the bytes of columns in the file."""
    ranges = []
    for column in map(group.column, range(group.num_columns)):
        if columns is None or column.path_in_schema.partition(".")[0] in columns:
            start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
            ranges.append((start, start + column.total_compressed_size))
    return min((start for start, _ in ranges), default=0), max((end for _, end in ranges), default=0)
