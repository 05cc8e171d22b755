"""Reads rows of text tables (CSV, JSON lines or a JSON array, plain or gzipped), and finds where they end.

They are parsed by Python's csv and json modules: compared with an image, a row costs nothing, and a bad row becomes a single
refusal with its line number.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

from vitline.data_prep.archives.json_array import array_elements
from vitline.data_prep.archives.parquet_rows import Refusal
from vitline.data_prep.labels.label_texts import short
from vitline.infra.storage import Store

DELIMITERS = {"CSV": ",", "TSV": "\t"}
"""By kind of table; JSON lines have no delimiter."""
_MAX_LINE_BYTES = 16 << 20
_MAYBE_ARRAY = (".json", ".json.gz")
_READ_BYTES = 8 << 20  # per read, for few requests
_TOO_LONG = b"(a line that is too long)"  # compared by identity
_GZIP_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)


class TextRows:
    """Rows of a text table, from byte `start` to `end` of its decompressed content.

    Raises Refusal if the file cannot be opened, or not decompressed any further. Memory: a row, and a window of the file.
    """

    def __init__(self, store: Store, key: str, start: int = 0, end: int | None = None, line: int = 0) -> None:
        self._uri, self._end, self.position, self.line = store.uri_of(key), end, start, line
        self._again: list[tuple[int, bytes]] = []
        window = _READ_BYTES if end is None else min(_READ_BYTES, max(1 << 16, end - start))
        try:
            self._stored = self._file = cast(BinaryIO, io.BufferedReader(cast(Any, store.open(key)), window))
        except (FileNotFoundError, PermissionError) as error:
            raise Refusal("uncounted_loss", f"{self._uri}: {error.strerror}") from error
        if key.lower().endswith(".gz"):
            self._file = cast(BinaryIO, gzip.GzipFile(fileobj=self._stored))
        self._read_to = start
        self.is_array = False
        """Whether the rows are the elements of one JSON array: the table is not divided, and `line` counts elements."""
        try:
            if key.lower().endswith(_MAYBE_ARRAY):
                self.is_array = (
                    cast(io.BufferedReader, self._file).peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
                )
            self._file.seek(start)
        except _GZIP_DAMAGE as error:
            raise Refusal("uncounted_loss", f"{self._uri}: {error}") from error

    def __enter__(self) -> "TextRows":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        self._stored.close()  # gzip does not close it

    def records(self, delimiter: str | None) -> Iterator[tuple[int, bytes]]:
        """Line number (from 1) and bytes of every row that is not blank; `position` and `line` are then at its end. With a
        delimiter, rows may have newlines in quotes. A row that is too long is returned as `_TOO_LONG`."""
        if self.is_array:
            yield from self._elements()
            return
        while line := self._next():
            size, data = line
            number = self.line = self.line + 1
            if delimiter and b'"' in data and not _is_row(data, delimiter):
                rest = self._rest_of_row(line, delimiter)
                size, data = size + sum(more for more, _ in rest), b"".join((data, *(text for _, text in rest)))
                self.line += len(rest)
            self.position += size
            if not data.isspace():
                yield number, data

    def _elements(self) -> Iterator[tuple[int, bytes]]:
        try:
            for element in array_elements(self._file, _MAX_LINE_BYTES):
                self.line += 1
                yield self.line, element.encode()
        except (ValueError, *_GZIP_DAMAGE) as error:
            raise Refusal("uncounted_loss", f"{self._uri} after element {self.line}: {error}") from error

    def _rest_of_row(self, first: tuple[int, bytes], delimiter: str) -> list[tuple[int, bytes]]:
        """The further lines of a row whose first line ends inside quotes; empty if they do not complete a row."""
        taken: list[tuple[int, bytes]] = []

        def lines() -> Iterator[str]:
            yield first[1].decode("latin-1")
            while more := self._next():
                taken.append(more)
                if more[1] is _TOO_LONG:
                    return
                yield more[1].decode("latin-1")

        try:
            next(csv.reader(lines(), delimiter=delimiter, strict=True))
        except csv.Error:
            self._again = taken + self._again
            return []
        return taken

    def _next(self) -> tuple[int, bytes] | None:
        """Size and bytes of the next line; None at the end."""
        if self._again:
            return self._again.pop(0)
        at = self._read_to
        if at == self._end:
            return None
        try:
            line = self._file.readline(_MAX_LINE_BYTES)
            size = len(line)
            if size == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = _TOO_LONG
                while more := self._file.readline(_MAX_LINE_BYTES):
                    size += len(more)
                    if more.endswith(b"\n"):
                        break
        except _GZIP_DAMAGE as error:
            raise Refusal("uncounted_loss", f"{self._uri} after line {self.line}: {error}") from error
        self._read_to += size
        line = line.removeprefix(codecs.BOM_UTF8)  # of the file, or of one that was joined to it
        return (size, line) if size else None


def _is_row(line: bytes, delimiter: str) -> bool:
    """Whether a line of CSV with quotes is a complete row."""
    try:
        next(
            csv.reader((line.decode("latin-1"),), delimiter=delimiter, strict=True)
        )  # equivalent to UTF-8 for commas and quotes
    except csv.Error:
        return False
    return True


def parsed_row(data: bytes, kind: str, columns: list[str]) -> Mapping[str, Any]:
    """A row of text as a mapping of columns. Raises ValueError."""
    if data is _TOO_LONG:
        raise ValueError(f"the row is longer than {_MAX_LINE_BYTES:,} bytes")
    if kind not in DELIMITERS:
        row = _parsed_json(data)
        if not isinstance(row, dict):
            raise ValueError(f"{short(row)} is not a JSON object")
        return row
    fields = parsed_line(data, kind)
    if len(fields) != len(columns):
        raise ValueError(f"the row has {len(fields)} fields, but the table has {len(columns)} columns")
    return dict(zip(columns, fields, strict=True))


def parsed_line(data: bytes, kind: str) -> list[str]:
    """The fields of a CSV row. Raises ValueError."""
    try:
        return next(csv.reader([data.decode()], delimiter=DELIMITERS[kind], strict=True))
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _parsed_json(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def keys_of(data: bytes) -> list[str]:
    """The keys of a JSON object; empty for anything else."""
    try:
        row = _parsed_json(data)
    except ValueError:
        return []
    return [*row] if isinstance(row, dict) else []
