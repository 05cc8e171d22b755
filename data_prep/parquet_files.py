"""Reads Parquet through Python file objects, in the calling thread.

pyarrow reads ahead by default, in threads of Arrow. Such a thread may release the Python file while the interpreter shuts
down, which aborts the process (exit code 134, in up to a third of the runs on a busy machine). Here nothing reads ahead.
"""

import contextlib
import functools
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from vitline.infra.storage import Store


def open_parquet(file: Any, **options: Any) -> pq.ParquetFile:
    """`pq.ParquetFile` of a file object, with verified page checksums."""
    return pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True, **options)


def read_table(store: Store, key: str, columns: Sequence[str] | None = None) -> pa.Table:
    """A Parquet file of ours: all of a small one, with one request, or some columns in the given order."""
    if columns is None:
        return pq.read_table(pa.BufferReader(store.read(key)))
    with store.open(key) as file:
        return open_parquet(file).read(columns=list(columns), use_threads=False).select(columns)


def write_table(store: Store, key: str, table: pa.Table, row_group_size: int | None = None) -> None:
    """Write a small Parquet file of ours atomically."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=row_group_size)
    store.write(key, sink.getvalue().to_pybytes())


@contextlib.contextmanager
def table_writer(store: Store, key: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A writer for a Parquet file of ours, table by table; the file becomes visible at a clean exit."""
    with (
        store.writer(key) as file,
        pq.ParquetWriter(pa.PythonFile(_KeptOpen(file), mode="w"), schema, compression="zstd") as writer,
    ):
        yield writer


class _KeptOpen:
    """A file that pyarrow's writer may close without effect; the store closes it and makes it visible."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class RowGroupFile:
    """A Parquet file that reads the chosen columns of a row group with one read of the file.

    That read includes what lies between the columns. Not thread-safe.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        with open_parquet(file) as parquet:
            self.metadata: pq.FileMetaData = parquet.metadata
            self.schema: pa.Schema = parquet.schema_arrow
        self.num_bytes: int = file.seek(0, io.SEEK_END)

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
        return _read_row_group(self.metadata, group, columns, self._read_range)

    def footer(self) -> "Footer":
        """What is needed to read row groups once the file is closed."""
        return Footer.of(self.metadata)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_range(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(end - start)


class Footer:
    """The footer of a Parquet file, compressed to a seventh: what reads row groups with one range request each."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        """What it is made from."""
        self.digest = hashlib.sha256(data).hexdigest()

    @classmethod
    def of(cls, metadata: pq.FileMetaData) -> Self:
        sink = io.BytesIO()
        metadata.write_metadata_file(sink)
        return cls(zlib.compress(sink.getbuffer(), level=1))

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.data)

    def byte_range(self, group: int, columns: Sequence[str] | None) -> tuple[int, int]:
        """First byte of a row group in the file, and the one after its last: what `row_group` reads."""
        return _byte_range(_parsed(self.data).row_group(group), columns)

    def row_group(self, group: int, columns: Sequence[str] | None, read: Callable[[int, int], bytes]) -> pa.Table:
        """As `RowGroupFile.row_group`; `read(start, end)` returns bytes of the file. Thread-safe."""
        return _read_row_group(_parsed(self.data), group, columns, read)


@functools.lru_cache(maxsize=32)  # where row groups are read in order, most are in the shard of the last one
def _parsed(footer: bytes) -> pq.FileMetaData:
    return pq.read_metadata(pa.BufferReader(zlib.decompress(footer)))


def _read_row_group(
    metadata: pq.FileMetaData, group: int, columns: Sequence[str] | None, read: Callable[[int, int], bytes]
) -> pa.Table:
    start, end = _byte_range(metadata.row_group(group), columns)
    part = pa.PythonFile(_Part(start, read(start, end)), mode="r")
    return open_parquet(part, metadata=metadata).read_row_group(group, columns and list(columns), use_threads=False)


class _Part(io.RawIOBase):
    """A file of which only the bytes from `start` on can be read."""

    def __init__(self, start: int, data: bytes) -> None:
        self._start, self._data, self._position = start, memoryview(data), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> memoryview:  # Arrow takes any buffer, so nothing is copied
        at = self._position - self._start
        found = self._data[at : at + size] if at >= 0 and size >= 0 else memoryview(b"")
        self._position += len(found)
        return found

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._start + len(self._data)}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


def _byte_range(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> tuple[int, int]:
    """Start and end of the bytes of columns in the file."""
    ranges = []
    for column in map(group.column, range(group.num_columns)):
        if columns is None or column.path_in_schema.partition(".")[0] in columns:
            start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
            ranges.append((start, start + column.total_compressed_size))
    return min((start for start, _ in ranges), default=0), max((end for _, end in ranges), default=0)
