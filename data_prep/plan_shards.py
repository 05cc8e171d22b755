"""From records to shards: which examples stay, what their labels are, and which rows each shard holds.

Everything here is a function of the records alone, so every attempt and every machine plans the same shards. Only
records are in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.config import CorpusRecipe, ShardingConfig
from data_prep.content_digest import corpus_digest, split_digest, table_content_digest
from data_prep.dedup import exact_duplicates
from data_prep.labels import ClassMap
from data_prep.records import NOT_COUNTED, SourcePlan
from data_prep.shard_format import SegmentInfo, SplitInfo, segment_keys

SEGMENT = "s000"
SPLIT_ORDER = ("train", "val", "test")
REJECTS_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("kept_id", pa.string()),  # the example that stays instead, for duplicates
    ]
)


@dataclass(frozen=True)
class Selection:
    """The accepted examples, whose labels are ids now, and the refused ones (rows of REJECTS_SCHEMA)."""

    accepted: pa.Table
    rejects: pa.Table
    class_map: ClassMap
    single_label: bool

    @property
    def has_weights(self) -> bool:
        return self.accepted["weights"].null_count < self.accepted.num_rows

    def check_refused(self, name: str, limit: float) -> None:
        """Raises ValueError, with the first refusals, where more than the share `limit` of the pictures is refused."""
        counted = self.rejects.filter(pc.invert(pc.is_in(self.rejects["reason"], pa.array(sorted(NOT_COUNTED)))))
        num_pictures = self.accepted.num_rows + counted.num_rows
        if counted.num_rows > limit * num_pictures:
            rows = counted.slice(0, 5).to_pylist()
            first = "; ".join(f"{row['example_id']}: {row['reason']} ({row['detail']})" for row in rows)
            raise ValueError(
                f"{name}: {counted.num_rows:,} of {num_pictures:,} pictures are refused, more than the share {limit:g} "
                f"that max_refused_fraction allows, so nothing is published. The first: {first}. Repair or remove "
                "them, or raise the limit."
            )


@dataclass(frozen=True)
class ShardPlan:
    """One shard to write: its rows in order, and what it will say."""

    split: str
    key: str
    rows: pa.Table
    content_digest: str


@dataclass(frozen=True)
class CorpusPlan:
    """Every shard, every split (views too), and the digest that follows from them."""

    shards: list[ShardPlan]
    splits: dict[str, SplitInfo]
    digest: str


def select_examples(records: pa.Table, source: SourcePlan, recipe: CorpusRecipe) -> Selection:
    """Refuse duplicates and small classes, and give the others their label ids.

    Raises ValueError where nothing is left to train on, or a group lies in two splits.
    """
    unread = pc.is_valid(records["reason"])
    rejects = [_rejects(records.filter(unread))]
    accepted = records.filter(pc.invert(unread))

    duplicates = exact_duplicates(accepted, recipe.duplicates)
    rejects.append(_duplicate_rejects(accepted.take(duplicates["row"]), accepted.take(duplicates["kept"])))
    accepted = _without(accepted, duplicates["row"].to_numpy())

    counts = pc.value_counts(pc.list_flatten(accepted["labels"].combine_chunks())).to_pylist()
    large = {entry["values"] for entry in counts if entry["counts"] >= recipe.min_images_per_class}
    class_map = ClassMap.of(info for info in source.classes if info.source_id in large)
    accepted = _with_label_ids(accepted, class_map)
    small = np.flatnonzero(pc.equal(pc.list_value_length(accepted["labels"]), 0).to_numpy())
    detail = f"no class with {recipe.min_images_per_class} accepted pictures"
    rejects.append(_rejects(accepted.take(small), "small_class", detail))
    accepted = _without(accepted, small)

    _check_groups(accepted)
    if not pc.any(pc.equal(accepted["split"], "train")).as_py():
        raise ValueError(
            f"{source.origin}: no accepted picture is left for train; {sum(map(len, rejects)):,} of {len(records):,} "
            "files were refused or are duplicates. Add pictures, or lower val_fraction and test_fraction."
        )
    refused = pa.concat_tables(rejects).sort_by("example_id")
    return Selection(accepted, refused, class_map, source.single_label)


def plan_corpus(selection: Selection, views: Mapping[str, tuple[str, ...]], sharding: ShardingConfig) -> CorpusPlan:
    """Rows in their global random order, cut into row groups and shards."""
    rows = selection.accepted.sort_by([("order_key", "ascending"), ("example_id", "ascending")])
    tables = {name: rows.filter(pc.equal(rows["split"], name)) for name in SPLIT_ORDER}
    tables = {name: table for name, table in tables.items() if table.num_rows}
    views = {name: members for name, members in views.items() if all(member in tables for member in members)}
    layouts = _layouts(tables, views, sharding)
    shards, digests, segments = [], {}, {}
    for name, table in tables.items():
        rows_per_shard = layouts[name].rows_per_row_group * layouts[name].row_groups_per_shard
        num_shards = -(-table.num_rows // rows_per_shard)
        segments[name] = SegmentInfo(split=name, name=SEGMENT, num_rows=table.num_rows, num_shards=num_shards)
        for i, key in enumerate(segment_keys(segments[name])):
            part = table.slice(i * rows_per_shard, rows_per_shard)
            digests[key] = table_content_digest(part)
            shards.append(ShardPlan(name, key, part, digests[key]))
    class_digest = selection.class_map.digest
    splits = {}
    for name, members in {**{name: (name,) for name in tables}, **views}.items():
        info = SplitInfo(
            num_rows=sum(segments[member].num_rows for member in members),
            rows_per_row_group=layouts[members[0]].rows_per_row_group,
            row_groups_per_shard=layouts[members[0]].row_groups_per_shard,
            segments=tuple(segments[member] for member in members),
            digest="",
        )
        splits[name] = info.model_copy(update={"digest": split_digest(info, class_digest, digests)})
    return CorpusPlan(shards, splits, corpus_digest(class_digest, splits, digests))


@dataclass(frozen=True)
class _Layout:
    rows_per_row_group: int
    row_groups_per_shard: int


def _layouts(
    tables: Mapping[str, pa.Table], views: Mapping[str, tuple[str, ...]], sharding: ShardingConfig
) -> dict[str, _Layout]:
    """R and row groups per shard of every split. Splits that a view joins share both, as one split has one R."""
    joined = {member for members in views.values() if len(members) > 1 for member in members}
    layouts: dict[str, _Layout] = {}
    for name in tables:
        family = sorted(joined) if name in joined else [name]
        # A split with fewer rows than min_row_groups asks for nothing: it does not make the others' groups small.
        asking = [member for member in family if tables[member].num_rows >= sharding.min_row_groups] or family
        rows_per_group = min(_rows_per_row_group(tables[member], sharding) for member in asking)
        mean_bytes = max(_mean_bytes(tables[member]) for member in family)
        layouts[name] = _Layout(rows_per_group, max(1, int(sharding.shard_bytes // (rows_per_group * mean_bytes))))
    return layouts


def _rows_per_row_group(table: pa.Table, sharding: ShardingConfig) -> int:
    by_bytes = int(sharding.row_group_bytes // _mean_bytes(table))
    by_count = table.num_rows // sharding.min_row_groups
    return max(1, min(by_bytes, by_count))


def _mean_bytes(table: pa.Table) -> float:
    return max(1.0, pc.sum(table["num_bytes"]).as_py() / table.num_rows)


def _rejects(rows: pa.Table, reason: str | None = None, detail: str | None = None) -> pa.Table:
    location = pc.binary_join_element_wise(rows["base"], rows["key"], "/")
    columns = {
        "example_id": rows["example_id"],
        "source": location,
        "reason": rows["reason"] if reason is None else pa.repeat(reason, rows.num_rows),
        "detail": rows["detail"] if detail is None else pa.repeat(detail, rows.num_rows),
        "kept_id": pa.nulls(rows.num_rows, pa.string()),
    }
    return pa.table(columns).cast(REJECTS_SCHEMA)


def _duplicate_rejects(goes: pa.Table, stays: pa.Table) -> pa.Table:
    details = []
    columns = ("example_id", "sha256", "split", "labels")
    pairs = zip(goes.select(columns).to_pylist(), stays.select(columns).to_pylist(), strict=True)
    for gone, kept in pairs:
        text = f"{'same file' if gone['sha256'] == kept['sha256'] else 'same pixels'} as {kept['example_id']}"
        if gone["split"] != kept["split"]:
            text += f", which stays in {kept['split']} and would be in {gone['split']} too"
        if gone["labels"] != kept["labels"]:
            text += f", labelled {kept['labels']} and here {gone['labels']}"
        details.append(text)
    table = _rejects(goes, "duplicate", "").drop_columns(["detail", "kept_id"])
    table = table.append_column("detail", pa.array(details, pa.string())).append_column("kept_id", stays["example_id"])
    return table.cast(REJECTS_SCHEMA)


def _without(table: pa.Table, positions: np.ndarray) -> pa.Table:
    keep = np.ones(table.num_rows, dtype=bool)
    keep[positions] = False
    return table.filter(pa.array(keep))


def _with_label_ids(table: pa.Table, class_map: ClassMap) -> pa.Table:
    """Label names -> ids. Labels of classes that the map lacks are left out, with their weights."""
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


def _check_groups(accepted: pa.Table) -> None:
    grouped = accepted.filter(pc.is_valid(accepted["group"])).group_by("group").aggregate([("split", "count_distinct")])
    if crossing := grouped.filter(pc.greater(grouped["split_count_distinct"], 1))["group"].to_pylist():
        raise ValueError(
            f"{len(crossing):,} groups lie in more than one split, {crossing[0]!r} for one: variants of one object "
            "would be trained on and tested on. The source must give a group one split."
        )
