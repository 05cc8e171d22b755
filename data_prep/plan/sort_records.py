"""The tasks of planning: turn records into rows of shards, on storage. Each task holds one bucket of records, never all.

    records --partition_records--> buckets by order key -----------------------select--> rows of every split, in order
                     \\--> buckets by pixel hash --find_duplicates--> drops --/

The result depends on the records alone, so every attempt on every machine plans the same shards.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.parquet_files import write_table
from vitline.data_prep.partitions import hash_prefixes, read_partition, write_by_key
from vitline.data_prep.plan.buckets import Buckets
from vitline.data_prep.plan.check_refused import ids_there_error, repeated_ids_error
from vitline.data_prep.plan.corpus_stats import CorpusStats, SampleRule
from vitline.data_prep.plan.leakage import leaked_rows
from vitline.data_prep.plan.similarity.dedup import (
    DROPS_SCHEMA,
    GAINS_SCHEMA,
    LOCATOR_SCHEMA,
    PIXELS_SCHEMA,
    exact_duplicates,
    merged_labels,
)
from vitline.data_prep.records import PLAN, RECORD_SCHEMA, Chunks, read_request
from vitline.data_prep.shard_format import KnownShard, open_shard
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.splits import order_key, split_hash, unit_key
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store, open_store

CLASSES_FILE, VAL_FILE, KNOWN_FILE = f"{PLAN}/classes.json", f"{PLAN}/val.json", f"{PLAN}/known.json"
ROW_SCHEMA = pa.schema(
    [
        field.with_type(pa.list_(pa.int32())) if field.name == "labels" else field
        for field in RECORD_SCHEMA
        if field.name not in ("reason", "detail", "val_fraction", "test_fraction", "is_link")
    ]
)
"""A planned row: an accepted record with label ids instead of label names."""
_PLACE = [field for field in RECORD_SCHEMA if field.name in (*LOCATOR_SCHEMA.names, "order_key")]
REJECTS_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("kept_id", pa.string()),  # the example that stays instead, for duplicates
    ]
)
LOCATED_REJECTS = pa.schema([*REJECTS_SCHEMA, *_PLACE])
_IDS_SCHEMA = pa.schema([pa.field("order_key", pa.uint64()), pa.field("example_id", pa.string())])
_GROUPS_SCHEMA = pa.schema([pa.field("group", pa.string()), pa.field("split", pa.string())])
_ROWS_PER_READ = 2048  # row group size of planned files: a shard reads some thousand rows


class SortTask(FrozenConfig):
    """One step of planning: partition file or bucket `number`, of `num_files` files and `num_buckets` buckets."""

    corpus: str
    number: int
    num_files: int
    num_buckets: int
    chunks: tuple[int, ...] = ()
    """For `partition_records`: the chunks whose records it partitions."""
    known: tuple[KnownShard, ...] = ()
    """For `partition_records`: shards of the base corpus."""
    drops: tuple[str, ...] = ()
    """Partition files of dropped examples, by order key."""
    gains: tuple[str, ...] = ()
    """Partition files of examples that get the labels of their copies, by order key."""

    def buckets(self, corpus: Store, kind: str) -> Buckets:
        """The bucket files of a kind, one for every task of `partition_records`."""
        return Buckets(corpus, kind, self.num_files, self.num_buckets)

    @property
    def own(self) -> str:
        return f"{self.number:05d}.bin"


class PartitionedRecords(FrozenConfig):
    """Counts of the accepted examples of one `partition_records` task."""

    label_counts: dict[str, int]
    num_accepted: int
    num_weighted: int
    has_val: bool
    """Whether any example is in val before `val_per_class` moves some there: true if the source names val."""
    leaks: "Dropped | None"
    """Examples dropped because they show an image of an evaluation set; they are not counted as accepted."""


class Dropped(FrozenConfig):
    """Dropped examples by label, and the partition file that lists them."""

    key: str
    label_counts: dict[str, int]
    gains: str = ""
    """Partition file of the remaining examples that get labels of their copies. Empty: there are none."""
    gained: dict[str, int] = Field(default_factory=dict)
    """How many of these examples get each label."""


class Selected(FrozenConfig):
    """One bucket in order: rows and bytes of every split, refused examples, statistics."""

    bucket: int
    num_rows: dict[str, int]
    num_bytes: dict[str, int]
    num_rejects: int
    stats: dict[str, Any]
    """CorpusStats as JSON."""


def rows_key(split: str, bucket: int) -> str:
    """Key of the planned rows of one bucket and split."""
    return f"{PLAN}/rows/{split}/{bucket:05d}.parquet"


def rejects_key(bucket: int) -> str:
    return f"{PLAN}/rejects/{bucket:05d}.parquet"


def partition_records(task: SortTask) -> PartitionedRecords:
    """Partition some records by order key, and the accepted ones also by pixel hash and by group."""
    corpus = open_store(task.corpus)
    config = read_request(corpus)
    records = Chunks(corpus, config).load_records(task.chunks)
    accepted = records.filter(pc.is_null(records["reason"]))
    leaks = None
    if config.recipe.decontaminate:
        drops = _one_for_each(leaked_rows(accepted, corpus, config))
        leaks = save_drops(corpus, f"leaks-{task.own}", drops, task.num_buckets)
        accepted = accepted.filter(pc.invert(pc.is_in(accepted["example_id"], drops["example_id"].combine_chunks())))
    known = _known_rows(task, config.recipe.order_seed)

    def write(kind: str, table: pa.Table, keys: np.ndarray) -> None:
        task.buckets(corpus, kind).write(task.number, table, keys)

    write("by-order", records, records["order_key"].to_numpy())
    pixels = accepted.append_column("known", pa.repeat(False, len(accepted))).select(PIXELS_SCHEMA.names)
    pixels = pa.concat_tables([pixels.cast(PIXELS_SCHEMA), known])
    write("by-pixels", pixels, hash_prefixes(pixels["pixel_sha256"]))
    write("known-ids", known.select(_IDS_SCHEMA.names), known["order_key"].to_numpy())
    grouped = accepted.filter(pc.is_valid(accepted["group"])).select(_GROUPS_SCHEMA.names)
    grouped = grouped.group_by(["group", "split"]).aggregate([]).cast(_GROUPS_SCHEMA)
    write("by-group", grouped, np.array([split_hash(group) for group in grouped["group"].to_pylist()], dtype=np.uint64))
    return PartitionedRecords(
        label_counts=label_counts(accepted),
        num_accepted=len(accepted),
        num_weighted=len(accepted) - accepted["weights"].null_count,
        has_val=bool(pc.any(pc.equal(records["split"], "val")).as_py()),
        leaks=leaks,
    )


def _one_for_each(drops: pa.Table) -> pa.Table:
    """Only the first reason of every example."""
    ids = drops["example_id"].to_pylist()
    first = {example_id: i for i, example_id in reversed([*enumerate(ids)])}
    return drops.take(pa.array(sorted(first.values()), pa.int64()))


def _known_rows(task: SortTask, seed: int) -> pa.Table:
    """Rows in shards of the base corpus, as PIXELS_SCHEMA without labels. Raises ShardError for one that is not the listed
    shard."""
    tables = [PIXELS_SCHEMA.empty_table()]
    for shard in task.known:
        with open_shard(open_store(shard.home), shard.listed) as file:
            table = file.read(["example_id", "sha256", "pixel_sha256"])
        ids = table["example_id"].to_pylist()
        added = {
            **{field.name: pa.nulls(len(ids), field.type) for field in LOCATOR_SCHEMA},
            "split": pa.repeat(shard.split, len(ids)),
            "val_fraction": pa.nulls(len(ids), pa.float64()),
            "group": pa.nulls(len(ids), pa.string()),
            "order_key": pa.array([order_key(seed, example_id) for example_id in ids], pa.uint64()),
            "labels": pa.array([[]] * len(ids), pa.list_(pa.string())),
            "weights": pa.nulls(len(ids), pa.list_(pa.float32())),
            "is_link": pa.repeat(False, len(ids)),
            "known": pa.repeat(True, len(ids)),
        }
        for name, column in added.items():
            table = table.append_column(name, column)
        tables.append(table.select(PIXELS_SCHEMA.names).cast(PIXELS_SCHEMA))
    return pa.concat_tables(tables)


def label_counts(rows: pa.Table, column: str = "labels") -> dict[str, int]:
    """Number of rows with each label."""
    counted = pc.value_counts(pc.list_flatten(rows[column].combine_chunks()))
    return dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True))


def find_duplicates(task: SortTask) -> Dropped:
    """The dropped examples of one bucket of pixel hashes. Raises ValueError if a group has two splits."""
    corpus = open_store(task.corpus)
    config = read_request(corpus)
    _check_groups(task.buckets(corpus, "by-group").read(task.number, _GROUPS_SCHEMA))
    rows = task.buckets(corpus, "by-pixels").read(task.number, PIXELS_SCHEMA)
    source = open_source(config)
    keeps_all = source.benchmark_rows
    policy, several = config.recipe.duplicates, not source.single_label
    drops = DROPS_SCHEMA.empty_table() if keeps_all else exact_duplicates(rows, policy, several_labels=several)
    saved = save_drops(corpus, f"pixels-{task.own}", drops, task.num_buckets)
    gains = merged_labels(rows, policy) if several and len(drops) else GAINS_SCHEMA.empty_table()
    if not len(gains):
        return saved
    key = f"{PLAN}/gains/{task.own}"
    write_by_key(corpus, key, gains, gains["order_key"].to_numpy(), task.num_buckets)
    return saved.model_copy(update={"gains": key, "gained": label_counts(gains, "gained")})


def save_drops(corpus: Store, name: str, drops: pa.Table, num_buckets: int) -> Dropped:
    """Save dropped examples (DROPS_SCHEMA) by order key."""
    key = f"{PLAN}/drops/{name}"
    write_by_key(corpus, key, drops, drops["order_key"].to_numpy(), num_buckets)
    return Dropped(key=key, label_counts=label_counts(drops))


def _check_groups(rows: pa.Table) -> None:
    grouped = rows.group_by("group").aggregate([("split", "count_distinct")])
    crossing = grouped.filter(pc.greater(grouped["split_count_distinct"], 1))["group"].to_pylist()
    if crossing:
        raise ValueError(
            f"{len(crossing):,} groups are in more than one split, for example {min(crossing)!r}: variants of one object "
            "would be used for training and testing. The source must give each group one split."
        )


def kept_records(corpus: Store, task: SortTask) -> pa.Table:
    """The remaining accepted records of one bucket of order keys, in order."""
    return _sorted_bucket(corpus, task)[0]


def _sorted_bucket(corpus: Store, task: SortTask) -> tuple[pa.Table, pa.Table, pa.Table]:
    """One bucket of order keys: remaining records, in order; dropped records with their reasons; refused records."""
    records = task.buckets(corpus, "by-order").read(task.number, RECORD_SCHEMA)
    refused = pc.is_valid(records["reason"])
    accepted = records.filter(pc.invert(refused)).sort_by([("order_key", "ascending"), ("example_id", "ascending")])
    _check_ids(corpus, task, accepted)
    drops = read_partition(corpus, task.drops, task.number, DROPS_SCHEMA)
    position = pc.index_in(accepted["example_id"], drops["example_id"].combine_chunks())
    dropped = accepted.filter(pc.is_valid(position))
    reasons = drops.take(position.drop_null())
    dropped = dropped.drop_columns(["reason", "detail"])
    for name in DROPS_SCHEMA.names[3:]:
        dropped = dropped.append_column(name, reasons[name])
    gains = read_partition(corpus, task.gains, task.number, GAINS_SCHEMA)
    return _with_gains(accepted.filter(pc.is_null(position)), gains), dropped, records.filter(refused)


def _with_gains(rows: pa.Table, gains: pa.Table) -> pa.Table:
    """Records with the labels and weights of their copies merged in."""
    if not len(gains):
        return rows
    position = pc.index_in(rows["example_id"], gains["example_id"].combine_chunks())
    for name in ("labels", "weights"):
        merged = pc.if_else(pc.is_valid(position), gains[name].take(position), rows[name])
        rows = rows.set_column(rows.column_names.index(name), RECORD_SCHEMA.field(name), merged)
    return rows


def _check_ids(corpus: Store, task: SortTask, accepted: pa.Table) -> None:
    known = task.buckets(corpus, "known-ids").read(task.number, _IDS_SCHEMA)["example_id"]
    counted = Counter(accepted["example_id"].to_pylist())
    if repeated := [example_id for example_id, count in counted.items() if count > 1]:
        first = min(repeated)
        columns = ["example_id", "base", "key", "labels"]
        rows = accepted.filter(pc.equal(accepted["example_id"], first)).select(columns).to_pylist()
        source = open_source(read_request(corpus))
        at_least = "at least " if task.num_buckets > 1 else ""
        raise repeated_ids_error(source, rows, len(rows), len(repeated), at_least)
    if again := sorted(counted.keys() & set(known.to_pylist())):
        raise ids_there_error(again[0], len(again))


def val_candidates(task: SortTask) -> dict[str, list[int]]:
    """For every class, the smallest split hashes of the remaining train rows, ascending: twice as many as may become val."""
    corpus = open_store(task.corpus)
    config = read_request(corpus)
    rows = kept_records(corpus, task)
    rows = rows.filter(pc.equal(rows["split"], "train"))
    hashes: dict[str, list[int]] = {}
    for labels, value in zip(rows["labels"].to_pylist(), _split_hashes(rows), strict=True):
        hashes.setdefault(labels[0], []).append(value)
    wanted = 2 * (config.recipe.val_per_class or 0)
    return {label: sorted(values)[:wanted] for label, values in hashes.items()}


def _split_hashes(rows: pa.Table) -> list[int]:
    units = zip(rows["group"].to_pylist(), rows["pixel_sha256"].to_pylist(), strict=True)
    return [split_hash(unit_key(*unit)) for unit in units]


def select(task: SortTask) -> Selected:
    """Write the rows of one bucket in order, by split and with label ids, and the refused examples.

    Raises ValueError if two examples have one id, or if labels break the contract of sources.
    """
    corpus = open_store(task.corpus)
    labels = corpus.read_json(CLASSES_FILE)
    classes, outside = ClassMap.from_file(labels), labels["outside"]
    accepted, dropped, refused = _sorted_bucket(corpus, task)
    _check_labels(accepted, single_label=labels["single_label"])
    accepted = _per_class_val(accepted, corpus.read_json(VAL_FILE))
    rows = with_label_ids(accepted, classes)
    empty = pc.equal(pc.list_value_length(rows["labels"]), 0)
    rejects = pa.concat_tables(
        [
            _rejects(refused, lambda row: (row["reason"], row["detail"], None)),
            _rejects(dropped, lambda row: (row["reason"], row["detail"], row["other_id"])),
            _rejects(accepted.filter(empty), lambda row: (outside["reason"], outside["detail"], None)),
        ]
    ).sort_by("example_id")
    rows = rows.filter(pc.invert(empty)).select(ROW_SCHEMA.names).cast(ROW_SCHEMA)
    write_table(corpus, rejects_key(task.number), rejects)
    num_rows, num_bytes = Counter[str](), Counter[str]()
    for split in sorted(set(rows["split"].to_pylist())):
        part = rows.filter(pc.equal(rows["split"], split))
        num_rows[split], num_bytes[split] = len(part), pc.sum(part["num_bytes"]).as_py()
        write_table(corpus, rows_key(split, task.number), part, _ROWS_PER_READ)
    pairs = dropped.append_column("left_out", pa.repeat(True, len(dropped)))
    stats = CorpusStats.of(rows, rejects, len(classes.classes), SampleRule(), pairs)
    return Selected(
        bucket=task.number,
        num_rows=num_rows,
        num_bytes=num_bytes,
        num_rejects=len(rejects),
        stats=stats.to_json(),
    )


def _check_labels(accepted: pa.Table, *, single_label: bool) -> None:
    """Raises ValueError for an example whose labels break the contract of sources."""
    counts = pc.list_value_length(accepted["labels"])
    weights = pc.list_value_length(accepted["weights"])
    wrong = pc.not_equal(counts, 1) if single_label else pc.less(counts, 1)
    wrong = pc.or_(wrong, pc.fill_null(pc.not_equal(weights, counts), False))
    if bad := accepted.filter(wrong).slice(0, 1).to_pylist():
        raise ValueError(
            f"{bad[0]['example_id']!r} has {len(bad[0]['labels'])} labels and weights {bad[0]['weights']}; the source "
            f"must give {'one label' if single_label else 'one or more labels'} for each example, and one weight per "
            "label for all examples or for none. Correct the source reader."
        )


def _per_class_val(rows: pa.Table, last_hash: dict[str, int]) -> pa.Table:
    """Move to val the rows with the smallest split hashes of their (first) class."""
    if not last_hash or not len(rows):
        return rows
    splits = [
        "val" if split == "train" and value <= last_hash.get(labels[0], -1) else split
        for split, labels, value in zip(
            rows["split"].to_pylist(), rows["labels"].to_pylist(), _split_hashes(rows), strict=True
        )
    ]
    return rows.set_column(rows.column_names.index("split"), RECORD_SCHEMA.field("split"), pa.array(splits))


def with_label_ids(table: pa.Table, class_map: ClassMap) -> pa.Table:
    """Label names -> ids. Labels that the class map lacks are left out with their weights."""
    names = table["labels"].combine_chunks()
    ids = pc.index_in(pc.list_flatten(names), pa.array(class_map.source_ids, pa.string()))
    known = pc.is_valid(ids).to_numpy(zero_copy_only=False)
    owner = pc.list_parent_indices(names).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[known], minlength=len(names)))]).astype(np.int32)
    labels = pa.ListArray.from_arrays(pa.array(offsets), ids.filter(pa.array(known)).cast(pa.int32()))
    table = table.set_column(table.column_names.index("labels"), "labels", labels)
    if table["weights"].null_count == table.num_rows:
        return table
    kept = pc.list_flatten(table["weights"].combine_chunks()).filter(pa.array(known))
    weights = pa.ListArray.from_arrays(pa.array(offsets), kept)
    return table.set_column(table.column_names.index("weights"), "weights", weights)


def _rejects(rows: pa.Table, reason_of: Callable[[dict[str, Any]], tuple[str, str, str | None]]) -> pa.Table:
    """Records as rows of LOCATED_REJECTS."""
    out = []
    for row in rows.to_pylist():
        row["reason"], row["detail"], row["kept_id"] = reason_of(row)
        out.append({**row, "source": f"{row['base'].removesuffix('/')}/{row['key']}"})
    return pa.Table.from_pylist(out, schema=LOCATED_REJECTS)
