"""The last stage: write class map, refused examples, shard list, report and, last, the manifest that makes a corpus exist."""

import dataclasses
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.pages.dataset_card import dataset_card
from vitline.data_prep.pages.report import render_report
from vitline.data_prep.pages.report_images import read_sample
from vitline.data_prep.parquet_files import read_table, table_writer, write_table
from vitline.data_prep.plan.corpus_stats import STATS_KEY, CorpusStats, merged
from vitline.data_prep.plan.leakage import LEAKAGE_SCHEMA, leak_lists
from vitline.data_prep.plan.plan_shards import Base, CorpusPlan, Selection, split_of
from vitline.data_prep.plan.sort_records import REJECTS_SCHEMA, rejects_key
from vitline.data_prep.records import Chunks
from vitline.data_prep.shard_format import (
    CARD_KEY,
    CLASSES_KEY,
    LEAKAGE_KEY,
    MANIFEST_KEY,
    REJECTS_KEY,
    REPORT_KEY,
    SHARDS_KEY,
    CorpusVersion,
    Counts,
    Manifest,
    SegmentInfo,
    SplitInfo,
    first_rows,
)
from vitline.data_prep.shards.content_digest import corpus_digest
from vitline.data_prep.shards.subsets import utc_now
from vitline.data_prep.shards.write_shards import ShardInfo
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.raw import FirstRows
from vitline.infra.storage import Store

SHARDS_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("version", pa.string(), nullable=False),  # version whose folder holds the shard; empty: this one
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("num_bytes", pa.int64(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("content_digest", pa.string(), nullable=False),
    ]
)
_LIBRARIES = ("pyarrow", "pillow", "simplejpeg", "numpy")


@dataclasses.dataclass
class Preparation:
    """A corpus that is being prepared."""

    config: CorpusConfig
    store: Store
    base: Base | None
    num_chunks: int
    seconds: dict[str, float]
    examine_s: float | None = None
    """Seconds to examine all corpora, including what earlier attempts had done; None if too little was left to estimate it."""


@dataclasses.dataclass
class Planned:
    """A corpus with planned shards; `shards` fills as they are written."""

    work: Preparation
    selection: Selection
    plan: CorpusPlan
    stats: CorpusStats
    shards: dict[str, ShardInfo] = dataclasses.field(default_factory=dict)
    num_leaks_left: int = 0
    """Pairs of training and evaluation images with near hashes that exceeded the limit and were not compared."""


def publish(done: Planned) -> Manifest:
    """Write everything besides the shards, which are all written, and the manifest last. Repeating it gives the same corpus."""
    corpus, base, class_map = done.work.store, done.work.base, done.selection.class_map
    lines = list(_shard_lines(done))
    write_table(corpus, SHARDS_KEY, pa.Table.from_pylist(lines, schema=SHARDS_SCHEMA))
    _write_rejects(done)
    _write_tables(corpus, LEAKAGE_KEY, LEAKAGE_SCHEMA, leak_lists(corpus))
    corpus.write_json(CLASSES_KEY, class_map.as_file())
    stats = done.stats
    if base:
        known = CorpusStats.from_json(base.corpus.read_json(STATS_KEY))
        stats = merged(_widened(known, len(class_map.classes)), stats)
    corpus.write_json(STATS_KEY, stats.to_json())
    manifest = _manifest(done, stats, {line["key"]: line["content_digest"] for line in lines})
    corpus.write(REPORT_KEY, render_report(manifest, class_map, stats, read_sample).encode())
    corpus.write(CARD_KEY, dataset_card(manifest, class_map).encode())
    corpus.write_json(MANIFEST_KEY, manifest.model_dump(mode="json"))
    return manifest


def _shard_lines(done: Planned) -> Iterator[dict[str, Any]]:
    """The rows of shards.parquet: those of the base corpus, unchanged, then the new ones."""
    if base := done.work.base:
        for line in read_table(base.corpus, SHARDS_KEY).to_pylist():
            yield {**line, "version": line["version"] or base.manifest.version}
    for shard in done.plan.shards:
        yield {**done.shards[shard.key].model_dump(), "version": ""}


