"""Parquet files with an image column: Hugging Face's layout, plain bytes, and corpora written by vitline."""

import contextlib
import functools
import itertools
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, cast

import pyarrow as pa
from pydantic import JsonValue

from vitline.data_prep.archives.parquet_rows import (
    PARQUET_ENDINGS,
    ParquetRows,
    Refusal,
    cell_text,
    cell_value,
    cells,
    stretches,
)
from vitline.data_prep.config import CorpusRecipe, ParquetImages
from vitline.data_prep.labels.classes import ClassInfo, ClassMap, number_label
from vitline.data_prep.labels.label_texts import distinct_labels, label_texts, numbered_class, short
from vitline.data_prep.shard_format import (
    CLASSES_KEY,
    MANIFEST_KEY,
    ListedShard,
    Manifest,
    known_shards,
    load_manifest,
    open_shard,
)
from vitline.data_prep.sources.raw import ImageSource, RawExample, SourcePart, Spill, SplitRule, WorkFolder, table_of
from vitline.data_prep.sources.source_files import SourceFiles
from vitline.infra.storage import Store, open_store


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the source, its split, and the number of its rows that belong to the corpus (None: all)."""

    store: Store
    key: str
    split: str | None
    num_rows: int | None = None
    listed: ListedShard | None = None
    """What the corpus states about the file, if it is a shard of a corpus written by vitline."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """Names of the columns; empty if there is none."""

    image: str
    label: str
    id: str
    weights: str = ""
    group: str = ""

    @property
    def named(self) -> list[str]:
        return list(dict.fromkeys(name for name in (self.image, self.label, self.id, self.weights, self.group) if name))


class ParquetCorpus(ImageSource):
    """Parquet files with an image column: bytes, or a struct with a field `bytes`.

    A numeric label becomes `number_label`, named by the declared ClassLabel, so that classes keep the order of their numbers. The
    split of a file is the one that its path names, if those of all files do (`SourceFiles.splits`). The id of a row is
    `file!row number` unless a column holds it.
    From a corpus written by vitline, ids, groups, labels, weights, classes and splits are taken over, but only the rows in its
    manifest; a shard that is not the one that its manifest lists is a ShardError.
    """

    when_ids_repeat = (
        "Set source.id_column to a column of distinct ids, or leave it empty: an id is then file and row number."
    )

    def __init__(self, source: ParquetImages, recipe: CorpusRecipe) -> None:
        self._source, self._recipe = source, recipe
        self._files = SourceFiles(source.path, PARQUET_ENDINGS, source.allowed_roots, source.splits)
        self.origin, self.single_label = self._files.uri, source.single_label
        self.lists_ids = bool(source.id_column)

    def fingerprint(self) -> str:
        return self._own.digest if self._own else self._files.fingerprint()

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        present: list[JsonValue] = [*sorted({split for file in self._listed() if (split := file.split)})]
        first: tuple[str, list[str]] | None = None
        for file, footer in self._footers():
            uri = file.store.uri_of(file.key)
            where: dict[str, JsonValue] = {"base": file.store.uri, "key": file.key, "split": file.split}
            where["present"], where["listed"] = present, asdict(file.listed) if file.listed else None
            if isinstance(footer, Refusal):
                yield SourcePart(
                    name=f"{file.key}.damaged", num_examples=1, where={**where, "damaged": [*footer.refused]}
                )
                continue
            self._check(footer.schema, uri)
            names = declared_names(footer.schema, self._columns.label)
            first = first or (uri, names)
            if names != first[1]:
                raise ValueError(
                    f"{uri} declares class names for {self._columns.label!r} that differ from those of {first[0]}, "
                    "so the meaning of a number "
                    "would be ambiguous. Prepare them as two corpora, or rewrite them with equal names."
                )
            for begin, end, num_rows, num_bytes in stretches(
                footer.num_rows, footer.num_bytes, work.examples_per_part, file.num_rows
            ):
                yield SourcePart(
                    name=f"{file.key}.{begin:06d}-{end:06d}",
                    num_bytes=num_bytes,
                    num_examples=num_rows,
                    where={**where, "groups": [begin, end], "rows": file.num_rows},
                )

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        where = cast(dict[str, Any], part.where)
        rule = SplitRule(self._recipe, frozenset(where["present"]))
        file = _File(_checked_store(where), where["key"], where["split"], where.get("rows"))
        reader = _Reader(file, self._columns, self._label_of, self.single_label, rule)
        try:
            if "damaged" in where:
                raise Refusal(*where["damaged"])
            with ParquetRows(file.store, file.key) as rows, Spill(work, part) as spill:
                for group in range(*where["groups"]):
                    yield from reader.group(rows, group, spill)
        except Refusal as error:
            yield reader.refused(f"{part.name}!footer", *error.refused)

    def listed(self, part: SourcePart, work: WorkFolder) -> pa.Table:
        """The ids of a part, from the id column. The listed location includes the row number."""
        where, found = cast(dict[str, Any], part.where), list[RawExample]()
        with contextlib.suppress(Refusal), ParquetRows(_checked_store(where), where["key"]) as rows:
            for group in range(*(where.get("groups") or (0, 0))):
                number = rows.first_row(group)
                for batch in rows.batches(group, [self._source.id_column]):
                    for value in cells(batch.column(self._source.id_column)):
                        found.append(_listed_row(value, number, where))
                        number += 1
        return table_of(found[: part.num_examples])

    def structure(self, work: WorkFolder) -> str:
        return "" if self._own else self._files.splits.description

    def class_info(self, source_id: str) -> ClassInfo:
        if self._own:
            return self._own_classes[source_id]
        return numbered_class(source_id, self._names) if self._numbered else super().class_info(source_id)

    @functools.cached_property
    def _columns(self) -> _Columns:
        if self._own:
            return _Columns("image", "labels", "example_id", "weights" if self._own.has_weights else "", "group")
        return _Columns(self._source.image_column, self._source.label_column, self._source.id_column)

    @functools.cached_property
    def _own(self) -> Manifest | None:
        """The manifest, if the folder is a corpus written by vitline."""
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
            raise ValueError(f"{self._files.uri} has several labels per image. Set source.single_label to false.")
        return manifest

    @functools.cached_property
    def _own_classes(self) -> dict[str, ClassInfo]:
        """Classes by source id, in the order of their label ids."""
        classes = ClassMap.from_file(self._files.store.read_json(CLASSES_KEY)).classes
        return {info.source_id: info for info in classes}

    @functools.cached_property
    def _label_of(self) -> Callable[[int], str]:
        if not self._own:
            return number_label
        return list(self._own_classes).__getitem__

    @functools.cached_property
    def _first_schema(self) -> pa.Schema | None:
        """Schema of the first readable file."""
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
                yield _File(self._files.store, listed.key, self._files.splits.of.get(listed.key))
            return
        for name in self._own.splits:
            for shard in known_shards(self._files.store, self._own, name):
                if shard.listed.key.startswith(f"{name}/"):  # not of a split that joins others
                    yield _File(open_store(shard.home), shard.listed.key, name, shard.num_rows, shard.listed)

    def _footers(self) -> "Iterator[tuple[_File, _Footer | Refusal]]":
        """Every file with its footer, several requests at a time."""
        files = self._listed()
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            while batch := [*itertools.islice(files, _FOOTERS_AT_ONCE)]:
                yield from zip(batch, pool.map(_footer_of, batch), strict=True)

    def _check(self, schema: pa.Schema, uri: str) -> None:
        for name in self._columns.named:
            if schema.names.count(name) != 1:
                raise ValueError(
                    f"{uri} has no column {name!r}, or several; its columns are {', '.join(schema.names)}. "
                    "Set image_column, label_column and id_column correctly."
                )
        kind = schema.field(self._columns.image).type
        if not _is_binary(kind) and not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
            raise ValueError(
                f"Column {self._columns.image!r} of {uri} is {kind}; expected binary, or a struct with a field 'bytes'. "
                "For a column of image locations, use the source kind 'table'."
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
            footer = _Footer(rows.schema, rows.num_rows, rows.num_bytes)
    except Refusal as error:
        return error
    if file.listed:
        open_shard(file.store, file.listed).close()
    return footer


def _checked_store(where: Mapping[str, Any]) -> Store:
    """The store of a part. A shard of a corpus written by vitline is compared again: it may have changed since it was listed."""
    store = open_store(where["base"])
    if listed := where.get("listed"):
        open_shard(store, ListedShard(**listed)).close()
    return store


class _Reader:
    """Converts rows of one file to examples."""

    def __init__(
        self, file: _File, columns: _Columns, label_of: Callable[[int], str], single_label: bool, rule: SplitRule
    ) -> None:
        self._file, self._columns, self._label_of = file, columns, label_of
        self._single_label, self._rule = single_label, rule
        self._id, self._uri = unicodedata.normalize("NFC", file.key), file.store.uri_of(file.key)

    def group(self, rows: ParquetRows, group: int, spill: Spill) -> Iterator[RawExample]:
        """The rows of one row group; after damage, one refusal for the rest of it."""
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
        split = self._rule.assign_split(example_id, self._file.split)
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
            split=self._rule.assign_split(group or example_id, self._file.split),
            group=group,
            weights=None if weights is None else tuple(weights),
            data=data,
            **spill.keep(data),
        )

    def _labels(self, value: Any, num_classes: int | None) -> tuple[str, ...]:
        numbers = value if isinstance(value, list) else [value]
        if num_classes is not None and any(isinstance(n, int) and n >= num_classes for n in numbers):
            raise ValueError(f"label {short(value)}, but only {num_classes} classes are declared")
        return distinct_labels(label_texts(value, self._label_of), self._single_label)


def _listed_row(value: Any, number: int, where: Mapping[str, Any]) -> RawExample:
    numbered = f"{where['key']}!{number}"
    try:
        example_id, refused = cell_text(value) or numbered, None
    except ValueError as error:
        example_id, refused = numbered, ("unreadable", str(error))
    return RawExample(example_id, (), "train", where["base"], f"{where['key']} row {number}", refused=refused)


def _image_bytes(cell: Any) -> bytes:
    if isinstance(cell_value(cell), dict):
        if cell["bytes"] is None and cell.get("path"):
            raise ValueError(
                f"the row has only the path {short(cell['path'])} of an image, but no bytes; images must be embedded"
            )
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
    """Class names declared by Hugging Face metadata for a column that is a ClassLabel or a list of them; else none."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        while isinstance(feature, list) or "feature" in feature:
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        names = feature["names"]
    except (KeyError, TypeError, ValueError, IndexError, RecursionError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []
