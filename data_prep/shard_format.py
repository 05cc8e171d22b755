"""The contract between writer and readers of a corpus: Parquet schema, manifest, row-group arithmetic, row-group reader.

    <root>/corpora/<name>/<version>/<split>/<segment>/part-00000-of-00004.parquet, classes.json, manifest.json (last)

With R rows per row group and G row groups per shard, row n of a segment is in its row group n // R, and row group g is in
shard g // G: locating a row needs no index. `ShardReader` raises ShardError for a shard that does not match the manifest, or
whose identity, which it carries in its own Parquet metadata, is not that of the shard that the manifest lists.
Imports neither torch nor Ray.
"""

import functools
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import pyarrow as pa
from pydantic import ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from data_prep.decode import DecodePolicy
from data_prep.parquet_files import Footer, RowGroupFile, read_parquet
from infra.config import FrozenConfig, digest_of
from infra.records import StoredRecord, UnreadableRecord
from infra.storage import DiskCache, Store, checked_key, open_store

SCHEMA_VERSION = 2
"""1: shards without identity. 2: every shard carries its `ShardIdentity`. Both are read."""
_IDENTITY = "vitline"  # name of the entry in the Parquet metadata of a shard
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
        # Nullable, though never null: `datasets` ignores the declared Image feature of a non-nullable field.
        pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        *label_columns,
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("group", pa.string()),  # examples of one group share a split; null: no group
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


class SegmentInfo(StoredRecord):
    """Shards that were written together. Joined splits, such as trainval, list segments that other splits own."""

    split: str
    """The split whose folder holds the shards."""
    name: str
    num_rows: PositiveInt
    """Rows that belong to the split: the first rows of the stored ones."""
    num_shards: PositiveInt
    """Number of shards that were written, as their names say."""
    version: str = ""
    """Version of this corpus whose folder holds the shards. Empty: the version of the manifest."""
    rows_left_out: NonNegativeInt = 0
    """Stored rows after the last one that belongs to the split, as in a subset."""
    schema_version: PositiveInt = 1
    """Schema version of its shards: from 2 on each carries its identity. Manifests of version 1 do not have this field."""

    @property
    def stored_rows(self) -> int:
        return self.num_rows + self.rows_left_out


def first_rows(segments: Iterable[SegmentInfo], num_rows: int) -> tuple[SegmentInfo, ...]:
    """The segments that hold the first `num_rows` rows; all segments if there are fewer rows."""
    left, taken = num_rows, []
    for segment in segments:
        rows = min(left, segment.num_rows)
        if rows:
            taken.append(segment.model_copy(update={"num_rows": rows, "rows_left_out": segment.stored_rows - rows}))
        left -= rows
    return tuple(taken)


class SplitInfo(StoredRecord):
    """The rows of a split: segment after segment, R rows per row group, with fewer in the last group of each segment."""

    num_rows: PositiveInt
    rows_per_row_group: PositiveInt
    """R: rows of every row group but the last one of a segment."""
    row_groups_per_shard: PositiveInt
    segments: tuple[SegmentInfo, ...]
    digest: str
    """Digest of this split's rows, classes and layout. Scores on this split record it."""

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
        """Rows that shard `shard` of a segment holds."""
        rows_per_shard = self.rows_per_row_group * self.row_groups_per_shard
        return min(rows_per_shard, segment.stored_rows - shard * rows_per_shard)

    def shards_in_use(self, segment: SegmentInfo) -> int:
        """Number of shards of a segment, counted from the first, that hold rows of this split."""
        return -(-segment.num_rows // (self.rows_per_row_group * self.row_groups_per_shard))

    def keys_in_use(self) -> list[tuple[SegmentInfo, str]]:
        """Segment and key of every shard that holds rows of this split, in order."""
        return [(s, key) for s in self.segments for key in segment_keys(s)[: self.shards_in_use(s)]]

    def layout(self, shard_digests: Mapping[str, str]) -> dict[str, Any]:
        """What the digests of split and corpus cover; `shard_digests` gives the content digest for every shard key."""
        segments = [
            {
                "split": segment.split,
                "name": segment.name,
                "num_rows": segment.num_rows,
                "shards": [shard_digests[key] for key in segment_keys(segment)[: self.shards_in_use(segment)]],
            }
            for segment in self.segments
        ]
        rows, groups = self.rows_per_row_group, self.row_groups_per_shard
        return {"rows_per_row_group": rows, "row_groups_per_shard": groups, "segments": segments}

    def digest_over(self, class_map_digest: str, shard_digests: Mapping[str, str]) -> str:
        """Identity of the split, as `digest` records it."""
        return digest_of({"class_map": class_map_digest, "split": self.layout(shard_digests)})

    def _num_groups(self, segment: SegmentInfo) -> int:
        return -(-segment.num_rows // self.rows_per_row_group)


@dataclass(frozen=True)
class RowGroupLocation:
    """A row group: its shard, its index within the shard, its first row in the split and its number of rows."""

    segment: SegmentInfo
    shard: int
    group_in_shard: int
    first_row: int
    num_rows: int
    stored_rows: int
    """Rows of the row group in the file; the first `num_rows` of them belong to the split."""

    @property
    def key(self) -> str:
        """Key of the shard in `segment_store`."""
        return shard_key(self.segment.split, self.segment.name, self.shard, self.segment.num_shards)


class Counts(StoredRecord):
    """Number of examples found, accepted and refused; `num_refused` is the sum of `refused`, which counts by reason."""

    num_found: NonNegativeInt
    num_accepted: NonNegativeInt
    num_refused: NonNegativeInt
    num_bytes: NonNegativeInt
    """Bytes of the accepted images. For a subset, estimated in proportion to its rows."""
    refused: dict[str, NonNegativeInt]
    num_merged: NonNegativeInt = 0
    """Table rows that equal another row in every field: counted in `num_found`, but neither accepted nor refused."""


class CorpusVersion(TypedDict):
    """The version that a corpus was made from, in the provenance of its manifest."""

    version: str
    digest: str


class ViewOrigin(CorpusVersion):
    """What a subset was taken from."""

    split: str
    """The split of which it has the first rows."""
    take: int
    """Number of these rows."""
    without: NotRequired[list[str]]
    """Splits that the subset does not have."""


class Manifest(StoredRecord):
    """States that a corpus is complete, what it contains and where. Written last, never changed."""

    schema_version: int = SCHEMA_VERSION
    name: str
    version: str
    digest: str
    """Identity of the content, equal on every store and for any number of workers. Later runs record it."""
    class_map_digest: str
    num_classes: PositiveInt
    single_label: bool
    has_weights: bool = False
    order_seed: int
    splits: dict[str, SplitInfo]
    decode_policy: DecodePolicy
    counts: Counts
    provenance: dict[str, Any]
    """Not part of the digest: request, source, versions, times."""

    @property
    def view_of(self) -> ViewOrigin | None:
        """What a subset was taken from; None for any other corpus."""
        return self.provenance.get("view_of")

    @property
    def added_to(self) -> CorpusVersion | None:
        """The version that this corpus extends; None if it was prepared from sources alone."""
        return self.provenance.get("added_to")

    def arrow_schema(self) -> pa.Schema:
        """Schema of every shard."""
        return shard_schema(single_label=self.single_label, has_weights=self.has_weights)

    def split(self, name: str) -> SplitInfo:
        """The split of this name. Raises ValueError that lists the existing splits."""
        if name not in self.splits:
            raise ValueError(f"{self.name}/{self.version} has no split {name!r}; it has {', '.join(self.splits)}.")
        return self.splits[name]

    def mean_row_group_bytes(self, split: str) -> int:
        """Mean size of the encoded images of a row group of this split, rounded up."""
        rows = self.split(split).rows_per_row_group
        return -(-self.counts.num_bytes * rows // self.counts.num_accepted)


def shard_key(split: str, segment: str, index: int, count: int) -> str:
    """Key of a shard within its corpus; `split` is the one that owns the segment."""
    return f"{split}/{segment}/part-{index:05d}-of-{count:05d}.parquet"


def load_manifest(corpus: Store) -> Manifest:
    """The manifest of a finished corpus. Raises RuntimeError if there is none, and its subclass UnreadableRecord if its schema
    version is not known or it is damaged."""
    uri = corpus.uri_of(MANIFEST_KEY)
    try:
        found = corpus.read_json(MANIFEST_KEY)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"There is no corpus at {corpus.uri}: {MANIFEST_KEY} is missing, so it was never prepared or not finished. "
            "`vitline data ls` lists the corpora; `vitline data prep` prepares one or resumes its preparation."
        ) from error
    except ValueError as error:
        raise UnreadableRecord(str(error)) from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version not in range(1, SCHEMA_VERSION + 1):
        raise UnreadableRecord(
            f"{uri} has schema version {version}, but this code reads 1 to {SCHEMA_VERSION}. Use the version of vitline that "
            "wrote it, or prepare the corpus again."
        )
    try:
        return Manifest.model_validate(found)
    except ValidationError as error:
        raise UnreadableRecord(
            f"{uri} is damaged: {error}. Restore it, or delete it and prepare the corpus again."
        ) from error


def load_class_names(corpus: Store) -> list[str]:
    """Class names of a corpus; the position is the label id. Raises RuntimeError if the corpus does not exist."""
    try:
        return [entry["name"] for entry in corpus.read_json(CLASSES_KEY)["classes"]]
    except FileNotFoundError as error:
        raise RuntimeError(
            f"There is no corpus at {corpus.uri}: {CLASSES_KEY} is missing. `vitline data ls` lists the corpora."
        ) from error


def segment_store(corpus: Store, segment: SegmentInfo) -> Store:
    """The store that holds the shards of a segment: the corpus, or the version of it that wrote them. Raises ValueError for a
    version that leads out of the folder of the corpus, as in a manifest that vitline did not write."""
    if not segment.version:
        return corpus
    return open_store(f"{corpus.uri.rpartition('/')[0]}/{checked_key(segment.version)}")


def segment_keys(segment: SegmentInfo) -> list[str]:
    """Keys of the shards of a segment, in order, within `segment_store`."""
    return [shard_key(segment.split, segment.name, i, segment.num_shards) for i in range(segment.num_shards)]


class ShardError(RuntimeError):
    """A shard is missing, damaged or differs from the manifest."""

    def __init__(self, uri: str, found: str) -> None:
        super().__init__(
            f"{uri} {found}. `vitline data verify` lists every bad shard of the corpus. Restore them from a copy; or delete "
            "them and manifest.json, then run `vitline data prep` again, which writes only the missing shards."
        )
        self.uri, self.found = uri, found

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.uri, self.found)


class ShardIdentity(FrozenConfig):
    """What a shard states about itself in its own Parquet metadata, as JSON: which shard it is, and which rows it holds."""

    model_config = ConfigDict(extra="ignore")  # later versions may add fields

    corpus: str
    """Name of the corpus."""
    key: str
    """Split, segment and number of the shard: its key within the corpus."""
    content_digest: str
    data_bytes: NonNegativeInt
    """Bytes before the footer. It is wrong after a program has rewritten the rows and copied the metadata."""

    def as_metadata(self) -> dict[str, str]:
        """Key-value metadata for `ParquetWriter.add_key_value_metadata`."""
        return {_IDENTITY: json.dumps(self.model_dump(mode="json"), sort_keys=True)}


@dataclass(frozen=True, slots=True)  # a large corpus lists 100,000 of them
class ListedShard:
    """What the manifest and the shard list state about a shard."""

    corpus: str
    """Name of the corpus."""
    key: str
    """Key of the shard in `segment_store`."""
    content_digest: str
    num_bytes: int
    schema_version: int


def listed_shards(corpus: Store, manifest: Manifest, split: str) -> dict[str, ListedShard]:
    """Every shard in use of a split, by key, from the shard list of the corpus (one object, read whole).

    Raises ShardError if the list is missing, damaged, or differs from the digest of the split in the manifest.
    """
    uri, info = corpus.uri_of(SHARDS_KEY), manifest.split(split)
    try:
        with corpus.open(SHARDS_KEY) as file:
            table = read_parquet(file, ["key", "content_digest", "num_bytes"])
    except FileNotFoundError as error:
        raise ShardError(uri, "is missing") from error
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ShardError(uri, f"cannot be read as the shard list ({_one_line(error)})") from error
    lines = {key: (digest, size) for key, digest, size in zip(*(column.to_pylist() for column in table), strict=True)}
    keys = info.keys_in_use()
    if any(key not in lines for _, key in keys):
        raise ShardError(uri, f"does not list every shard of split {split!r}, which the manifest names")
    if info.digest_over(manifest.class_map_digest, {key: lines[key][0] for _, key in keys}) != info.digest:
        raise ShardError(uri, f"lists shards of split {split!r} whose digest differs from that in the manifest")
    return {key: ListedShard(manifest.name, key, *lines[key], segment.schema_version) for segment, key in keys}


class KnownShard(FrozenConfig):
    """A shard of a finished corpus, for tasks in other processes: where it is and what it must be."""

    home: str
    """URI of the store that holds it (`segment_store`)."""
    split: str
    listed: ListedShard
    num_rows: PositiveInt
    """Rows that belong to the split: the first rows of the shard."""


def known_shards(corpus: Store, manifest: Manifest, split: str) -> list[KnownShard]:
    """Every shard in use of a split, in order. Raises as `listed_shards`."""
    info, listed, shards = manifest.split(split), listed_shards(corpus, manifest, split), list[KnownShard]()
    for segment in info.segments:
        home, left = segment_store(corpus, segment).uri, segment.num_rows
        for number, key in enumerate(segment_keys(segment)[: info.shards_in_use(segment)]):
            num_rows = min(left, info.shard_rows(segment, number))
            shards.append(KnownShard(home=home, split=split, listed=listed[key], num_rows=num_rows))
            left -= num_rows
    return shards


# Footers of 10,000 to 20,000 shards. Those of further shards are read again when they are needed.
_FOOTER_BYTES = 64 * 2**20


class ShardReader:
    """Reads row groups of one split, each with one range request. Thread-safe.

    The shard list of the corpus is read before the first shard. A shard is compared with it at its first read; its footer is
    kept. Row groups and footers go through `cache`, if there is one and the store is not on this machine (`reads_wait`).
    """

    def __init__(
        self,
        corpus: Store,
        manifest: Manifest,
        split: str,
        footer_bytes: int = _FOOTER_BYTES,
        cache: DiskCache | None = None,
    ) -> None:
        self._schema, self._budget = manifest.arrow_schema(), footer_bytes
        self._cache = cache if corpus.reads_wait else None
        self.split: SplitInfo = manifest.split(split)
        self._read_list = functools.partial(listed_shards, corpus, manifest, split)
        self._listed: dict[str, ListedShard] | None = None
        self._list_lock = threading.Lock()
        self._homes = {segment.version: segment_store(corpus, segment) for segment in self.split.segments}
        self._footers: OrderedDict[str, Footer] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def row_group(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Row group `index`, counted over all segments, with all columns or the named ones ("image", "labels", "label"...).

        Raises IndexError, and ShardError if the shard is missing, is another shard than the manifest lists, or if its schema,
        rows or page checksums differ.
        """
        return self.row_groups(range(index, index + 1), columns)[0]

    def row_groups(self, indices: range, columns: Sequence[str] | None = None) -> list[pa.Table]:
        """Neighbouring row groups, those of a shard with one range request: for corpora of small row groups, as each request waits for the
        store. It reads all that lies between the columns. Raises as `row_group`."""
        tables: list[pa.Table] = []
        for _, of_shard in itertools.groupby(map(self.split.place, indices), self._uri):
            locations = list(of_shard)
            try:
                tables += self._read(locations, columns, self._cache)
            except ShardError:
                if self._cache is None:
                    raise
                # The cache may hold the footer of an earlier file of equal size and rows. The store alone says what is damaged.
                self._forget(locations[0], self._cache)
                tables += self._read(locations, columns, None)
        return tables

    def _read(
        self, locations: Sequence[RowGroupLocation], columns: Sequence[str] | None, cache: DiskCache | None
    ) -> list[pa.Table]:
        """Neighbouring row groups of one shard."""
        first, tables = locations[0], list[pa.Table]()
        # Without the cache, not the kept footer either: another thread may have taken it from the cache meanwhile.
        footer = (self._kept(first) if cache is self._cache else None) or self._open(first, cache)
        end = footer.byte_range(locations[-1].group_in_shard, columns)[1]
        read = _RangeReader(self._store(first), self._listing()[first.key], footer, cache, end)
        for location in locations:
            try:
                table = footer.row_group(location.group_in_shard, columns, read)
            except FileNotFoundError as error:
                raise ShardError(self._uri(location), "is missing") from error
            except (OSError, pa.ArrowException) as error:
                # Parquet raises OSError for a page whose checksum differs.
                raise ShardError(self._uri(location), f"has a damaged page ({_one_line(error)})") from error
            if table.num_rows != location.stored_rows:
                found = f"holds {table.num_rows} rows in row group {location.group_in_shard}, expected {location.stored_rows}"
                raise ShardError(self._uri(location), found)
            tables.append(table.slice(0, location.num_rows))
        read.keep()
        return tables

    def close(self) -> None:
        """Forget the footers."""
        with self._lock:
            self._footers.clear()
            self._num_bytes = 0

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _store(self, location: RowGroupLocation) -> Store:
        return self._homes[location.segment.version]

    def _uri(self, location: RowGroupLocation) -> str:
        return self._store(location).uri_of(location.key)

    def _kept(self, location: RowGroupLocation) -> Footer | None:
        with self._lock:
            footer = self._footers.get(self._uri(location))
            if footer is not None:
                self._footers.move_to_end(self._uri(location))
            return footer

    def _open(self, location: RowGroupLocation, cache: DiskCache | None) -> Footer:
        """The footer of a shard that is what the manifest says, from the cache or the store. It is kept."""
        place = self._place_of_footer(location)
        cached = cache.get(*place) if cache else None
        footer = self._checked_footer(location) if cached is None else Footer(cached)
        if cache and cached is None:
            cache.put(*place, footer.data)
        with self._lock:
            if (earlier := self._footers.pop(self._uri(location), None)) is not None:
                self._num_bytes -= earlier.num_bytes
            self._footers[self._uri(location)] = footer
            self._num_bytes += footer.num_bytes
            while self._num_bytes > self._budget and len(self._footers) > 1:
                self._num_bytes -= self._footers.popitem(last=False)[1].num_bytes
        return footer

    def _checked_footer(self, location: RowGroupLocation) -> Footer:
        num_rows, size = self.split.shard_rows(location.segment, location.shard), self.split.rows_per_row_group

        def check(file: RowGroupFile) -> None:
            check_shard(file, self._uri(location), self._schema, size, num_rows)

        with open_shard(self._store(location), self._listing()[location.key], check) as file:
            return file.footer()

    def _place_of_footer(self, location: RowGroupLocation) -> tuple[str, str]:
        """Namespace and key in the cache: all that a footer is compared with before it gets there."""
        listed, num_rows = self._listing()[location.key], self.split.shard_rows(location.segment, location.shard)
        expected = [self._schema.to_string(truncate_metadata=False), num_rows, self.split.rows_per_row_group]
        stated = [listed.corpus, listed.content_digest, listed.num_bytes, listed.schema_version]
        return _cache_namespace(self._store(location)), digest_of([self._uri(location), stated, expected])

    def _forget(self, location: RowGroupLocation, cache: DiskCache) -> None:
        with self._lock:
            if (footer := self._footers.pop(self._uri(location), None)) is not None:
                self._num_bytes -= footer.num_bytes
        cache.discard(*self._place_of_footer(location))

    def _listing(self) -> dict[str, ListedShard]:
        with self._list_lock:
            if self._listed is None:
                self._listed = self._read_list()
            return self._listed


class _RangeReader:
    """Reads ranges of a shard, in ascending order, from the cache, or else from its store, from where it then reads on to `end`."""

    def __init__(self, home: Store, listed: ListedShard, footer: Footer, cache: DiskCache | None, end: int) -> None:
        self._home, self._listed, self._footer, self._cache, self._end = home, listed, footer, cache, end
        self._held, self._held_from = b"", 0
        self._unverified: list[tuple[str, bytes]] = []

    def __call__(self, start: int, end: int) -> bytes:
        # The rows of a shard follow from its content digest; where their bytes are, from its footer.
        key = digest_of([self._listed.content_digest, self._footer.digest, start, end])
        cached = self._cache.get(_cache_namespace(self._home), key) if self._cache else None
        if cached is not None:
            return cached
        if end > self._held_from + len(self._held):
            self._held, self._held_from = self._home.read(self._listed.key, start, max(end, self._end)), start
        data = self._held[start - self._held_from : end - self._held_from]
        self._unverified.append((key, data))
        return data

    def keep(self) -> None:
        """Caches what came from the store. Call it once the rows have been read, which verifies the page checksums."""
        if self._cache is not None:
            for key, data in self._unverified:
                self._cache.put(_cache_namespace(self._home), key, data)


def _cache_namespace(home: Store) -> str:
    """Name in the cache of the corpus version that wrote a shard."""
    return digest_of(home.uri)[:16]


def open_shard(
    home: Store, listed: ListedShard, check: Callable[[RowGroupFile], object] = lambda file: None
) -> RowGroupFile:
    """Open a shard in its `segment_store`, with verification of page checksums. The only way to open one: it is compared with
    what its manifest and shard list state. Raises ShardError if it is missing, damaged or another shard.

    `check` looks at the file before its digest and size are compared, so that what it raises is reported first.
    """
    uri = home.uri_of(listed.key)
    try:
        handle = home.open(listed.key)
    except FileNotFoundError as error:
        raise ShardError(uri, "is missing") from error
    try:
        file = RowGroupFile(handle)
    except (OSError, pa.ArrowException) as error:
        handle.close()
        raise ShardError(uri, f"is truncated or not Parquet ({_one_line(error)})") from error
    try:
        _check_key(file, uri, listed.key)
        check(file)
        _check_identity(file, uri, listed)
    except BaseException:
        file.close()
        raise
    return file


def check_shard(file: RowGroupFile, uri: str, schema: pa.Schema, rows_per_row_group: int, num_rows: int) -> None:
    """Compare the footer of a shard with the expected schema and row counts. Raises ShardError."""
    if not file.schema.equals(schema):
        found = ", ".join(f"{field.name}: {field.type}" for field in file.schema)
        raise ShardError(uri, f"has columns that differ from the manifest: {found}")
    if file.metadata.num_rows != num_rows:
        raise ShardError(uri, f"holds {file.metadata.num_rows:,} rows, but the manifest lists {num_rows:,}")
    num_groups = -(-num_rows // rows_per_row_group)
    if file.metadata.num_row_groups != num_groups:
        found = f"holds {file.metadata.num_row_groups:,} row groups, but {num_groups:,}"
        raise ShardError(uri, f"{found} of {rows_per_row_group} rows are expected")


def _check_identity(file: RowGroupFile, uri: str, listed: ListedShard) -> None:
    """Compare what a shard states about itself with what manifest and shard list state. Raises ShardError.

    A shard of schema version 1 states nothing; of it the size is compared.
    """
    found = _identity_of(file, uri)
    if found is None:
        if listed.schema_version > 1:
            raise ShardError(uri, "states no identity, but was written with one: another program rewrote it")
        if file.num_bytes != listed.num_bytes:
            sizes = f"has {file.num_bytes:,} bytes, but the shard list says {listed.num_bytes:,}"
            raise ShardError(uri, f"{sizes}: it was swapped or rewritten")
    elif found.corpus != listed.corpus:
        raise ShardError(uri, f"is a shard of the corpus {found.corpus}, but the manifest is that of {listed.corpus}")
    elif found.content_digest != listed.content_digest:
        digests = f"states the content digest {found.content_digest[:12]}, but the shard list says"
        raise ShardError(uri, f"{digests} {listed.content_digest[:12]}: it was swapped or rewritten")
    elif found.data_bytes != file.data_bytes:
        sizes = f"holds {file.data_bytes:,} bytes of rows, but states that {found.data_bytes:,} were written"
        raise ShardError(uri, f"{sizes}: another program rewrote it")


def _check_key(file: RowGroupFile, uri: str, key: str) -> None:
    if (found := _identity_of(file, uri)) and found.key != key:
        stated = f"states that it is {found.key} of the corpus {found.corpus}, with {file.metadata.num_rows:,} rows"
        raise ShardError(uri, f"{stated}, but the manifest lists {key} here: shards were swapped or copied")


def _identity_of(file: RowGroupFile, uri: str) -> ShardIdentity | None:
    """What a shard states about itself; None for a shard of schema version 1, and for one that other programs rewrote."""
    text = (file.metadata.metadata or {}).get(_IDENTITY.encode())
    try:
        return None if text is None else ShardIdentity.model_validate_json(text)
    except ValidationError as error:
        raise ShardError(uri, f"states an identity that cannot be read ({_one_line(error)})") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def read_row_group(corpus: Store, split: str, manifest: Manifest, row_group: int) -> pa.Table:
    """Read one row group; to read many, use `ShardReader`. Raises as `ShardReader.row_group`."""
    with ShardReader(corpus, manifest, split) as reader:
        return reader.row_group(row_group)
