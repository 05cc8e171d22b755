"""Parquet files with an image column: the layout of Hugging Face, plain bytes, and corpora that vitline wrote.

Also what the sources made of tables and archives share: `SourceFiles`, `named_split`, `label_texts`, `ParquetRows`.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from data_prep.config import CorpusRecipe, ParquetImages
from data_prep.corpora.raw import Part, Place, RawCorpus, RawExample, Spill, SplitRule
from data_prep.labels import ClassInfo, number_label
from data_prep.shard_format import CLASSES_KEY, MANIFEST_KEY, Manifest, load_manifest, segment_keys, segment_store
from infra.storage import Listed, Store, open_store

PARQUET_ENDINGS = (".parquet", ".parq", ".pq")


class SourceFiles:
    """The files of one source: a single file, or those below a folder whose names end as its kind of file does.

    Names that begin with `.` or `_`, of files and of folders, are passed over, as Arrow and Spark do: `._a.parquet`,
    `_temporary/`. So are files with other endings.
    """

    def __init__(self, path: str, endings: tuple[str, ...]) -> None:
        self.uri, self._endings = open_store(path).uri, endings

    @functools.cached_property
    def single(self) -> str | None:
        """Key of the one file that the source is; None where it is a folder."""
        parent, _, name = self.uri.rpartition("/")
        if not self._wanted(name) or not parent.partition("://")[1]:  # a whole bucket has no parent
            return None
        return name if open_store(_root(parent)).exists(name) else None

    @functools.cached_property
    def store(self) -> Store:
        """The folder that the keys of `files` are below."""
        return open_store(_root(self.uri.rpartition("/")[0]) if self.single else self.uri)

    def files(self) -> Iterator[Listed]:
        """Every file, in the order of the store. Raises ValueError where there is none."""
        found = False
        for listed in self.store.scan(self.single or ""):
            if listed.key == self.single or (self.single is None and self._wanted(listed.key)):
                found = True
                try:
                    plain_text(listed.key)
                except ValueError:
                    raise ValueError(f"{listed.key!a} in {self.uri} is no name in UTF-8. Rename the file.") from None
                yield listed
        if not found:
            raise ValueError(
                f"{self.uri} is no file and no folder that holds one named {', '.join('*' + e for e in self._endings)}. "
                "Name the file, or the folder that the files lie in."
            )

    def splits(self) -> frozenset[str]:
        """The splits that the names of the files name."""
        return frozenset(split for file in self.files() if (split := named_split(file.key)))

    def fingerprint(self) -> str:
        """Of names, sizes and tags. Raises ValueError where there is no file."""
        digest = hashlib.sha256()
        for file in self.files():
            digest.update(f"{file.key}\0{file.size}\0{file.tag}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _wanted(self, key: str) -> bool:
        hidden = any(name.startswith((".", "_")) for name in key.split("/"))
        return key.lower().endswith(self._endings) and not hidden


def _root(parent: str) -> str:
    return f"{parent}/" if parent == "file://" else parent


def named_split(key: str) -> str | None:
    """The split that a path names: its first word that is one, between whatever is no letter, folders before files.
    None where it names none. So `data/validation-00000-of-00002.parquet` is val, as on the Hugging Face Hub."""
    words = re.split(r"[\W\d_]+", key.lower())
    return next((SplitRule.NAMES[word] for word in words if word in SplitRule.NAMES), None)


def labelled_number(label: str) -> int | None:
    """The number that `number_label` made a label of; None of any other label."""
    return int(label) if re.fullmatch(r"[0-9]{6,18}", label) and number_label(int(label)) == label else None


def label_texts(value: Any, number: Callable[[int], str] = number_label) -> list[str]:
    """The labels of one cell, a number, a text or a list of them; none of an empty cell. Texts are NFC and stripped,
    numbers become text by `number`. Raises ValueError where a label is neither, or a negative number."""
    if value is None or value == "":
        return []
    return [_label_text(label, number) for label in (value if isinstance(value, (list, tuple)) else [value])]


def _label_text(label: Any, number: Callable[[int], str]) -> str:
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():
        label = int(label)  # whole numbers become this in tables that have gaps
    if isinstance(label, int):
        if label < 0:
            raise ValueError(f"label {label}, which stands for none")
        return number(label)
    if not isinstance(label, str) or not label.strip():
        raise ValueError(f"{short(label)} is no label: neither text nor whole number")
    return plain_text(label.strip())


def distinct_labels(labels: Iterable[str], single_label: bool) -> tuple[str, ...]:
    """Each label once, in order. Raises ValueError where there is none, or several where one is expected."""
    distinct = tuple(dict.fromkeys(labels))
    if not distinct:
        raise ValueError("no label")
    if single_label and len(distinct) > 1:
        raise ValueError(f"{len(distinct)} labels, {short(distinct)}: set single_label to false to keep them all")
    return distinct


def plain_text(text: str) -> str:
    """The text in NFC. Raises ValueError where it has no UTF-8, as half a surrogate pair has none."""
    text.encode()
    return unicodedata.normalize("NFC", text)


def short(value: Any) -> str:
    """What a message shows of a value."""
    shown = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


class Refusal(Exception):
    """Reason and detail why a file, a stretch of one or a row gives no example."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.refused = reason, detail


