"""Plans the shards from the records: which examples stay, their label ids, and the rows of each shard.

The driver handles counts only; the tasks of `sort_records.py` sort the rows, which stay on storage.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from vitline.data_prep.config import CorpusConfig, ShardingConfig
from vitline.data_prep.executors import Executor
from vitline.data_prep.labels.class_maps import applied, extended, load_class_map
from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.partitions import in_groups
from vitline.data_prep.plan.check_refused import check_left, check_refused
from vitline.data_prep.plan.corpus_stats import CorpusStats, merged
from vitline.data_prep.plan.leakage import save_decontamination
from vitline.data_prep.plan.near import NearTask, drop_near_duplicates
from vitline.data_prep.plan.similarity.near_duplicates import band_bits
from vitline.data_prep.plan.sort_records import (
    CLASSES_FILE,
    VAL_FILE,
    Dropped,
    PartitionedRecords,
    Selected,
    SortTask,
    find_duplicates,
    partition_records,
    select,
    val_candidates,
)
from vitline.data_prep.progress import StageProgress
from vitline.data_prep.records import Chunks
from vitline.data_prep.shard_format import (
    CLASSES_KEY,
    KnownShard,
    Manifest,
    SegmentInfo,
    known_shards,
    load_manifest,
    segment_keys,
)
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.raw import FirstRows, ImageSource
from vitline.infra.storage import Store, open_store

T = TypeVar("T")
R = TypeVar("R")
SPLIT_ORDER = ("train", "val", "test")
Views = Mapping[str, tuple[str | FirstRows, ...]]
_KNOWN_SHARDS_PER_TASK = 64
# Writer and readers hold the footer of a shard in memory, about 40 KB per row group. With tiny images in small groups, a shard
# of the usual size would have tens of thousands of row groups.
_MAX_ROW_GROUPS_PER_SHARD = 2048


@dataclass(frozen=True)
class Base:
    """The corpus that a segment is added to."""

    corpus: Store
    manifest: Manifest

    def check(self, config: CorpusConfig) -> None:
        """Raises ValueError if a request does not fit the corpus that it adds to."""
        if whole := self._whole():
            raise ValueError(
                f"add_to {config.add_to!r}: this corpus is a subset, the first rows of {whole} without shards of its own. "
                f"Add to {whole}."
            )
        source = open_source(config)
        if source.benchmark_rows:
            raise ValueError(
                f"add_to {config.add_to!r}: a benchmark is prepared as published and cannot be added to a corpus. Prepare "
                "it as a corpus of its own."
            )
        for field, requested, existing in (
            ("name", config.name, self.manifest.name),
            ("recipe.order_seed", config.recipe.order_seed, self.manifest.order_seed),
            ("recipe.decode", config.recipe.decode, self.manifest.decode_policy),
            ("one label per image", source.single_label, self.manifest.single_label),
        ):
            if requested != existing:
                raise ValueError(
                    f"{field}: the request has {requested}, but {self.corpus.uri}, to which it adds, has {existing}. Request the "
                    "same value, or prepare a corpus of its own."
                )

    def _whole(self) -> str:
        """NAME/VERSION of the corpus that a subset was taken from; empty if the base is not a subset."""
        manifest = self.manifest
        while of := manifest.view_of:
            manifest = load_manifest(open_store(f"{self.corpus.uri.rpartition('/')[0]}/{of['version']}"))
        return "" if manifest is self.manifest else f"{manifest.name}/{manifest.version}"

    def class_map(self) -> ClassMap:
        return ClassMap.from_file(self.corpus.read_json(CLASSES_KEY))

    def segments(self, split: str) -> tuple[SegmentInfo, ...]:
        """Its segments as the new manifest lists them: with the version whose folder holds them."""
        own = self.manifest.splits[split].segments if split in self.manifest.splits else ()
        version = self.manifest.version
        return tuple(s.model_copy(update={"version": s.version or version}) for s in own)

    def shards(self) -> list[KnownShard]:
        """Every shard. Raises ShardError if the shard list is missing, damaged, or differs from the manifest."""
        splits = [name for name in SPLIT_ORDER if name in self.manifest.splits]
        return [shard for name in splits for shard in known_shards(self.corpus, self.manifest, name)]


@dataclass(frozen=True)
class Selection:
    """Counts and classes of the accepted examples. The rows are in one file per bucket and split on storage, in order."""

    class_map: ClassMap
    single_label: bool
    has_weights: bool
    stats: CorpusStats
    buckets: tuple[Selected, ...]
    num_near_left: int = 0
    """Candidate pairs of near duplicates that were not compared because too many images share similar hashes."""

    @property
    def num_rejects(self) -> int:
        return sum(bucket.num_rejects for bucket in self.buckets)

    def rows(self, split: str) -> list[int]:
        """Rows of a split in each bucket."""
        return [bucket.num_rows.get(split, 0) for bucket in self.buckets]

    def num_rows(self, split: str) -> int:
        return sum(self.rows(split))

    def num_bytes(self, split: str) -> int:
        return sum(bucket.num_bytes.get(split, 0) for bucket in self.buckets)

    @property
    def num_accepted(self) -> int:
        return sum(map(self.num_rows, SPLIT_ORDER))


@dataclass(frozen=True)
class ShardPlan:
    """One shard to write, as rows [start, stop) of planned files."""

    split: str
    key: str
    num_rows: int
    pieces: tuple[tuple[int, int, int], ...]
    """(bucket, start, stop)"""


@dataclass(frozen=True)
class ShardLayout:
    """How the rows of a split are grouped into row groups and shards."""

    rows_per_row_group: int
    row_groups_per_shard: int

    @property
    def rows_per_shard(self) -> int:
        return self.rows_per_row_group * self.row_groups_per_shard


@dataclass(frozen=True)
class CorpusPlan:
    """Every shard to write, and segments and layout of every split; `views`: splits that join others or parts of them."""

    shards: list[ShardPlan]
    segments: dict[str, tuple[SegmentInfo, ...]]
    layouts: dict[str, ShardLayout]
    views: dict[str, tuple[str | FirstRows, ...]]


@dataclass(frozen=True)
class _Job:
    """One selection of examples: the request, its corpus, and how tasks are run."""

    config: CorpusConfig
    corpus: Store
    source: ImageSource
    base: Base | None
    executor: Executor
    show: StageProgress

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
        """Runs a task for each bucket of the records; a single one in this process."""
        return self.executor.run(work, tasks, few=len(tasks) == 1, heavy=True)


@dataclass(frozen=True)
class _AllDropped:
    """The examples that are dropped because of evaluation images or of other examples of the corpus."""

    leak_keys: tuple[str, ...]
    """Partition files of examples that show images of evaluation sets."""
    duplicates: tuple[Dropped, ...]
    """Exact duplicates by bucket, then near duplicates."""
    num_near_left: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Partition files of all dropped examples."""
        return (*self.leak_keys, *(each.key for each in self.duplicates))

    @property
    def gain_keys(self) -> tuple[str, ...]:
        """Partition files of the examples that get labels of their dropped copies."""
        return tuple(each.gains for each in self.duplicates if each.gains)


def select_examples(
    config: CorpusConfig, corpus: Store, root: Store, base: Base | None, executor: Executor, show: StageProgress
) -> Selection:
    """Sort the records, drop duplicates and small classes, and assign label ids to the remaining examples.

    Work that fits one task is done in this process. Raises ValueError if too many images are refused, none is left for train,
    ids repeat, or a group has two splits.
    """
    tasks = _partition_tasks(config, corpus, base)
    job = _Job(config, corpus, open_source(config), base, executor, show)
    if config.recipe.decontaminate:
        save_decontamination(config, corpus, root)
    partitioned = list(job.run(partition_records, tasks))
    has_weights = _has_weights(partitioned, base)
    buckets = [SortTask(corpus=t.corpus, number=t.number, num_files=len(tasks), num_buckets=len(tasks)) for t in tasks]
    dropped = _find_dropped(job, buckets, partitioned)
    buckets = [task.model_copy(update={"drops": dropped.keys, "gains": dropped.gain_keys}) for task in buckets]
    label_counts = _label_counts(partitioned, dropped)
    class_map = class_map_of(config, job.source, label_counts, base)
    corpus.write_json(CLASSES_FILE, {**class_map.as_file(), **_outside(config, job.source)})
    corpus.write_json(VAL_FILE, _val_hashes(job, buckets, partitioned))
    selected, stats = _selected(job.run(select, buckets))
    selection = Selection(
        class_map=class_map,
        single_label=job.source.single_label,
        has_weights=has_weights,
        stats=stats,
        buckets=tuple(selected),
        num_near_left=dropped.num_near_left,
    )
    check_refused(config, corpus, stats.refused, selection.num_accepted)
    rows = {split: selection.num_rows(split) for split in SPLIT_ORDER}
    check_left(config, rows, stats.refused, label_counts, _num_accepted(partitioned))
    return selection


def _find_dropped(job: _Job, buckets: Sequence[SortTask], partitioned: Sequence[PartitionedRecords]) -> _AllDropped:
    """Find exact duplicates and, if the recipe drops them, near duplicates among the examples that remain."""
    leak_keys = tuple(each.leaks.key for each in partitioned if each.leaks)
    exact = sorted(job.run(find_duplicates, buckets), key=lambda each: each.key)
    dropped = _AllDropped(leak_keys, tuple(exact))
    if job.config.recipe.near_duplicates == "keep":
        return dropped
    changes = {"drops": dropped.keys, "gains": dropped.gain_keys, "band_bits": band_bits(_num_accepted(partitioned))}
    near_tasks = [NearTask(**(task.model_dump() | changes)) for task in buckets]
    judged = drop_near_duplicates(near_tasks, job.executor, job.show)
    return _AllDropped(leak_keys, (*exact, judged.drops), judged.num_left)


def _num_accepted(partitioned: Sequence[PartitionedRecords]) -> int:
    return sum(each.num_accepted for each in partitioned)


def _label_counts(partitioned: Sequence[PartitionedRecords], dropped: _AllDropped) -> Counter[str]:
    """Remaining images of every label, before small classes are left out."""
    counts = Counter[str]()
    for each in partitioned:
        counts.update(each.label_counts)
    for duplicates in dropped.duplicates:
        counts.subtract(duplicates.label_counts)
        counts.update(duplicates.gained)
    return counts


def _val_hashes(job: _Job, buckets: Sequence[SortTask], partitioned: Sequence[PartitionedRecords]) -> dict[str, int]:
    """The largest split hash of every class that goes to val, if `val_per_class` applies; otherwise empty."""
    per_class = job.config.recipe.val_per_class
    if per_class is None or any(each.has_val for each in partitioned):
        return {}
    return _last_val_hashes(job.run(val_candidates, buckets), per_class)


def _partition_tasks(config: CorpusConfig, corpus: Store, base: Base | None) -> list[SortTask]:
    """Tasks that partition the records. A task reads as many records as a bucket should hold, so there are as many buckets."""
    sizes = Chunks(corpus, config).finished()
    numbers = list(sizes)
    chunks = [tuple(numbers[i] for i in group) for group in in_groups([*sizes.values()], config.execution.sort_bytes)]
    known = base.shards() if base else []
    parts = [tuple(known[i : i + _KNOWN_SHARDS_PER_TASK]) for i in range(0, len(known), _KNOWN_SHARDS_PER_TASK)]
    given = [(group, ()) for group in chunks] + [((), part) for part in parts]
    return [
        SortTask(
            corpus=corpus.uri, number=i, num_files=len(given), num_buckets=len(given), chunks=group, known=tuple(part)
        )
        for i, (group, part) in enumerate(given)
    ]


def class_map_of(config: CorpusConfig, source: ImageSource, counts: Mapping[str, int], base: Base | None) -> ClassMap:
    """The classes of a corpus: those of the requested class map; else those that the source declares; else those that are
    large enough, appended to the classes of the base corpus if there is one."""
    if config.recipe.class_map:
        return applied(load_class_map(config.recipe.class_map), (source.class_info(label) for label in counts))
    if declared := source.declared_classes():
        return ClassMap.of(source.class_info(label) for label in declared)
    large = (label for label, count in counts.items() if count >= config.recipe.min_images_per_class)
    found = ClassMap.of(source.class_info(label) for label in large)
    return extended(base.class_map(), found.classes) if base else found


def _outside(config: CorpusConfig, source: ImageSource) -> dict[str, object]:
    """What tasks need to know about labels besides the class map."""
    recipe = config.recipe
    reason, detail = "small_class", f"its class has fewer than {recipe.min_images_per_class} accepted images"
    if recipe.class_map:
        reason, detail = "unknown_class", f"no label in class map {recipe.class_map}"
    return {"outside": {"reason": reason, "detail": detail}, "single_label": source.single_label}


def _last_val_hashes(candidates: Iterator[dict[str, list[int]]], per_class: int) -> dict[str, int]:
    """For every class with at least 2 * `per_class` images, the largest split hash that goes to val."""
    smallest: dict[str, list[int]] = {}
    for found in candidates:
        for label, values in found.items():
            smallest[label] = sorted([*smallest.get(label, ()), *values])[: 2 * per_class]
    return {label: values[per_class - 1] for label, values in smallest.items() if len(values) >= 2 * per_class}


def _has_weights(partitioned: Sequence[PartitionedRecords], base: Base | None) -> bool:
    num_weighted, num_accepted = sum(each.num_weighted for each in partitioned), _num_accepted(partitioned)
    if num_weighted not in (0, num_accepted):
        raise ValueError(
            f"{num_weighted:,} of {num_accepted:,} examples have weights; a source must give weights for all examples or for "
            "none. Correct the source."
        )
    weighted = num_weighted > 0
    if base and base.manifest.has_weights != weighted:
        raise ValueError(
            f"{base.corpus.uri} has {'' if base.manifest.has_weights else 'no '}label weights, unlike the added images. "
            "Prepare them as a separate corpus."
        )
    return weighted


def _selected(buckets: Iterator[Selected]) -> tuple[list[Selected], CorpusStats]:
    """The buckets in order, and their merged statistics, merged one by one because each is large."""
    found, stats = [], None
    for each in buckets:
        own = CorpusStats.from_json(each.stats)
        stats = merged(stats, own) if stats else own
        found.append(each.model_copy(update={"stats": {}}))
    assert stats is not None
    return sorted(found, key=lambda each: each.bucket), stats


def plan_corpus(selection: Selection, views: Views, sharding: ShardingConfig, base: Base | None) -> CorpusPlan:
    """Assign the rows, in their global random order, to row groups and shards."""
    present = [name for name in SPLIT_ORDER if selection.num_rows(name)]
    old = {name: base.segments(name) for name in SPLIT_ORDER} if base else {}
    known = [name for name in SPLIT_ORDER if name in present or old.get(name)]
    views = {name: members for name, members in views.items() if all(split_of(member) in known for member in members)}
    layouts = _layouts(selection, present, views, sharding)
    if base:
        splits = base.manifest.splits
        kept = {name: ShardLayout(s.rows_per_row_group, s.row_groups_per_shard) for name, s in splits.items()}
        layouts |= {name: layout for name, layout in kept.items() if name in SPLIT_ORDER}
        # The splits of an old base may have different layouts, which a joined split cannot combine.
        views = {name: m for name, m in views.items() if len({layouts[split_of(member)] for member in m}) == 1}
    segment = f"s{len({s.name for parts in old.values() for s in parts}):03d}"
    shards: list[ShardPlan] = []
    segments = {}
    for name in known:
        num_rows, size = selection.num_rows(name), layouts[name].rows_per_shard
        own = SegmentInfo(split=name, name=segment, num_rows=max(1, num_rows), num_shards=max(1, -(-num_rows // size)))
        segments[name] = (*old.get(name, ()), *([own] if num_rows else []))
        if num_rows:
            starts = np.concatenate([[0], np.cumsum(selection.rows(name))])
            for i, key in enumerate(segment_keys(own)):
                stop = min((i + 1) * size, num_rows)
                shards.append(ShardPlan(name, key, stop - i * size, _pieces(starts, i * size, stop)))
    return CorpusPlan(shards, segments, {name: layouts[name] for name in known}, views)


def _pieces(starts: np.ndarray, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """The pieces (bucket, start, stop) that hold rows [start, stop) of a split; `starts`: first row of each bucket."""
    first, last = np.searchsorted(starts, start, side="right") - 1, np.searchsorted(starts, stop, side="left")
    pieces = []
    for bucket in range(int(first), int(last)):
        low, high = max(start, int(starts[bucket])), min(stop, int(starts[bucket + 1]))
        if high > low:
            pieces.append((bucket, low - int(starts[bucket]), high - int(starts[bucket])))
    return tuple(pieces)


def _layouts(
    selection: Selection, present: Sequence[str], views: Views, sharding: ShardingConfig
) -> dict[str, ShardLayout]:
    """Rows per row group and row groups per shard of every split. Splits that a joined split combines get the same layout."""
    joined = {split_of(member) for members in views.values() if len(members) > 1 for member in members}
    rows = {name: selection.num_rows(name) for name in present}
    mean_bytes = {name: max(1.0, selection.num_bytes(name) / rows[name]) for name in present}
    layouts: dict[str, ShardLayout] = {}
    for name in present:
        family = sorted(joined & set(present)) if name in joined else [name]
        sizes = [(rows[member], mean_bytes[member]) for member in family]
        largest = max(mean_bytes[member] for member in family)
        sizes += [(num, largest) for num in _view_rows(views, family, rows)]
        # A split with fewer rows than min_row_groups must not make the row groups of the others small.
        asking = [size for size in sizes if size[0] >= sharding.min_row_groups] or sizes
        per_group = min(_rows_per_row_group(num, each, sharding) for num, each in asking)
        per_shard = int(sharding.shard_bytes // (per_group * largest))
        layouts[name] = ShardLayout(per_group, min(max(1, per_shard), _MAX_ROW_GROUPS_PER_SHARD))
    return layouts


def split_of(member: str | FirstRows) -> str:
    """The split that a member of a joined split refers to, as a whole or by its first rows."""
    return member if isinstance(member, str) else member.split


def _view_rows(views: Views, family: Sequence[str], rows: Mapping[str, int]) -> list[int]:
    """Rows of every split made of the first rows of train, alone or joined: models train on it, so it needs enough row groups."""
    shown = [
        m for m in views.values() if isinstance(m[0], FirstRows) and split_of(m[0]) == "train" and "train" in family
    ]
    return [sum(m.num_rows if isinstance(m, FirstRows) else rows.get(m, 0) for m in members) for members in shown]


def _rows_per_row_group(num_rows: int, mean_bytes: float, sharding: ShardingConfig) -> int:
    by_bytes = int(sharding.row_group_bytes // mean_bytes)
    by_count = num_rows // sharding.min_row_groups
    return max(1, min(by_bytes, by_count))
