"""The contract between the writer of a corpus and its readers: Parquet schema, manifest, arithmetic, row-group reader.

    <root>/corpora/<name>/<version>/<split>/<segment>/part-00000-of-00004.parquet, classes.json, manifest.json (last)

Row n of a segment is in row group n // R of it, row group g in shard g // G (DESIGN 3.1): finding a row reads no list.
`ShardReader` refuses a shard that is not what the manifest says, by name. Imports neither torch nor Ray.
"""

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from data_prep.decode import DecodePolicy
from infra.config import FrozenConfig
from infra.storage import Store, open_store

SCHEMA_VERSION = 1
MANIFEST_KEY, CLASSES_KEY = "manifest.json", "classes.json"
REJECTS_KEY, SHARDS_KEY, REPORT_KEY = "rejects.parquet", "shards.parquet", "report.html"
LEAKAGE_KEY = "leakage.parquet"
CARD_KEY = "README.md"


def shard_schema(*, single_label: bool, has_weights: bool) -> pa.Schema:
    """Columns of every shard of a corpus, with the Hugging Face `Image` feature declared in the metadata."""
    label_columns: list[pa.Field] = [pa.field("labels", pa.list_(pa.int32()), nullable=False)]
    if single_label:
        label_columns.append(pa.field("label", pa.int32(), nullable=False))
    if has_weights:
        label_columns.append(pa.field("weights", pa.list_(pa.float32()), nullable=False))
    fields = [
        # Nullable, though never null: `datasets` overlooks the declared Image feature of any other field.
        pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        *label_columns,
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("group", pa.string()),  # what shares a split with this example; null: nothing does
        pa.field("sha256", pa.binary(), nullable=False),
        pa.field("pixel_sha256", pa.binary(), nullable=False),
        pa.field("phash", pa.binary(), nullable=False),
        pa.field("phash_mirror", pa.binary(), nullable=False),
        pa.field("width_px", pa.int32(), nullable=False),
        pa.field("height_px", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
    features = {field.name: _huggingface_feature(field) for field in fields}
    return pa.schema(fields, metadata={b"huggingface": json.dumps({"info": {"features": features}}).encode()})


def _huggingface_feature(field: pa.Field) -> dict[str, Any]:
    if field.name == "image":
        return {"_type": "Image"}
    if pa.types.is_list(field.type):
        return {"feature": {"dtype": str(field.type.value_type), "_type": "Value"}, "_type": "Sequence"}
    return {"dtype": str(field.type), "_type": "Value"}


class SegmentInfo(FrozenConfig):
    """A run of shards written at once. A view split lists segments that another split owns."""

    split: str
    """The split whose folder holds the shards."""
    name: str
    num_rows: PositiveInt
    """Rows that belong to the split: the first of those that are stored."""
    num_shards: PositiveInt
    """Shards that were written, as their names say."""
    version: str = ""
    """The version of this corpus whose folder holds the shards; empty: the manifest's own."""
    rows_left_out: NonNegativeInt = 0
    """Rows stored behind the last one that belongs to the split, as in a view on the first rows."""

    @property
    def stored_rows(self) -> int:
        return self.num_rows + self.rows_left_out


def first_rows(segments: Iterable[SegmentInfo], num_rows: int) -> tuple[SegmentInfo, ...]:
    """What a view on the first rows of a split lists; fewer rows where there are no more."""
    left, shown = num_rows, []
    for segment in segments:
        rows = min(left, segment.num_rows)
        if rows:
            shown.append(segment.model_copy(update={"num_rows": rows, "rows_left_out": segment.stored_rows - rows}))
        left -= rows
    return tuple(shown)


class SplitInfo(FrozenConfig):
    """Where the rows of a split stand: segment after segment, R to a row group, the last of each segment excepted."""

    num_rows: PositiveInt
    rows_per_row_group: PositiveInt
    """R of DESIGN 3.1."""
    row_groups_per_shard: PositiveInt
    segments: tuple[SegmentInfo, ...]
    digest: str
    """Of this split's rows, classes and layout; what a score of this split carries."""

    @property
    def num_row_groups(self) -> int:
        return sum(self._num_groups(segment) for segment in self.segments)

    def place(self, row_group: int) -> "RowGroupLocation":
        """Shard and rows of a row group, counted from 0 over all segments. Raises IndexError."""
        if row_group < 0:
            raise IndexError(f"row group {row_group} of {self.num_row_groups}")
        group, first_row = row_group, 0
        for segment in self.segments:
            num_groups = self._num_groups(segment)
            if group < num_groups:
                start = group * self.rows_per_row_group
                shard, group_in_shard = divmod(group, self.row_groups_per_shard)
                rows = min(self.rows_per_row_group, segment.num_rows - start)
                stored = min(self.rows_per_row_group, segment.stored_rows - start)
                return RowGroupLocation(segment, shard, group_in_shard, first_row + start, rows, stored)
            group, first_row = group - num_groups, first_row + segment.num_rows
        raise IndexError(f"row group {row_group} of {self.num_row_groups}")

    def shard_rows(self, segment: SegmentInfo, shard: int) -> int:
        """Rows that shard number `shard` of a segment holds."""
        rows_per_shard = self.rows_per_row_group * self.row_groups_per_shard
        return min(rows_per_shard, segment.stored_rows - shard * rows_per_shard)

    def shards_in_use(self, segment: SegmentInfo) -> int:
        """How many shards of a segment hold rows of this split, from the first on."""
        return -(-segment.num_rows // (self.rows_per_row_group * self.row_groups_per_shard))

    def _num_groups(self, segment: SegmentInfo) -> int:
        return -(-segment.num_rows // self.rows_per_row_group)


@dataclass(frozen=True)
class RowGroupLocation:
    """A row group: its shard, its number inside the shard, its first row in the split and how many rows it holds."""

    segment: SegmentInfo
    shard: int
    group_in_shard: int
    first_row: int
    num_rows: int
    stored_rows: int
    """Rows that the row group holds in the file, of which the first `num_rows` belong to the split."""

    @property
    def key(self) -> str:
        """Key of the shard below `segment_store`."""
        return shard_key(self.segment.split, self.segment.name, self.shard, self.segment.num_shards)


class Counts(FrozenConfig):
    """How many examples were found and what became of them; `num_refused` is the sum of `refused`, by reason."""

    num_found: NonNegativeInt
    num_accepted: NonNegativeInt
    num_refused: NonNegativeInt
    num_bytes: NonNegativeInt
    """Of the accepted images; in a view on some rows, their share of it."""
    refused: dict[str, NonNegativeInt]
    num_merged: NonNegativeInt = 0
    """Rows of a table that repeat another one in everything, found but neither accepted nor refused."""


class Manifest(FrozenConfig):
    """Says that a corpus is whole, what is in it and how to find it. Written last, never changed."""

    schema_version: int = SCHEMA_VERSION
    name: str
    version: str
    digest: str
    """Identity of the content, equal on every store and for every parallelism; every later run carries it."""
    class_map_digest: str
    num_classes: PositiveInt
    single_label: bool
    has_weights: bool = False
    order_seed: int
    splits: dict[str, SplitInfo]
    decode_policy: DecodePolicy
    counts: Counts
    provenance: dict[str, Any]
    """Beside the digest, not in it: request, source, versions, times."""

    def arrow_schema(self) -> pa.Schema:
        """Of every shard."""
        return shard_schema(single_label=self.single_label, has_weights=self.has_weights)

    def split(self, name: str) -> SplitInfo:
        """Raises ValueError naming the splits there are."""
        if name not in self.splits:
            raise ValueError(f"{self.name}/{self.version} has no split {name!r}; it has {', '.join(self.splits)}.")
        return self.splits[name]


def shard_key(split: str, segment: str, index: int, count: int) -> str:
    """Key of a shard below its corpus; `split` is the one that owns the segment."""
    return f"{split}/{segment}/part-{index:05d}-of-{count:05d}.parquet"


def load_manifest(corpus: Store) -> Manifest:
    """The manifest of a finished corpus. Raises RuntimeError where there is none or it is of another schema version."""
    uri = corpus.uri_of(MANIFEST_KEY)
    try:
        found = corpus.read_json(MANIFEST_KEY)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"There is no corpus at {corpus.uri}: {MANIFEST_KEY} is absent, so it was never prepared or not finished. "
            "`vitline data ls` lists what there is; `vitline data prep` makes one or goes on where it stopped."
        ) from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise RuntimeError(f"{uri} has schema version {version}, this code reads {SCHEMA_VERSION}. Prepare it again.")
    try:
        return Manifest.model_validate(found)
    except ValidationError as error:
        raise RuntimeError(
            f"{uri} is damaged: {error}. Restore it, or delete it and prepare the corpus again."
        ) from error


def load_class_names(corpus: Store) -> list[str]:
    """Class names of a corpus; the position is the label id. Raises RuntimeError where the corpus does not exist."""
    try:
        return [entry["name"] for entry in corpus.read_json(CLASSES_KEY)["classes"]]
    except FileNotFoundError as error:
        raise RuntimeError(f"There is no corpus at {corpus.uri}: {CLASSES_KEY} is absent.") from error


def segment_store(corpus: Store, segment: SegmentInfo) -> Store:
    """Where the shards of a segment lie: in the corpus, or in the version of it that wrote them."""
    return open_store(f"{corpus.uri.rpartition('/')[0]}/{segment.version}") if segment.version else corpus


def segment_keys(segment: SegmentInfo) -> list[str]:
    """Keys of the shards of a segment, in order, below `segment_store`."""
    return [shard_key(segment.split, segment.name, i, segment.num_shards) for i in range(segment.num_shards)]


class ShardError(RuntimeError):
    """A shard is missing, damaged or not the one that the manifest lists."""

    def __init__(self, uri: str, found: str) -> None:
        super().__init__(
            f"{uri} {found}. `vitline data verify` lists every bad shard of the corpus; restore them from a copy, or "
            "delete them and manifest.json and run `vitline data prep` again: only what is missing is written again."
        )
        self.uri, self.found = uri, found

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.uri, self.found)


class ShardReader:
    """Row groups of one split. Safe in threads: a file is used by one at a time.

    At most `max_open_files` files stay open between reads.
    """

    def __init__(self, corpus: Store, manifest: Manifest, split: str, max_open_files: int = 32) -> None:
        self._schema, self._max_open = manifest.arrow_schema(), max_open_files
        self.split: SplitInfo = manifest.split(split)
        self._homes = {segment.version: segment_store(corpus, segment) for segment in self.split.segments}
        self._idle: OrderedDict[str, list[pq.ParquetFile]] = OrderedDict()
        self._lock = threading.Lock()

    def row_group(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Row group `index`, counted over all segments: all columns or those named ("image", "labels", "label"...).

        Raises IndexError, and ShardError where the shard is missing, or its schema, rows or page checksums differ.
        """
        place = self.split.place(index)
        with self._file(place) as file:
            try:
                table = file.read_row_group(
                    place.group_in_shard, columns=None if columns is None else list(columns), use_threads=False
                )
            except (OSError, pa.ArrowException) as error:
                # OSError is what Parquet raises for a page whose checksum differs
                raise ShardError(self._uri(place), f"has a damaged page ({_one_line(error)})") from error
        if table.num_rows != place.stored_rows:
            found = f"holds {table.num_rows} rows in row group {place.group_in_shard}, expected {place.stored_rows}"
            raise ShardError(self._uri(place), found)
        return table.slice(0, place.num_rows)

    def close(self) -> None:
        """Close the files that no thread is reading."""
        with self._lock:
            files = [file for idle in self._idle.values() for file in idle]
            self._idle.clear()
        for file in files:
            file.close(force=True)  # without, pyarrow leaves open what it was handed open

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _store(self, place: RowGroupLocation) -> Store:
        return self._homes[place.segment.version]

    def _uri(self, place: RowGroupLocation) -> str:
        return self._store(place).uri_of(place.key)

    @contextlib.contextmanager
    def _file(self, place: RowGroupLocation) -> Iterator[pq.ParquetFile]:
        uri = self._uri(place)
        with self._lock:
            idle = self._idle.get(uri)
            file = idle.pop() if idle else None
        if file is None:
            file = self._open(place)
        try:
            yield file
        except BaseException:
            file.close(force=True)
            raise
        self._put_back(uri, file)

    def _put_back(self, uri: str, file: pq.ParquetFile) -> None:
        with self._lock:
            self._idle.setdefault(uri, []).append(file)
            self._idle.move_to_end(uri)
            surplus = []
            while sum(map(len, self._idle.values())) > self._max_open:
                oldest = next(name for name, idle in self._idle.items() if idle)
                surplus.append(self._idle[oldest].pop())
            for name in [name for name, idle in self._idle.items() if not idle]:
                del self._idle[name]
        for old in surplus:
            old.close(force=True)

    def _open(self, place: RowGroupLocation) -> pq.ParquetFile:
        uri = self._uri(place)
        file = open_shard(self._store(place), place.key)
        try:
            num_rows = self.split.shard_rows(place.segment, place.shard)
            check_shard(file, uri, self._schema, self.split.rows_per_row_group, num_rows)
        except ShardError:
            file.close(force=True)
            raise
        return file


def open_shard(corpus: Store, key: str) -> pq.ParquetFile:
    """A shard opened for reading with its page checksums checked. Raises ShardError."""
    try:
        handle = corpus.open(key)
    except FileNotFoundError as error:
        raise ShardError(corpus.uri_of(key), "is missing") from error
    try:
        return pq.ParquetFile(pa.PythonFile(handle, mode="r"), page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        handle.close()
        raise ShardError(corpus.uri_of(key), f"is cut short or not Parquet ({_one_line(error)})") from error


def check_shard(file: pq.ParquetFile, uri: str, schema: pa.Schema, rows_per_row_group: int, num_rows: int) -> None:
    """Compare the footer of a shard with the schema and row counts that it should have. Raises ShardError."""
    if not file.schema_arrow.equals(schema):
        found = ", ".join(f"{field.name}: {field.type}" for field in file.schema_arrow)
        raise ShardError(uri, f"has other columns than the manifest asks for: {found}")
    if file.metadata.num_rows != num_rows:
        raise ShardError(uri, f"holds {file.metadata.num_rows:,} rows, but the manifest lists {num_rows:,}")
    num_groups = -(-num_rows // rows_per_row_group)
    if file.metadata.num_row_groups != num_groups:
        found = f"holds {file.metadata.num_row_groups:,} row groups, but {num_groups:,}"
        raise ShardError(uri, f"{found} of {rows_per_row_group} rows were expected")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def read_row_group(corpus: Store, split: str, manifest: Manifest, row_group: int) -> pa.Table:
    """One row group; for many, keep a `ShardReader`. Raises as `ShardReader.row_group`."""
    with ShardReader(corpus, manifest, split) as reader:
        return reader.row_group(row_group)