_BUFFER_BYTES = 1 << 20  # of each column; without a buffer Arrow holds whole column chunks, however large
_BATCH_BYTES, _BATCH_ROWS = 4 << 20, 1024


class ParquetRows:
    """One Parquet file, read a few rows at a time whatever the size of its row groups: `with ParquetRows(...) as rows`.

    Raises Refusal where the footer cannot be read or the file cannot be opened.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._uri = store.uri_of(key)
        try:
            self._file = _StoreFile(store.open(key))
        except (FileNotFoundError, PermissionError) as error:
            raise Refusal("unreadable", f"{self._uri}: {error.strerror}") from error
        try:
            with self._damage("footer"):
                self._parquet = pq.ParquetFile(
                    pa.PythonFile(self._file, mode="r"),
                    buffer_size=_BUFFER_BYTES,
                    pre_buffer=False,
                    page_checksum_verification=True,
                )
                self.schema: pa.Schema = self._parquet.schema_arrow
                metadata = self._parquet.metadata
                groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
                self.num_rows = [group.num_rows for group in groups]
                self.num_bytes = [max(0, group.total_byte_size) for group in groups]
                if sum(self.num_rows) != metadata.num_rows or min(self.num_rows, default=0) < 0:
                    raise ValueError(f"row groups of {self.num_rows} rows in a file of {metadata.num_rows}")
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
        """The rows of a row group. Raises Refusal behind those that can be read."""
        wanted, num_read = self.num_rows[group], 0
        batch_rows = _BATCH_BYTES * wanted // max(1, self.num_bytes[group])
        with self._damage(f"row group {group}"):
            found = self._parquet.iter_batches(
                max(1, min(_BATCH_ROWS, batch_rows)), row_groups=[group], columns=columns, use_threads=False
            )
        while True:
            with self._damage(f"row group {group}, from row {self.first_row(group) + num_read}"):
                batch = next(found, None)
            if batch is None:
                break
            num_read += batch.num_rows
            yield batch
        if num_read != wanted:
            raise Refusal("damaged_archive", f"{self._uri}: row group {group} holds {num_read} rows, not {wanted}")

    @contextlib.contextmanager
    def _damage(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Arrow has no closed list of what damaged files make it raise
            if self._file.failure is not None:
                raise self._file.failure from None
            detail = f"{self._uri}: {what}: {' '.join(str(error).split())[:300]}"
            raise Refusal("damaged_archive", detail) from error


class _StoreFile:
    """A file for Arrow that remembers what the store raised: Arrow raises OSError for damaged files too."""

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


def cells(column: pa.Array) -> Iterator[Any]:
    """The values of a column; a ValueError, not raised, in place of one that is no value, such as text that is not UTF-8."""
    for scalar in column:
        try:
            yield scalar.as_py()
        except (ValueError, OverflowError) as error:
            yield ValueError(str(error))


def cell_value(cell: Any) -> Any:
    """What `cells` gave. Raises the ValueError that it is."""
    if isinstance(cell, ValueError):
        raise cell
    return cell


def cell_text(cell: Any) -> str:
    """A cell as text; empty where it is. Raises ValueError."""
    return "" if cell_value(cell) is None else plain_text(str(cell))


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the source, the split that it is of, and how many of its rows belong to the corpus (None: all)."""

    store: Store
    key: str
    split: str | None
    num_rows: int | None = None


@dataclass(frozen=True, slots=True)
class _Columns:
    """Names of the columns; empty: there is none."""

    image: str
    label: str
    id: str
    weights: str = ""
    group: str = ""

    @property
    def named(self) -> list[str]:
        return list(dict.fromkeys(name for name in (self.image, self.label, self.id, self.weights, self.group) if name))


class ParquetCorpus(RawCorpus):
    """Parquet files with an image column: bytes, or a struct with a field `bytes`.

    A label that is a number is the class `number_label` of it, named by the declared ClassLabel, so that classes keep
    the order of their numbers. A file is of the split that its path names (`named_split`). The id of a row is
    `file!number of the row` unless a column holds it. Of a corpus that vitline wrote, ids, groups, labels, weights,
    classes and splits are taken over, and only the rows of its manifest.
    """

    def __init__(self, source: ParquetImages, recipe: CorpusRecipe) -> None:
        self._source, self._recipe = source, recipe
        self._files = SourceFiles(source.path, PARQUET_ENDINGS)
        self.origin, self.single_label = self._files.uri, source.single_label

    def fingerprint(self) -> str:
        return self._own.digest if self._own else self._files.fingerprint()

    def parts(self, place: Place) -> Iterator[Part]:
        present: list[JsonValue] = [*sorted({split for file in self._listed() if (split := file.split)})]
        first: tuple[str, list[str]] | None = None
        for file, footer in self._footers():
            uri = file.store.uri_of(file.key)
            where: dict[str, JsonValue] = {"base": file.store.uri, "key": file.key, "split": file.split}
            where["present"] = present
            if isinstance(footer, Refusal):
                yield Part(name=f"{file.key}.damaged", num_examples=1, where={**where, "damaged": [*footer.refused]})
                continue
            self._check(footer.schema, uri)
            names = declared_names(footer.schema, self._columns.label)
            first = first or (uri, names)
            if names != first[1]:
                raise ValueError(
                    f"{uri} declares other class names for {self._columns.label!r} than {first[0]}, so that a number "
                    "would mean two things. Prepare them as two corpora, or write them again with equal names."
                )
            for begin, end, num_rows, num_bytes in _stretches(footer, file.num_rows, place.examples_per_part):
                yield Part(
                    name=f"{file.key}.{begin:06d}-{end:06d}",
                    num_bytes=num_bytes,
                    num_examples=num_rows,
                    where={**where, "groups": [begin, end], "rows": file.num_rows},
                )

    def examples(self, part: Part, place: Place) -> Iterator[RawExample]:
        where = cast(dict[str, Any], part.where)
        file = _File(open_store(where["base"]), where["key"], where["split"], where.get("rows"))
        reader = _Reader(file, self._columns, self._label_of, self.single_label, self._rule(where["present"]))
        try:
            if "damaged" in where:
                raise Refusal(*where["damaged"])
            with ParquetRows(file.store, file.key) as rows, Spill(place, part) as spill:
                for group in range(*where["groups"]):
                    yield from reader.group(rows, group, spill)
        except Refusal as error:
            yield reader.refused(f"{part.name}!footer", *error.refused)

    def _rule(self, present: list[str]) -> SplitRule:
        return SplitRule(self._recipe, frozenset(present))

    def class_info(self, source_id: str) -> ClassInfo:
        if self._own:
            return self._own_classes[source_id]
        number = labelled_number(source_id) if self._numbered else None
        if number is not None:
            name = self._names[number] if number < len(self._names) else str(number)
            return ClassInfo(name=name, source_id=source_id)
        return super().class_info(source_id)

    @functools.cached_property
    def _columns(self) -> _Columns:
        if self._own:
            return _Columns("image", "labels", "example_id", "weights" if self._own.has_weights else "", "group")
        return _Columns(self._source.image_column, self._source.label_column, self._source.id_column)

    @functools.cached_property
    def _own(self) -> Manifest | None:
        """The manifest, where the folder is a corpus that vitline wrote."""
        if self._files.single:
            return None
        try:
            found = self._files.store.read_json(MANIFEST_KEY)
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(found, dict) or not {"schema_version", "class_map_digest", "splits"} <= found.keys():
            return None
        try:
            manifest = load_manifest(self._files.store)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if self._source.single_label and not manifest.single_label:
            raise ValueError(f"{self._files.uri} has several labels an image: set single_label to false.")
        return manifest

    @functools.cached_property
    def _own_classes(self) -> dict[str, ClassInfo]:
        """By source id, in the order of their numbers."""
        classes = self._files.store.read_json(CLASSES_KEY)["classes"]
        return {info.source_id: info for info in map(ClassInfo.model_validate, classes)}

    @functools.cached_property
    def _label_of(self) -> Callable[[int], str]:
        if not self._own:
            return number_label
        return list(self._own_classes).__getitem__

    @functools.cached_property
    def _first_schema(self) -> pa.Schema | None:
        """Of the first file that can be read."""
        footers = (footer for _, footer in self._footers())
        return next((footer.schema for footer in footers if isinstance(footer, _Footer)), None)

    @functools.cached_property
    def _names(self) -> list[str]:
        return declared_names(self._first_schema, self._columns.label) if self._first_schema else []

    @functools.cached_property
    def _numbered(self) -> bool:
        if self._first_schema is None:
            return False
        kind = self._first_schema.field(self._columns.label).type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        return not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))

    def _listed(self) -> Iterator[_File]:
        if not self._own:
            for listed in self._files.files():
                yield _File(self._files.store, listed.key, named_split(listed.key))
            return
        for name, split in self._own.splits.items():
            rows_per_shard = split.rows_per_row_group * split.row_groups_per_shard
            for segment in split.segments:
                if segment.split != name:  # a split put together of others
                    continue
                keys = segment_keys(segment)[: split.shards_in_use(segment)]
                for number, key in enumerate(keys):
                    left = segment.num_rows - number * rows_per_shard
                    yield _File(segment_store(self._files.store, segment), key, name, min(left, rows_per_shard))

    def _footers(self) -> "Iterator[tuple[_File, _Footer | Refusal]]":
        """Every file with its footer, a few requests at a time."""
        files = self._listed()
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            while batch := [*itertools.islice(files, _FOOTERS_AT_ONCE)]:
                yield from zip(batch, pool.map(_footer_of, batch), strict=True)

    def _check(self, schema: pa.Schema, uri: str) -> None:
        for name in self._columns.named:
            if schema.names.count(name) != 1:
                raise ValueError(
                    f"{uri} has no column {name!r}, or two; its columns are {', '.join(schema.names)}. "
                    "Name the right ones as image_column, label_column and id_column."
                )
        kind = schema.field(self._columns.image).type
        if not _is_binary(kind) and not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
            raise ValueError(
                f"Column {self._columns.image!r} of {uri} is {kind}: images are binary, or a struct with a field 'bytes'. "
                "Locations of images are read by the source 'table'."
            )


