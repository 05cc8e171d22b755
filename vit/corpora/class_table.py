"""Class tables: CSV or JSON with the columns corpus, class and mixture_class; an empty mixture_class drops the class."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from vitline.infra.storage import read_small

MIXTURE_CLASS = "mixture_class"
COLUMNS = ("corpus", "class", MIXTURE_CLASS)
_MAX_BYTES = 64 * 1024 * 1024
_EXPECTED = f"A class table is CSV with the columns {', '.join(COLUMNS)}, or a JSON list of objects with these fields"


class ClassRow(NamedTuple):
    """One row of a class table."""

    where: str
    """Table and number of the row, for errors."""
    corpus: str
    corpus_class: str
    mixture_class: str


class ClassTable(NamedTuple):
    """A class table as it was read."""

    uri: str
    rows: tuple[ClassRow, ...]


def read_class_table(uri: str) -> ClassTable:
    """The table at a path or URI. Raises ValueError for one that is missing, empty or not of this form."""
    try:
        text = read_small(uri, _MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ValueError(
            f"There is no class table at {uri}. A class map is 'names', 'prefixed' or the path or URI of a table."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{uri} is not UTF-8 text. {_EXPECTED}.") from error
    cells = _json_rows(uri, text) if text.lstrip()[:1] in ("[", "{") else _csv_rows(uri, text)
    rows = tuple(ClassRow(where, *(cell.strip() for cell in row)) for where, row in cells)
    if not rows:
        raise ValueError(f"{uri} has no rows. {_EXPECTED}.")
    return ClassTable(uri, rows)


def _csv_rows(uri: str, text: str) -> Iterator[tuple[str, list[str]]]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [cell.strip() for cell in next(lines, [])]
        if sorted(header) != sorted(COLUMNS):
            raise ValueError(f"{uri} has the columns {', '.join(header) or 'of an empty file'}. {_EXPECTED}.")
        for cells in lines:
            if not any(cells):
                continue
            where = f"{uri}, line {lines.line_num}"
            if len(cells) != len(header):
                raise ValueError(
                    f"{where}: {len(cells)} cells instead of {len(header)}. Put names with commas in quotes."
                )
            yield where, [cells[header.index(name)] for name in COLUMNS]
    except csv.Error as error:
        raise ValueError(f"{uri}, line {lines.line_num}: {error}. {_EXPECTED}.") from error


def _json_rows(uri: str, text: str) -> Iterator[tuple[str, list[str]]]:
    try:
        rows: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{uri} is not JSON: {error}. {_EXPECTED}.") from error
    if not isinstance(rows, list):
        raise ValueError(f"{uri} is not a JSON list. {_EXPECTED}.")
    for number, row in enumerate(rows, start=1):
        where = f"{uri}, row {number}"
        if not isinstance(row, dict) or set(row) != set(COLUMNS):
            raise ValueError(f"{where}: {json.dumps(row)[:200]} does not have the fields of a row. {_EXPECTED}.")
        if not all(isinstance(row[name], str) for name in COLUMNS[:2]) or not isinstance(
            row[MIXTURE_CLASS], str | None
        ):
            raise ValueError(f"{where}: {json.dumps(row)[:200]} has a field that is not text. {_EXPECTED}.")
        yield where, [row[name] or "" for name in COLUMNS]
