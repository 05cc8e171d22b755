"""Reads untrusted Parquet files a few rows at a time; damage becomes a refusal of the affected rows."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO
from urllib.parse import unquote

import pyarrow as pa

from vitline.data_prep.labels.label_texts import plain_text
from vitline.data_prep.parquet_files import open_parquet
from vitline.infra.storage import Store

PARQUET_ENDINGS = (".parquet", ".parq", ".pq")


class Refusal(Exception):
    """Reason and detail why a file, a piece of a file or a row gives no example."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.refused = reason, detail


_BUFFER_BYTES = 1 << 20  # per column; without it, Arrow holds whole column chunks of any size
_BATCH_BYTES, _BATCH_ROWS = 4 << 20, 1024


def partitions(key: str) -> dict[str, int | str | None]:
    """The columns that folders of a path state, as Spark and pyarrow partition tables: `label=cat/part-0.parquet`."""
    pairs = (folder.partition("=") for folder in key.split("/")[:-1])
    texts = {unquote(name): unquote(text) for name, is_pair, text in pairs if is_pair and name}
    return {name: _folder_value(text) for name, text in texts.items()}


def _folder_value(text: str) -> int | str | None:
    if text == "__HIVE_DEFAULT_PARTITION__":
        return None
    return int(text) if re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) else text


class ParquetRows:
    """One Parquet file, read a few rows at a time whatever the size of its row groups: `with ParquetRows(...) as rows`. Folders of
    its key may state further columns (`partitions`).

    Raises Refusal if the file cannot be opened or its footer cannot be read.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._uri = store.uri_of(key)
        try:
            self._file = _StoreFile(store.open(key))
        except (FileNotFoundError, PermissionError) as error:
            raise Refusal("uncounted_loss", f"{self._uri}: {error.strerror}") from error
        try:
            with self._damage("footer"):
                self._parquet = open_parquet(pa.PythonFile(self._file, mode="r"), buffer_size=_BUFFER_BYTES)
                stored: pa.Schema = self._parquet.schema_arrow
                self._of_folders = {n: v for n, v in partitions(key).items() if n not in stored.names}
                self.schema = pa.schema(
                    [*stored, *(pa.field(name, pa.scalar(value).type) for name, value in self._of_folders.items())],
                    stored.metadata,
                )
                metadata = self._parquet.metadata
                groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
                self.num_rows = [group.num_rows for group in groups]
                self.num_bytes = [max(0, group.total_byte_size) for group in groups]
                if sum(self.num_rows) != metadata.num_rows or min(self.num_rows, default=0) < 0:
                    raise ValueError(f"the row groups have {self.num_rows} rows, but the file has {metadata.num_rows}")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "ParquetRows":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def first_row(self, group: int) -> int:
        """Number of the first row of a row group in the file."""
        return sum(self.num_rows[:group])

    def batches(self, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a row group. Raises Refusal after those that can be read."""
        wanted, num_read = self.num_rows[group], 0
        batch_rows = _BATCH_BYTES * wanted // max(1, self.num_bytes[group])
        with self._damage(f"row group {group}"):
            found = self._parquet.iter_batches(
                max(1, min(_BATCH_ROWS, batch_rows)),
                row_groups=[group],
                columns=[name for name in columns if name not in self._of_folders],
                use_threads=False,
            )
        while True:
            with self._damage(f"row group {group}, from row {self.first_row(group) + num_read}"):
                batch = next(found, None)
            if batch is None:
                break
            num_read += batch.num_rows
            for name in self._of_folders.keys() & {*columns}:
                batch = batch.append_column(name, pa.repeat(pa.scalar(self._of_folders[name]), batch.num_rows))
            yield batch
        if num_read != wanted:
            raise Refusal(
                "uncounted_loss", f"{self._uri}: row group {group} holds {num_read} rows, but {wanted} are expected"
            )

    @contextlib.contextmanager
    def _damage(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Arrow raises various exceptions for damaged files
            if self._file.failure is not None:
                raise self._file.failure from None
            detail = f"{self._uri}: {what}: {' '.join(str(error).split())[:300]}"
            raise Refusal("uncounted_loss", detail) from error


class _StoreFile:
    """A file for Arrow that remembers exceptions of the store, because Arrow raises OSError for damaged files too."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: Exception | None = None

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except Exception as error:
            self.failure = error
            raise

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        self._file.close()


def stretches(
    num_rows: Sequence[int], num_bytes: Sequence[int], rows_per_part: int, limit: int | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """(first row group, end, rows, bytes) of pieces of whole row groups with at least `rows_per_part` rows each, up to row `limit`."""
    first = rows_before = rows = size = 0
    for group, (more_rows, more_bytes) in enumerate(zip(num_rows, num_bytes, strict=True)):
        rows, size = rows + more_rows, size + more_bytes
        full = limit is not None and rows_before + rows >= limit
        if full or rows >= rows_per_part or group + 1 == len(num_rows):
            yield first, group + 1, rows if limit is None else min(rows, limit - rows_before), size
            first, rows_before, rows, size = group + 1, rows_before + rows, 0, 0
        if full:
            return


def cells(column: pa.Array) -> Iterator[Any]:
    """The values of a column. An invalid value, such as text that is not UTF-8, is returned as a ValueError, not raised."""
    for scalar in column:
        try:
            yield scalar.as_py()
        except (ValueError, OverflowError) as error:
            yield ValueError(str(error))


def cell_value(cell: Any) -> Any:
    """A value from `cells`. Raises it if it is a ValueError."""
    if isinstance(cell, ValueError):
        raise cell
    return cell


def cell_text(cell: Any) -> str:
    """A cell as text; empty for an empty cell. Raises ValueError."""
    return "" if cell_value(cell) is None else plain_text(str(cell))