_FOOTERS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _Footer:
    schema: pa.Schema
    num_rows: list[int]
    num_bytes: list[int]


def _footer_of(file: _File) -> _Footer | Refusal:
    try:
        with ParquetRows(file.store, file.key) as rows:
            return _Footer(rows.schema, rows.num_rows, rows.num_bytes)
    except Refusal as error:
        return error


def _stretches(footer: _Footer, limit: int | None, rows_per_part: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row group, end, rows, bytes) of stretches of whole row groups with at least `rows_per_part` rows each."""
    first = rows_before = rows = num_bytes = 0
    for group, (num_rows, size) in enumerate(zip(footer.num_rows, footer.num_bytes, strict=True)):
        rows, num_bytes = rows + num_rows, num_bytes + size
        full = limit is not None and rows_before + rows >= limit
        if full or rows >= rows_per_part or group + 1 == len(footer.num_rows):
            yield first, group + 1, rows if limit is None else min(rows, limit - rows_before), num_bytes
            first, rows_before, rows, num_bytes = group + 1, rows_before + rows, 0, 0
        if full:
            return


class _Reader:
    """Rows of one file as examples."""

    def __init__(
        self, file: _File, columns: _Columns, label_of: Callable[[int], str], single_label: bool, rule: SplitRule
    ) -> None:
        self._file, self._columns, self._label_of = file, columns, label_of
        self._single_label, self._rule = single_label, rule
        self._id, self._uri = unicodedata.normalize("NFC", file.key), file.store.uri_of(file.key)

    def group(self, rows: ParquetRows, group: int, spill: Spill) -> Iterator[RawExample]:
        """The rows of one row group; behind damage one refusal for what is left of it."""
        number, limit = rows.first_row(group), self._file.num_rows
        num_classes = len(declared_names(rows.schema, self._columns.label)) or None
        try:
            for batch in rows.batches(group, self._columns.named):
                columns = [cells(batch.column(name)) for name in self._columns.named]
                for values in zip(*columns, strict=True):
                    if limit is not None and number >= limit:
                        return
                    row = dict(zip(self._columns.named, values, strict=True))
                    yield self._example(number, row, num_classes, spill)
                    number += 1
        except Refusal as error:
            yield self.refused(f"{self._id}!row group {group}", *error.refused)

    def refused(self, example_id: str, reason: str, detail: str) -> RawExample:
        split = self._rule.place(example_id, self._file.split)
        return RawExample(example_id, (), split, self._file.store.uri, self._file.key, refused=(reason, detail))

    def _example(self, number: int, row: Mapping[str, Any], num_classes: int | None, spill: Spill) -> RawExample:
        numbered, detail = f"{self._id}!{number}", f"row {number} of {self._uri}"
        try:
            data = _image_bytes(row[self._columns.image])
            example_id = cell_text(row.get(self._columns.id)) or numbered
            group = cell_text(row.get(self._columns.group)) or None
            weights = cell_value(row.get(self._columns.weights))
        except ValueError as error:
            return self.refused(numbered, "unreadable", f"{detail}: {error}")
        try:
            labels = self._labels(cell_value(row[self._columns.label]), num_classes)
        except (ValueError, IndexError) as error:
            return self.refused(numbered, "no_label", f"{detail}: {error}")
        return RawExample(
            example_id=example_id,
            labels=labels,
            split=self._rule.place(group or example_id, self._file.split),
            base=spill.base,
            key=spill.key,
            offset=spill.keep(data),
            length=len(data),
            group=group,
            weights=None if weights is None else tuple(weights),
            data=data,
        )

    def _labels(self, value: Any, num_classes: int | None) -> tuple[str, ...]:
        numbers = value if isinstance(value, list) else [value]
        if num_classes is not None and any(isinstance(n, int) and n >= num_classes for n in numbers):
            raise ValueError(f"label {short(value)}, but {num_classes} classes are declared")
        return distinct_labels(label_texts(value, self._label_of), self._single_label)


def _image_bytes(cell: Any) -> bytes:
    if isinstance(cell_value(cell), dict):
        if cell["bytes"] is None and cell.get("path"):
            raise ValueError(f"only the path {short(cell['path'])} of an image, no bytes; images have to be embedded")
        cell = cell["bytes"]
    if cell is None:
        raise ValueError("no image")
    return bytes(cell)


def _is_binary(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
            pa.types.is_fixed_size_binary,
        )
    )


def declared_names(schema: pa.Schema, column: str) -> list[str]:
    """Class names that the Hugging Face metadata declare for a column, a ClassLabel or a list of them; else none."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        while isinstance(feature, list) or "feature" in feature:
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        names = feature["names"]
    except (KeyError, TypeError, ValueError, IndexError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []
