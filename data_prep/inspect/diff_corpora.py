"""Which examples differ between two corpora, by their ids. Images are not read.

Both are read once and dealt into buckets on this machine's disk, which are compared one by one: memory does not grow
with the corpora, and neither has to be in the order of the other. Shards that both list are not read at all.
"""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.labels.classes import ClassMap
from data_prep.partitions import bucket_of, read_partition, write_partitions
from data_prep.records import read_table
from data_prep.shard_format import (
    CLASSES_KEY,
    SHARDS_KEY,
    Manifest,
    ShardReader,
    SplitInfo,
    load_manifest,
    segment_keys,
)
from data_prep.splits import order_key
from infra.storage import Store, open_store

ChangeKind = Literal["added", "removed", "relabelled", "moved", "changed_bytes"]
_ROWS_AT_ONCE = 500_000  # of some 100 bytes: what a bucket, and a file of buckets, holds
_READ_THREADS, _GROUPS_AT_ONCE = 8, 64
_ROW_SCHEMA = pa.schema(
    [
        pa.field("place", pa.uint64()),  # the same for one id in both corpora, whatever their order seeds
        pa.field("example_id", pa.string()),
        pa.field("sha256", pa.binary()),
        pa.field("labels", pa.string()),
        pa.field("split", pa.string()),
    ]
)


class Change(NamedTuple):
    """One example that differs, and what it is in each corpus: labels, split or sha256; None where it lacks it."""

    example_id: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Changes:
    """How many examples differ in one way, and some of them, the same at every call."""

    count: int
    first: tuple[Change, ...]


class ExampleDiff(NamedTuple):
    """Examples that only one corpus has, or that both have with other labels (or weights), split or bytes."""

    num_common: int
    """Examples in both corpora, equal or not."""
    changes: dict[ChangeKind, Changes]


class _Corpus:
    """One side of the comparison."""

    def __init__(self, store: Store) -> None:
        self.store, self.manifest = store, load_manifest(store)
        self.source_ids = ClassMap.model_validate({"classes": store.read_json(CLASSES_KEY)["classes"]}).source_ids

    @property
    def own_splits(self) -> dict[str, SplitInfo]:
        """Without those that are others put together."""
        return {
            name: info
            for name, info in self.manifest.splits.items()
            if all(segment.split == name for segment in info.segments)
        }

    @property
    def num_rows(self) -> int:
        return sum(split.num_rows for split in self.own_splits.values())

    def whole_shards(self) -> dict[tuple[str, str], int]:
        """Key and content digest of every shard all of whose rows belong to the corpus, and how many."""
        lines = read_table(self.store, SHARDS_KEY).to_pylist()
        digests = {line["key"]: line["content_digest"] for line in lines}
        return {
            (key, digests[key]): split.shard_rows(segment, i)
            for split in self.own_splits.values()
            for segment in split.segments
            for i, key in enumerate(segment_keys(segment)[: split.shards_in_use(segment)])
            if i * split.rows_per_row_group * split.row_groups_per_shard + split.shard_rows(segment, i)
            <= segment.num_rows
        }


