"""The manifest of a corpus: its splits, segments and row groups, and where each row stands.

With R rows per row group and G row groups per shard, row n of a segment is in its row group n // R, and row group g is in
shard g // G: locating a row needs no index.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import pyarrow as pa
from pydantic import NonNegativeInt, PositiveInt

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.shard_format.schema import shard_schema
from vitline.infra.config import digest_of
from vitline.infra.records import StoredRecord, UnreadableRecord, reading
from vitline.infra.storage import Store, checked_key, open_store

SCHEMA_VERSION = 2
MANIFEST_KEY, CLASSES_KEY = "manifest.json", "classes.json"
REJECTS_KEY, SHARDS_KEY, REPORT_KEY = "rejects.parquet", "shards.parquet", "report.html"
LEAKAGE_KEY = "leakage.parquet"
CARD_KEY = "README.md"


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

    @property
    def soft_labels(self) -> bool:
        """Whether the weights of the labels of an image are probabilities that sum to 1, as those that a model gave it."""
        source = self.provenance.get("request", {}).get("source", {})
        return self.has_weights and source.get("kind") == "predictions"

    @property
    def own_splits(self) -> dict[str, SplitInfo]:
        """The splits without those that join others, whose rows would count twice."""
        return {name: info for name, info in self.splits.items() if all(s.split == name for s in info.segments)}

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
    """The manifest of a finished corpus. Raises UnreadableRecord if there is none, if its schema version is not known, or if this
    version of vitline cannot read a field of it."""
    uri = corpus.uri_of(MANIFEST_KEY)
    try:
        found = corpus.read_json(MANIFEST_KEY)
    except FileNotFoundError as error:
        raise UnreadableRecord(
            f"There is no corpus at {corpus.uri}: {MANIFEST_KEY} is missing or no file, so it was never prepared or not finished. "
            "`vitline data ls` lists the corpora; `vitline data prepare` prepares one or resumes its preparation."
        ) from error
    except ValueError as error:
        raise UnreadableRecord(str(error)) from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise UnreadableRecord(
            f"{uri} has schema version {version}, but this code reads {SCHEMA_VERSION}. Use the version of vitline that "
            "wrote it, or prepare the corpus again."
        )
    with reading(uri):
        return Manifest.model_validate(found)


def load_class_names(corpus: Store) -> list[str]:
    """Class names of a corpus; the position is the label id. Raises RuntimeError if the corpus does not exist."""
    return [entry["name"] for entry in load_classes(corpus)]


def load_classes(corpus: Store) -> list[dict[str, Any]]:
    """The classes of a corpus, as its class map has them; the position is the label id. Raises RuntimeError if the corpus does not
    exist."""
    try:
        found: list[dict[str, Any]] = corpus.read_json(CLASSES_KEY)["classes"]
        return found
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