def _write_rejects(done: Planned) -> None:
    buckets = (bucket.bucket for bucket in done.selection.buckets if bucket.num_rejects)
    tables = (read_table(done.work.store, rejects_key(bucket)) for bucket in buckets)
    _write_tables(done.work.store, REJECTS_KEY, REJECTS_SCHEMA, tables)


def _write_tables(corpus: Store, key: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write many tables to one Parquet file, with one table in memory at a time."""
    with table_writer(corpus, key, schema) as writer:
        writer.write_table(schema.empty_table())
        for table in tables:
            writer.write_table(table.select(schema.names).cast(schema))


def _widened(stats: CorpusStats, num_classes: int) -> CorpusStats:
    """Statistics of a corpus after its class map was extended."""

    def wider(counts: np.ndarray) -> np.ndarray:
        return np.concatenate([counts, np.zeros(num_classes - len(counts), counts.dtype)])

    splits = {
        name: dataclasses.replace(split, class_counts=wider(split.class_counts)) for name, split in stats.splits.items()
    }
    return dataclasses.replace(stats, num_classes=num_classes, splits=splits)


def _splits(plan: CorpusPlan, class_digest: str, digests: Mapping[str, str]) -> dict[str, SplitInfo]:
    splits = {}
    own: dict[str, tuple[str | FirstRows, ...]] = {name: (name,) for name in plan.segments}
    for name, members in {**own, **plan.views}.items():
        segments = tuple(segment for member in members for segment in _segments_of(member, plan))
        info = SplitInfo(
            num_rows=sum(segment.num_rows for segment in segments),
            rows_per_row_group=plan.layouts[split_of(members[0])].rows_per_row_group,
            row_groups_per_shard=plan.layouts[split_of(members[0])].row_groups_per_shard,
            segments=segments,
            digest="",
        )
        splits[name] = info.model_copy(update={"digest": info.digest_over(class_digest, digests)})
    return splits


def _segments_of(member: str | FirstRows, plan: CorpusPlan) -> tuple[SegmentInfo, ...]:
    if isinstance(member, str):
        return plan.segments[member]
    return first_rows(plan.segments[member.split], member.num_rows)


def _manifest(done: Planned, stats: CorpusStats, digests: Mapping[str, str]) -> Manifest:
    config, selection, base = done.work.config, done.selection, done.work.base
    source = open_source(config)
    refused = {reason: found.count for reason, found in sorted(stats.refused.items())}
    provenance: dict[str, Any] = {
        "request": config.model_dump(mode="json"),
        "origin": source.origin,
        "credit": source.credit,
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "seconds": {step: round(value, 3) for step, value in done.work.seconds.items()},
        "created_at": utc_now(),
    }
    if selection.num_near_left:
        provenance["near_pairs_not_compared"] = selection.num_near_left
    if done.num_leaks_left:
        provenance["leak_pairs_not_compared"] = done.num_leaks_left
    if base:
        provenance["added_to"] = CorpusVersion(version=base.manifest.version, digest=base.manifest.digest)
    num_merged = (Chunks(done.work.store, config).num_merged() or 0) + (base.manifest.counts.num_merged if base else 0)
    class_digest = selection.class_map.digest
    splits = _splits(done.plan, class_digest, digests)
    return Manifest(
        name=config.name,
        version=done.work.store.uri.rpartition("/")[2],
        digest=corpus_digest(class_digest, splits, digests),
        class_map_digest=class_digest,
        num_classes=len(selection.class_map.classes),
        single_label=selection.single_label,
        has_weights=selection.has_weights,
        order_seed=config.recipe.order_seed,
        splits=splits,
        decode_policy=config.recipe.decode,
        counts=Counts(
            num_found=stats.num_rows + stats.num_refused + num_merged,
            num_merged=num_merged,
            num_accepted=stats.num_rows,
            num_refused=stats.num_refused,
            num_bytes=stats.num_bytes,
            refused=refused,
        ),
        provenance=provenance,
    )