def diff_examples(a: Store, b: Store, num_named: int = 20, rows_at_once: int = _ROWS_AT_ONCE) -> ExampleDiff:
    """What became of the examples from corpus `a` to corpus `b`; labels are compared by their source ids.

    Needs some 100 bytes an example of temporary disk. Raises RuntimeError where a corpus does not exist, ShardError
    where a shard is not what its manifest says.
    """
    sides = (_Corpus(a), _Corpus(b))
    shared = _shared_shards(*sides)
    skipped = frozenset(key for key, _ in shared)
    num_buckets = max(1, *(-(-side.num_rows // rows_at_once) for side in sides))
    found = _Found(num_named)
    with tempfile.TemporaryDirectory(prefix="vitline-diff-") as folder:
        work = open_store(folder)
        files = [_deal(side, f"{i}", skipped, num_buckets, rows_at_once, work) for i, side in enumerate(sides)]
        for bucket in range(num_buckets):
            found.compare(*(read_partition(work, keys, bucket, _ROW_SCHEMA) for keys in files))
    return found.result(sum(shared.values()))


def _shared_shards(a: _Corpus, b: _Corpus) -> dict[tuple[str, str], int]:
    """Shards that say the same in both corpora. A shard holds label ids: they have to be the same classes."""
    common = min(len(a.source_ids), len(b.source_ids))
    if a.source_ids[:common] != b.source_ids[:common]:
        return {}
    theirs = b.whole_shards()
    return {shard: num_rows for shard, num_rows in a.whole_shards().items() if shard in theirs}


def _deal(
    side: _Corpus, name: str, skipped: frozenset[str], num_buckets: int, rows_at_once: int, work: Store
) -> list[str]:
    """The keys of files that hold the rows of a corpus by buckets."""
    keys: list[str] = []
    waiting: list[pa.Table] = []

    def write() -> None:
        rows = pa.concat_tables(waiting)
        keys.append(f"{name}/{len(keys):06d}")
        write_partitions(work, keys[-1], rows, bucket_of(rows["place"].to_numpy(), num_buckets), num_buckets)
        waiting.clear()

    for table in _rows(side, skipped):
        waiting.append(table)
        if sum(map(len, waiting)) >= rows_at_once:
            write()
    if waiting:
        write()
    return keys


def _rows(side: _Corpus, skipped: frozenset[str]) -> Iterator[pa.Table]:
    """The rows of a corpus as _ROW_SCHEMA, row group by row group."""
    columns = ["example_id", "sha256", "labels", *(["weights"] if side.manifest.has_weights else [])]
    for name, split in side.own_splits.items():
        groups = [group for group in range(split.num_row_groups) if split.place(group).key not in skipped]
        with ShardReader(side.store, side.manifest, name) as reader, ThreadPoolExecutor(_READ_THREADS) as threads:
            for i in range(0, len(groups), _GROUPS_AT_ONCE):
                for table in threads.map(lambda g: reader.row_group(g, columns), groups[i : i + _GROUPS_AT_ONCE]):
                    yield _row_table(table, name, side)


def _row_table(table: pa.Table, split: str, side: _Corpus) -> pa.Table:
    places = [order_key(0, example_id) for example_id in table["example_id"].to_pylist()]
    columns = {
        "place": pa.array(places, pa.uint64()),
        "example_id": table["example_id"],
        "sha256": table["sha256"],
        "labels": pa.array(_label_texts(table, side.manifest, side.source_ids), pa.string()),
        "split": pa.repeat(split, len(table)),
    }
    return pa.table(columns).cast(_ROW_SCHEMA)


def _label_texts(table: pa.Table, manifest: Manifest, source_ids: Sequence[str]) -> list[str]:
    """Labels by their source ids, and with their weights, as one text; the order of several means nothing."""
    if not manifest.has_weights:
        return [", ".join(sorted(source_ids[i] for i in labels)) for labels in table["labels"].to_pylist()]
    rows = zip(table["labels"].to_pylist(), table["weights"].to_pylist(), strict=True)
    return [
        ", ".join(sorted(f"{source_ids[i]}:{w:g}" for i, w in zip(labels, weights, strict=True)))
        for labels, weights in rows
    ]


class _Found:
    """Counts differences bucket by bucket. Buckets come in the order of `place`, so the first found are the first."""

    def __init__(self, num_named: int) -> None:
        self._num_named, self._num_common = num_named, 0
        self._counts: dict[ChangeKind, int] = dict.fromkeys(get_args(ChangeKind), 0)
        self._first: dict[ChangeKind, list[Change]] = {kind: [] for kind in self._counts}

    def compare(self, ours: pa.Table, theirs: pa.Table) -> None:
        """All rows of one bucket, of both corpora."""
        place = pc.index_in(ours["example_id"], theirs["example_id"].combine_chunks())
        before, after = ours.filter(pc.is_valid(place)), theirs.take(place.drop_null())
        self._num_common += len(before)
        new = theirs.filter(pc.invert(pc.is_in(theirs["example_id"], ours["example_id"].combine_chunks())))
        self._note("added", new, None, new["labels"])
        gone = ours.filter(pc.is_null(place))
        self._note("removed", gone, gone["labels"], None)
        kinds: tuple[tuple[ChangeKind, str], ...] = (
            ("relabelled", "labels"),
            ("moved", "split"),
            ("changed_bytes", "sha256"),
        )
        for kind, column in kinds:
            differs = pc.not_equal(before[column], after[column])
            self._note(kind, before.filter(differs), before[column].filter(differs), after[column].filter(differs))

    def _note(self, kind: ChangeKind, rows: pa.Table, a: pa.ChunkedArray | None, b: pa.ChunkedArray | None) -> None:
        self._counts[kind] += len(rows)
        room = self._num_named - len(self._first[kind])
        for i in np.argsort(rows["place"].to_numpy(), kind="stable")[:room].tolist():
            change = Change(rows["example_id"][i].as_py(), _shown(a, i), _shown(b, i))
            self._first[kind].append(change)

    def result(self, num_shared: int) -> ExampleDiff:
        """With the examples of shards that were not read, as both corpora have them."""
        changes = {kind: Changes(count, tuple(self._first[kind])) for kind, count in self._counts.items()}
        return ExampleDiff(self._num_common + num_shared, changes)


def _shown(values: pa.ChunkedArray | None, i: int) -> str | None:
    if values is None:
        return None
    value = values[i].as_py()
    return value.hex()[:12] if isinstance(value, bytes) else value
