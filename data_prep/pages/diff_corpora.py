"""Finds the examples that differ between two corpora, by their ids. Images are not read.

Both corpora are read once and partitioned into buckets on the local disk, which are compared one by one. So memory does not grow
with the corpora, and their orders may differ. Shards that both corpora list are not read at all.
"""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.parquet_files import read_table
from vitline.data_prep.partitions import read_partition, write_by_key
from vitline.data_prep.shard_format import (
    CLASSES_KEY,
    SHARDS_KEY,
    Manifest,
    ShardReader,
    load_manifest,
    segment_keys,
)
from vitline.data_prep.sources.splits import order_key
from vitline.infra.storage import Store, open_store

ChangeKind = Literal["added", "removed", "relabelled", "moved", "changed_bytes"]
_ROWS_AT_ONCE = 500_000  # rows per bucket and per file of buckets, about 100 bytes each
_READ_THREADS, _GROUPS_AT_ONCE = 8, 64
_ROW_SCHEMA = pa.schema(
    [
        pa.field("place", pa.uint64()),  # equal for an id in both corpora, whatever their order seeds
        pa.field("example_id", pa.string()),
        pa.field("sha256", pa.binary()),
        pa.field("labels", pa.string()),
        pa.field("split", pa.string()),
    ]
)


class Change(NamedTuple):
    """One example that differs, with its labels, split or sha256 in each corpus; None if the corpus lacks it."""

    example_id: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Changes:
    """Number of examples that differ in one way, and a fixed selection of them."""

    count: int
    first: tuple[Change, ...]


class ExampleDiff(NamedTuple):
    """Examples that only one corpus has, or that have other labels (or weights), split or bytes in the other."""

    num_common: int
    """Number of examples in both corpora, equal or not."""
    changes: dict[ChangeKind, Changes]


class _Corpus:
    """One of the two corpora."""

    def __init__(self, store: Store) -> None:
        self.store, self.manifest = store, load_manifest(store)
        self.source_ids = ClassMap.from_file(store.read_json(CLASSES_KEY)).source_ids

    @property
    def num_rows(self) -> int:
        return sum(split.num_rows for split in self.manifest.own_splits.values())

    def whole_shards(self) -> dict[tuple[str, str], int]:
        """(key, content digest) of every shard whose rows all belong to the corpus, with the number of rows."""
        lines = read_table(self.store, SHARDS_KEY).to_pylist()
        digests = {line["key"]: line["content_digest"] for line in lines}
        return {
            (key, digests[key]): split.shard_rows(segment, i)
            for split in self.manifest.own_splits.values()
            for segment in split.segments
            for i, key in enumerate(segment_keys(segment)[: split.shards_in_use(segment)])
            if i * split.rows_per_row_group * split.row_groups_per_shard + split.shard_rows(segment, i)
            <= segment.num_rows
        }


def diff_examples(a: Store, b: Store, num_named: int = 20, rows_at_once: int = _ROWS_AT_ONCE) -> ExampleDiff:
    """Changes of the examples from corpus `a` to corpus `b`; labels are compared by their source ids.

    Needs about 100 bytes of temporary disk space per example. Raises RuntimeError if a corpus does not exist, ShardError if a
    shard does not match its manifest.
    """
    sides = (_Corpus(a), _Corpus(b))
    shared = _shared_shards(*sides)
    skipped = frozenset(key for key, _ in shared)
    num_buckets = max(1, *(-(-side.num_rows // rows_at_once) for side in sides))
    found = _Found(num_named)
    with tempfile.TemporaryDirectory(prefix="vitline-diff-") as folder:
        work = open_store(folder)
        files = [
            _partition_rows(side, f"{i}", skipped, num_buckets, rows_at_once, work) for i, side in enumerate(sides)
        ]
        for bucket in range(num_buckets):
            found.compare(*(read_partition(work, keys, bucket, _ROW_SCHEMA) for keys in files))
    return found.result(sum(shared.values()))


def rows_apart(a: Store, b: Store) -> int:
    """Number of rows of both corpora in shards that the other does not have: those that `diff_examples` reads."""
    sides = (_Corpus(a), _Corpus(b))
    return sum(side.num_rows for side in sides) - 2 * sum(_shared_shards(*sides).values())


def _shared_shards(a: _Corpus, b: _Corpus) -> dict[tuple[str, str], int]:
    """Shards with the same content in both corpora. They hold label ids, so the class maps must agree."""
    common = min(len(a.source_ids), len(b.source_ids))
    if a.source_ids[:common] != b.source_ids[:common]:
        return {}
    theirs = b.whole_shards()
    return {shard: num_rows for shard, num_rows in a.whole_shards().items() if shard in theirs}


def _partition_rows(
    side: _Corpus, name: str, skipped: frozenset[str], num_buckets: int, rows_at_once: int, work: Store
) -> list[str]:
    """Write the rows of a corpus partitioned into buckets, and return the keys of the files."""
    keys: list[str] = []
    waiting: list[pa.Table] = []

    def write() -> None:
        rows = pa.concat_tables(waiting)
        keys.append(f"{name}/{len(keys):06d}")
        write_by_key(work, keys[-1], rows, rows["place"].to_numpy(), num_buckets)
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
    for name, split in side.manifest.own_splits.items():
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
    """The labels of every row as one text, by source id and with weights; the order of labels has no meaning."""
    if not manifest.has_weights:
        return [", ".join(sorted(source_ids[i] for i in labels)) for labels in table["labels"].to_pylist()]
    rows = zip(table["labels"].to_pylist(), table["weights"].to_pylist(), strict=True)
    return [
        ", ".join(sorted(f"{source_ids[i]}:{w:g}" for i, w in zip(labels, weights, strict=True)))
        for labels, weights in rows
    ]


class _Found:
    """Counts differences bucket by bucket. Buckets come in the order of `place`, so the first ones found are kept."""

    def __init__(self, num_named: int) -> None:
        self._num_named, self._num_common = num_named, 0
        self._counts: dict[ChangeKind, int] = dict.fromkeys(get_args(ChangeKind), 0)
        self._first: dict[ChangeKind, list[Change]] = {kind: [] for kind in self._counts}

    def compare(self, ours: pa.Table, theirs: pa.Table) -> None:
        """Compare all rows of one bucket of both corpora."""
        position = pc.index_in(ours["example_id"], theirs["example_id"].combine_chunks())
        before, after = ours.filter(pc.is_valid(position)), theirs.take(position.drop_null())
        self._num_common += len(before)
        new = theirs.filter(pc.invert(pc.is_in(theirs["example_id"], ours["example_id"].combine_chunks())))
        self._note("added", new, None, new["labels"])
        removed = ours.filter(pc.is_null(position))
        self._note("removed", removed, removed["labels"], None)
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
        """The result, including the examples of shards that were not read because both corpora have them."""
        changes = {kind: Changes(count, tuple(self._first[kind])) for kind, count in self._counts.items()}
        return ExampleDiff(self._num_common + num_shared, changes)


def _shown(values: pa.ChunkedArray | None, i: int) -> str | None:
    if values is None:
        return None
    value = values[i].as_py()
    return value.hex()[:12] if isinstance(value, bytes) else value
