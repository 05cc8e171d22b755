"""A table of image locations and labels, as JFT is: CSV, JSON lines or Parquet, with any number of rows.

The driver reads text tables once, only to find the ends of rows; workers read and parse their pieces. Of Parquet files, the driver
reads the footers.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast
from urllib.parse import unquote

import pyarrow as pa
from pydantic import JsonValue

from vitline.data_prep.archives.parquet_rows import (
    PARQUET_ENDINGS,
    ParquetRows,
    Refusal,
    cell_text,
    cell_value,
    cells,
)
from vitline.data_prep.archives.text_rows import DELIMITERS, TextRows, keys_of, parsed_line, parsed_row
from vitline.data_prep.config import CorpusRecipe, LabelTable
from vitline.data_prep.labels.class_maps import load_class_map
from vitline.data_prep.labels.classes import number_label
from vitline.data_prep.labels.label_texts import distinct_labels, label_texts, plain_text, short
from vitline.data_prep.sources.allowed_roots import AllowedRoots, location
from vitline.data_prep.sources.raw import ImageSource, RawExample, SourcePart, SplitRule, WorkFolder, table_of
from vitline.data_prep.sources.source_files import SourceFiles
from vitline.infra.storage import Listed, Store, checked_key, in_bucket, open_store

_KINDS = {
    "CSV": (".csv", ".csv.gz"),
    "TSV": (".tsv", ".tsv.gz"),
    "JSON lines": (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz"),
    "Parquet": PARQUET_ENDINGS,
}
_ROWS_LOOKED_AT = 100  # rows of JSON lines that are read to find the columns
# Reading a piece of a row group means reading the row group up to it. With so many pieces this still costs less than the images.
_STRETCHES_PER_ROW_GROUP = 16
_LARGEST_FLOAT32 = 3.4028234663852886e38
_IN_ARCHIVE = re.compile(r"\.(tar|tar\.gz|tgz|zip)!", re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.0+)?")  # pandas writes 1.0 where a label is missing elsewhere
_FILE_URI = re.compile(r"file:(?://(?:localhost)?)?/(.+)", re.DOTALL)
_DRIVE = re.compile(r"[A-Za-z]:/|//")
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")
_MAYBE_SPLIT = re.compile(rb"val|dev|test", re.IGNORECASE)


class LabelTableCorpus(ImageSource):
    """The images that a table locates anywhere, with the labels of the table.

    - A location is a path below `images`, an absolute path (/...) on a disk that every worker can read, or a URI (s3://, gs://, az://,
      file://). A leading `./` is ignored, `\\` read as `/` and `%20` of a file
      URI as a space, unless the path exists as it is written; `..`, members of archives (a.tar!b.jpg) and other services are refused.
    - A location outside of `images` is refused unless it is below one of `allowed_roots`. Links are followed before the check.
    - A label is the text of the table. A whole number, also written as 1.0, becomes `number_label`, as for other kinds of sources,
      so that classes keep their order, unless the class map of the recipe has the number without zeros. If a row repeats a label,
      the larger weight counts.
    - CSV has a header and follows RFC 4180: quoted fields may hold commas, quotes and newlines, up to 128 KiB. A quote that is
      not closed invalidates its line. TSV is the same with tabs. JSON lines have one object per line;
      a .json may also be one array of objects.
    - Parquet may be partitioned by folders: `labels=cat/part-0.parquet` has a column `labels`, unless the file has it itself.
    - Text tables are divided where rows end, Parquet into row groups. A .gz file and a JSON array are read from their
      beginning by one worker, so large tables should be many files.
    - If a split column is configured, examples with an empty cell get a drawn split. To know whether the table has a val
      split, the driver reads that column up to the first row of val.
    """

    lists_ids = True
    when_ids_repeat = (
        "A table has one row per image: put all labels of an image into its row, as a list, or as one text with "
        "source.label_separator, and the weights likewise; or set source.id_column to a column of distinct ids."
    )

    def __init__(self, source: LabelTable, recipe: CorpusRecipe) -> None:
        self._source, self._recipe = source, recipe
        self._files = SourceFiles(source.path, tuple(itertools.chain(*_KINDS.values())), source.allowed_roots)
        self.origin, self.single_label = self._files.uri, source.single_label

    def fingerprint(self) -> str:
        """Digest of names, sizes and tags of the tables, but not of the images, which may be hundreds of millions: images that
        are replaced under an unchanged table are not noticed."""
        return self._files.fingerprint()

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        present: list[JsonValue] = [*sorted(self._present_splits())]
        for file in self._tables():
            for part in self._parts_of(file, work.examples_per_part):
                yield SourcePart(**{**dict(part), "where": {**part.where, "key": file.key, "present": present}})

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        where = cast(dict[str, Any], part.where)
        store, present = self._files.store, frozenset(where["present"])
        allowed = AllowedRoots([_images_of(self._source, self._files.store), *self._source.allowed_roots])
        rows = _Rows(self._source, self._recipe, store, where["key"], present, allowed)
        try:
            if "damaged" in where:
                raise Refusal(*where["damaged"])
            if _kind(where["key"]) == "Parquet":
                yield from rows.of_parquet(where["group"], where["first"], where["end"])
            else:
                yield from rows.of_text(where["start"], where["end"], where["line"], where["columns"])
        except Refusal as error:
            yield rows.refused(f"{part.name}!damaged", *error.refused)

    def listed(self, part: SourcePart, work: WorkFolder) -> pa.Table:
        return table_of(self.examples(part, work))

    def _tables(self) -> Iterator[Listed]:
        first = None
        for file in self._files.files():
            first = first or file.key
            if _kind(file.key) != _kind(first):
                raise ValueError(
                    f"{self._files.uri} holds tables of two kinds: {first} is {_kind(first)}, {file.key} is "
                    f"{_kind(file.key)}. Give a folder with one kind, or a single file."
                )
            yield file

    def _parts_of(self, file: Listed, rows_per_part: int) -> Iterator[SourcePart]:
        try:
            if _kind(file.key) == "Parquet":
                yield from self._row_groups(file, rows_per_part)
            else:
                yield from self._stretches(file, rows_per_part)
        except Refusal as error:
            yield SourcePart(name=f"{file.key}.damaged", num_examples=1, where={"damaged": [*error.refused]})

    def _row_groups(self, file: Listed, rows_per_part: int) -> Iterator[SourcePart]:
        with ParquetRows(self._files.store, file.key) as table:
            self._check(table.schema.names, file.key)
            for group, (num_rows, num_bytes) in enumerate(zip(table.num_rows, table.num_bytes, strict=True)):
                step = max(rows_per_part, -(-num_rows // _STRETCHES_PER_ROW_GROUP))
                for first in range(0, num_rows, step):
                    end = min(first + step, num_rows)
                    yield SourcePart(
                        name=f"{file.key}.{group:06d}.{first:09d}-{end:09d}",
                        num_bytes=num_bytes * (end - first) // num_rows,
                        num_examples=end - first,
                        where={"group": group, "first": first, "end": end},
                    )

    def _stretches(self, file: Listed, rows_per_part: int) -> Iterator[SourcePart]:
        columns = self._columns(file.key)
        with TextRows(self._files.store, file.key) as text:
            records = text.records(DELIMITERS.get(_kind(file.key)))
            if _kind(file.key) in DELIMITERS:
                next(records)  # the header
            where: dict[str, JsonValue] = {"columns": [*columns]}
            if text.is_array or file.key.lower().endswith(".gz"):
                where |= {"start": text.position, "end": None, "line": text.line}
                yield SourcePart(name=file.key, num_bytes=file.size, where=where)
                return
            while True:
                where |= {"start": text.position, "line": text.line}
                start, num_rows = text.position, sum(1 for _ in itertools.islice(records, rows_per_part))
                if not num_rows:
                    return
                yield SourcePart(
                    name=f"{file.key}.{start:015d}-{text.position:015d}",
                    num_bytes=text.position - start,
                    num_examples=num_rows,
                    where={**where, "end": text.position},
                )

    def _columns(self, key: str) -> list[str]:
        """Column names of a text table: the header, or the keys of the first rows of JSON lines. An empty table of JSON lines
        has no columns, and none are required."""
        kind = _kind(key)
        first: list[bytes] = []
        with TextRows(self._files.store, key) as text:
            try:
                for _, data in text.records(DELIMITERS.get(kind)):
                    first.append(data)
                    if kind in DELIMITERS or len(first) == _ROWS_LOOKED_AT:
                        break
            except Refusal:
                if not first:  # otherwise the readable rows are used
                    raise
        if kind in DELIMITERS:
            if not first:
                raise Refusal("unreadable", f"{self._files.store.uri_of(key)} is empty: a header is expected")
            try:
                columns = parsed_line(first[0], kind)
            except ValueError as error:
                raise ValueError(f"The header of {self._files.store.uri_of(key)} is not {kind}: {error}.") from error
        else:
            columns = [*dict.fromkeys(itertools.chain(*(keys_of(data) for data in first)))]
        if first:
            self._check(columns, key)
        return columns

    def _check(self, columns: list[str], key: str) -> None:
        for name in _named_columns(self._source):
            if columns.count(name) != 1:
                shown = ", ".join(columns[:100]) or "none"
                raise ValueError(
                    f"{self._files.store.uri_of(key)} has {'several columns' if name in columns else 'no column'} "
                    f"{name!r}; its columns are {shown}. Set image_column, labels_column and the other column names correctly."
                )

    def _present_splits(self) -> set[str]:
        """The splits of the split column, up to the first row of val: if val exists, no split is drawn."""
        found: set[str] = set()
        if not self._source.split_column:
            return found
        for file in self._tables():
            with contextlib.suppress(Refusal):  # becomes a refusal when the part is read
                for word in self._split_words(file.key):
                    found.add(SplitRule.NAMES.get(word, "train"))
                    if "val" in found:
                        return found
        return found

    def _split_words(self, key: str) -> Iterator[str]:
        column = self._source.split_column
        if _kind(key) == "Parquet":
            with ParquetRows(self._files.store, key) as table:
                self._check(table.schema.names, key)
                for group in range(len(table.num_rows)):
                    for batch in table.batches(group, [column]):
                        yield from (_word(value) for value in cells(batch.column(column).unique()))
            return
        columns = self._columns(key)
        with TextRows(self._files.store, key) as text:
            for _, data in text.records(DELIMITERS.get(_kind(key))):
                if not _MAYBE_SPLIT.search(data):  # most rows are in train and need not be parsed
                    continue
                with contextlib.suppress(ValueError):
                    yield _word(parsed_row(data, _kind(key), columns).get(column))


def _images_of(source: LabelTable, store: Store) -> str:
    """Where relative locations of the tables in a store lead."""
    return open_store(source.images).uri if source.images else store.uri


def _named_columns(source: LabelTable) -> list[str]:
    named = (source.image_column, source.labels_column, source.weights_column, source.id_column)
    return [*dict.fromkeys(filter(None, (*named, source.split_column, source.group_column)))]


def _kind(key: str) -> str:
    return next(kind for kind, endings in _KINDS.items() if key.lower().endswith(endings))


def _word(value: Any) -> str:
    return "" if value is None else str(value).strip().lower()


class _Rows:
    """Converts rows of one table to examples."""

    def __init__(
        self,
        source: LabelTable,
        recipe: CorpusRecipe,
        store: Store,
        key: str,
        present: frozenset[str],
        allowed: AllowedRoots,
    ) -> None:
        self._source, self._store, self._key, self._rule = source, store, key, SplitRule(recipe, present)
        self._images, self._allowed = _images_of(source, store), allowed
        self._id = plain_text(key)
        self._mapped = frozenset(load_class_map(recipe.class_map).source_ids if recipe.class_map else ())

    def of_text(self, start: int, end: int | None, line: int, columns: list[str]) -> Iterator[RawExample]:
        kind = _kind(self._key)
        with TextRows(self._store, self._key, start, end, line) as text:
            unit = "element" if text.is_array else "line"
            for number, data in text.records(DELIMITERS.get(kind)):
                try:
                    row = parsed_row(data, kind, columns)
                except ValueError as error:
                    yield self.refused(f"{self._id}!{number}", "unreadable", f"{unit} {number} of {self._key}: {error}")
                else:
                    yield self._example(row, number, unit)

    def of_parquet(self, group: int, first: int, end: int) -> Iterator[RawExample]:
        names = _named_columns(self._source)
        with ParquetRows(self._store, self._key) as table:
            at, rows_before = 0, table.first_row(group)
            for batch in table.batches(group, names):
                begin, stop = max(first, at), min(end, at + batch.num_rows)
                if begin < stop:
                    wanted = batch.slice(begin - at, stop - begin)
                    columns = [cells(wanted.column(name)) for name in names]
                    for number, values in enumerate(zip(*columns, strict=True), rows_before + begin):
                        yield self._example(dict(zip(names, values, strict=True)), number, "row")
                at += batch.num_rows
                if at >= end:
                    return

    def refused(self, example_id: str, reason: str, detail: str) -> RawExample:
        split = self._rule.assign_split(example_id)
        return RawExample(example_id, (), split, self._store.uri, self._key, refused=(reason, detail))

    def _example(self, row: Mapping[str, Any], number: int, unit: str) -> RawExample:
        source = self._source
        try:
            row = {name: cell_value(value) for name, value in row.items() if name}
            location = row.get(source.image_column)
            base, key = self._located(location)
            self._check_allowed(base, key)
            labels, weights = self._labelled(row)
            named = self._split(row)
            example_id = cell_text(row.get(source.id_column)) or plain_text(str(location).replace("\\", "/"))
            group = cell_text(row.get(source.group_column)) or None
        except Refusal as error:
            reason, detail = error.refused
        except ValueError as error:
            reason, detail = "unreadable", str(error)
        else:
            split = self._rule.assign_split(group or example_id, named)
            return RawExample(example_id, labels, split, base, key, group=group, weights=weights)
        detail = f"{unit} {number} of {self._key}, image {short(row.get(source.image_column))}: {detail}"
        return self.refused(f"{self._id}!{number}", reason, detail)

    def _located(self, location: Any) -> tuple[str, str]:
        """Base and key. There are few bases, so that few stores are opened. Raises Refusal."""
        if not isinstance(location, str) or not location.strip():
            raise Refusal("unreadable", "no location")
        scheme, is_uri, rest = location.partition("://")
        if on_disk := _FILE_URI.fullmatch(location):
            base, key = "file:///", _as_stored("file:///", on_disk[1], unquote)
        elif not is_uri and location.startswith("/"):
            base, key = "file:///", location.removeprefix("/")
        elif not is_uri:
            base, key = self._images, _as_stored(self._images, location, lambda path: path.replace("\\", "/"))
            if _DRIVE.match(key):
                raise Refusal(
                    "unreadable", "a path on a drive of Windows; expected one below `images`, or s3://bucket/key"
                )
            while key.startswith("./"):
                key = key[2:]
        elif in_bucket(location) or scheme == "memory":
            root, _, key = rest.partition("/")
            if not _BUCKET.fullmatch(root):
                raise Refusal(
                    "unreadable", f"{short(root)} is not a valid bucket name; expected {scheme}://bucket/path"
                )
            base = f"{scheme}://{root}"
        else:
            raise Refusal(
                "unreadable", "unsupported location; expected a path, file:///path, or s3://, gs:// or az://bucket/key"
            )
        if ".." in key.split("/"):
            raise Refusal("unsafe_path", "the path contains '..'")
        if _IN_ARCHIVE.search(key):
            raise Refusal(
                "unreadable", "members of archives are not supported here; WebDataset and class folders read archives"
            )
        key.encode()
        _check_path(key)
        return base, checked_key(key)

    def _check_allowed(self, base: str, key: str) -> None:
        """Raises Refusal for a location outside of the allowed roots."""
        uri = location(base, key)
        if self._allowed.allows(uri):
            return
        if self._allowed.names(uri):
            real = self._allowed.real_path(uri.removeprefix("file://"))
            what = f"{short(real)}, to which a link leads,"
        else:
            what = "the location"
        # No value is proposed: whoever wrote the table would choose it.
        raise Refusal(
            "unsafe_path",
            f"not in source.allowed_roots: {what} is outside of {self._allowed}; if you trust the table, name the folder or bucket of "
            "its images there",
        )

    def _labelled(self, row: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
        """Labels and weights. Raises Refusal."""
        source = self._source
        try:
            labels = [self._class_of(text) for text in label_texts(self._several(row.get(source.labels_column)), str)]
            if not source.weights_column:
                return distinct_labels(labels, source.single_label), None
            weights = [_weight(weight) for weight in self._several(row.get(source.weights_column))]
            if len(weights) != len(labels):
                raise ValueError(f"the row has {len(weights)} weights, but {len(labels)} labels")
            largest: dict[str, float] = {}
            for label, weight in zip(labels, weights, strict=True):
                largest[label] = max(weight, largest.get(label, weight))
            return distinct_labels(largest, source.single_label), tuple(largest.values())
        except ValueError as error:
            raise Refusal("no_label", str(error)) from error

    def _class_of(self, label: str) -> str:
        number = _WHOLE_NUMBER.fullmatch(label)
        if not number:
            return label
        filled = number_label(int(number[1]))
        mapped = (each for each in (filled, number[1], label) if each in self._mapped)
        return next(mapped, filled)

    def _several(self, cell: Any) -> list[Any]:
        if isinstance(cell, (list, tuple)):
            return [*cell]
        if isinstance(cell, str):
            separator = self._source.label_separator
            return [text for text in (cell.split(separator) if separator else [cell]) if text.strip()]
        return [] if cell is None else [cell]

    def _split(self, row: Mapping[str, Any]) -> str | None:
        word = _word(row.get(self._source.split_column))
        if word and word not in SplitRule.NAMES:
            raise ValueError(f"split {short(word)} is not one of {', '.join(SplitRule.NAMES)}")
        return SplitRule.NAMES.get(word)


def _as_stored(base: str, path: str, other: Callable[[str], str]) -> str:
    """`other(path)`, as programs write a path that has `/` and plain letters on disk; the path itself where it exists so."""
    read = other(path)
    return path if read != path and base.startswith("file:") and os.path.lexists(f"{base[7:]}/{path}") else read


def _check_path(key: str) -> None:
    """Raises Refusal for a path that no store can have."""
    names = key.split("/")
    if "." in names:
        plain = "/".join(name for name in names if name != ".")
        raise Refusal("unreadable", f"the path has a folder '.'; write it as {short(plain)}")
    if "" in names:
        raise Refusal("unreadable", "the path has a double or trailing slash; expected the path of a file")
    if "\0" in key:
        raise Refusal("unreadable", "the path contains a zero byte")


def _weight(value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"weight {short(value)} is not a number") from None
    if not 0 <= weight <= _LARGEST_FLOAT32:  # also false for NaN
        raise ValueError(f"weight {weight} is outside of 0 to the largest float32")
    return weight
