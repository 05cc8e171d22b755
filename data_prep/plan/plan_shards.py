"""From records to the plan of shards: which examples stay, what their labels are, and which rows each shard holds.

The driver sees counts only; the rows are sorted by the tasks of `sort_records.py` and stay on storage.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.config import CorpusConfig, ShardingConfig
from data_prep.corpora.open_source import open_source
from data_prep.corpora.raw import FirstRows, RawCorpus
from data_prep.corpus_stats import CorpusStats, merged
from data_prep.executors import Executor, for_records
from data_prep.labels.class_maps import applied, extended, load_class_map
from data_prep.labels.classes import ClassMap
from data_prep.partitions import in_groups
from data_prep.plan.check_refused import check_left, check_refused
from data_prep.plan.leakage import save_decontamination
from data_prep.plan.near_pairs import judge_near
from data_prep.plan.near_records import NearTask, deal_bands, find_near
from data_prep.plan.sort_records import (
    CLASSES_FILE,
    VAL_FILE,
    PartitionedRecords,
    Selected,
    SortTask,
    find_duplicates,
    partition_records,
    select,
    val_candidates,
)
from data_prep.progress import Show
from data_prep.records import Chunks
from data_prep.shard_format import CLASSES_KEY, Manifest, SegmentInfo, load_manifest, segment_keys, segment_store
from data_prep.similarity.near_duplicates import band_bits
from infra.storage import Store, open_store

SPLIT_ORDER = ("train", "val", "test")
Views = Mapping[str, tuple[str | FirstRows, ...]]
_KNOWN_SHARDS_PER_TASK = 64
# Writer and readers hold the footer of a shard, some 40 KB a row group in memory. Of tiny pictures in small groups a shard of
# the usual size would have tens of thousands.
_MAX_ROW_GROUPS_PER_SHARD = 2048


@dataclass(frozen=True)
class Base:
    """The corpus that a segment is added to."""

    corpus: Store
    manifest: Manifest

    def check(self, config: CorpusConfig) -> None:
        """Raises ValueError where a request does not fit the corpus that it adds to."""
        if whole := self._whole():
            raise ValueError(
                f"add_to {config.add_to!r}: that is a view, the first rows of {whole} and no shards of its own. Add to {whole}."
            )
        source = open_source(config)
        if source.benchmark_rows:
            raise ValueError(
                f"add_to {config.add_to!r}: a benchmark is prepared as it was published, and added to nothing. Prepare "
                "it as a corpus of its own."
            )
        for what, asked, there in (
            ("name", config.name, self.manifest.name),
            ("recipe.order_seed", config.recipe.order_seed, self.manifest.order_seed),
            ("recipe.decode", config.recipe.decode, self.manifest.decode_policy),
            ("one label an image", source.single_label, self.manifest.single_label),
        ):
            if asked != there:
                raise ValueError(
                    f"{what}: {asked} is asked for, but {self.corpus.uri}, which is added to, has {there}. Ask for the "
                    "same, or prepare a corpus of its own."
                )

    def _whole(self) -> str:
        """NAME/VERSION of what a view shows; empty where this is none."""
        manifest = self.manifest
        while of := manifest.provenance.get("view_of"):
            manifest = load_manifest(open_store(f"{self.corpus.uri.rpartition('/')[0]}/{of['version']}"))
        return "" if manifest is self.manifest else f"{manifest.name}/{manifest.version}"

    def class_map(self) -> ClassMap:
        return ClassMap.model_validate({"classes": self.corpus.read_json(CLASSES_KEY)["classes"]})

    def segments(self, split: str) -> tuple[SegmentInfo, ...]:
        """Its segments as the new manifest lists them: where they lie."""
        own = self.manifest.splits[split].segments if split in self.manifest.splits else ()
        version = self.manifest.version
        return tuple(s.model_copy(update={"version": s.version or version}) for s in own)


@dataclass(frozen=True)
class Selection:
    """The accepted examples by counts, and their classes. The rows lie in `buckets` files on storage, in order."""

    class_map: ClassMap
    single_label: bool
    has_weights: bool
    stats: CorpusStats
    buckets: tuple[Selected, ...]
    num_near_left: int = 0
    """Pairs that near duplicates may be among, and that were not compared: too many pictures have hashes like theirs."""

    @property
    def num_rejects(self) -> int:
        return sum(bucket.num_rejects for bucket in self.buckets)

    def rows(self, split: str) -> list[int]:
        """Rows of a split in every bucket."""
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
    """One shard to write: rows [start, stop) of one planned file after another."""

    split: str
    key: str
    num_rows: int
    pieces: tuple[tuple[int, int, int], ...]
    """(bucket, start, stop)"""


@dataclass(frozen=True)
class ShardLayout:
    """How the rows of a split become row groups and shards."""

    rows_per_row_group: int
    row_groups_per_shard: int

    @property
    def rows_per_shard(self) -> int:
        return self.rows_per_row_group * self.row_groups_per_shard


@dataclass(frozen=True)
class CorpusPlan:
    """Every shard to write, and the segments and layout of every split; views are not among them."""

    shards: list[ShardPlan]
    segments: dict[str, tuple[SegmentInfo, ...]]
    layouts: dict[str, ShardLayout]
    views: dict[str, tuple[str | FirstRows, ...]]


def select_examples(
    config: CorpusConfig, corpus: Store, root: Store, base: Base | None, executor: Executor, show: Show
) -> Selection:
    """Sort the records, refuse duplicates and small classes, and give the others their label ids.

    What one task can hold is planned in this process. Raises ValueError where too much is refused, nothing is left to
    train on, ids repeat or a group lies in two splits.
    """
    tasks = _dealing(config, corpus, base)
    run = for_records(executor, len(tasks))
    if config.recipe.decontaminate:
        save_decontamination(config, corpus, root)
    dealt = list(run(partition_records, tasks))
    buckets = [SortTask(corpus=t.corpus, number=t.number, num_files=len(tasks), num_buckets=len(tasks)) for t in tasks]
    has_weights = _has_weights(dealt, base)
    dropped = sorted(run(find_duplicates, buckets), key=lambda drops: drops.key)
    gains = tuple(drops.gains for drops in dropped if drops.gains)
    buckets = [t.model_copy(update={"gains": gains}) for t in buckets]
    leaks = [seen.leaks.key for seen in dealt if seen.leaks]
    judged = None
    if config.recipe.near_duplicates == "drop":
        num_accepted = sum(seen.num_accepted for seen in dealt)
        known = [*leaks, *(drops.key for drops in dropped)]
        near_tasks = _near_tasks(buckets, known, num_accepted)
        for _ in run(deal_bands, near_tasks):
            pass
        judged = judge_near(near_tasks[0], list(run(find_near, near_tasks)), run, executor, show)
        dropped.append(judged.drops)
    counts = Counter[str]()
    for seen in dealt:
        counts.update(seen.label_counts)
    for drops in dropped:
        counts.subtract(drops.label_counts)
        counts.update(drops.gained)
    source = open_source(config)
    class_map = _class_map(config, source, counts, base, corpus)
    corpus.write_json(CLASSES_FILE, class_map.as_file() | _outside(config, source))
    every = (*leaks, *(drops.key for drops in dropped))
    buckets = [t.model_copy(update={"drops": every}) for t in buckets]
    last_hash: dict[str, int] = {}
    if config.recipe.val_per_class is not None and not any(seen.has_val for seen in dealt):
        last_hash = _last_val_hashes(run(val_candidates, buckets), config.recipe.val_per_class)
    corpus.write_json(VAL_FILE, last_hash)
    selected, stats = _selected(run(select, buckets))
    selection = Selection(
        class_map=class_map,
        single_label=source.single_label,
        has_weights=has_weights,
        stats=stats,
        buckets=tuple(selected),
        num_near_left=judged.num_left if judged else 0,
    )
    check_refused(config, corpus, selection.stats.refused, selection.num_accepted)
    rows = {split: selection.num_rows(split) for split in SPLIT_ORDER}
    check_left(config, rows, selection.stats.refused, counts, sum(seen.num_accepted for seen in dealt))
    return selection


def _near_tasks(buckets: Sequence[SortTask], drops: Sequence[str], num_accepted: int) -> list[NearTask]:
    """Of looking for what looks like another picture of the corpus, after equal ones have gone."""
    bits = band_bits(num_accepted)
    return [NearTask(**(task.model_dump() | {"drops": tuple(drops), "band_bits": bits})) for task in buckets]


def _dealing(config: CorpusConfig, corpus: Store, base: Base | None) -> list[SortTask]:
    """Tasks that deal out so many records each as a bucket shall hold; hence as many buckets as tasks."""
    sizes = Chunks(corpus, config).finished()
    numbers = list(sizes)
    chunks = [tuple(numbers[i] for i in group) for group in in_groups([*sizes.values()], config.execution.sort_bytes)]
    known = known_shards(base) if base else []
    parts = [tuple(known[i : i + _KNOWN_SHARDS_PER_TASK]) for i in range(0, len(known), _KNOWN_SHARDS_PER_TASK)]
    given = [(group, ()) for group in chunks] + [((), part) for part in parts]
    return [
        SortTask(
            corpus=corpus.uri, number=i, num_files=len(given), num_buckets=len(given), chunks=group, known=tuple(part)
        )
        for i, (group, part) in enumerate(given)
    ]


def known_shards(base: Base) -> list[tuple[str, str, str]]:
    """(store, shard, split) of every shard that is there already."""
    found: dict[tuple[str, str, str], None] = {}
    for name in SPLIT_ORDER:
        for segment in base.segments(name):
            store = segment_store(base.corpus, segment)
            found.update({(store.uri, key, name): None for key in segment_keys(segment)})
    return list(found)


def _class_map(
    config: CorpusConfig, source: RawCorpus, counts: Mapping[str, int], base: Base | None, corpus: Store
) -> ClassMap:
    """The classes of a corpus: those of its map; or those that its source declares; or those of its base and the new
    ones; or all that are large enough."""
    if config.recipe.class_map:
        return applied(load_class_map(config.recipe.class_map), (source.class_info(label) for label in counts))
    if declared := source.declared_classes():
        return ClassMap.of(source.class_info(label) for label in declared)
    large = (label for label, count in counts.items() if count >= config.recipe.min_images_per_class)
    found = ClassMap.of(source.class_info(label) for label in large)
    return extended(base.class_map(), found.classes) if base else found


def _outside(config: CorpusConfig, source: RawCorpus) -> dict[str, object]:
    """What the tasks have to know of labels beside the class map."""
    recipe = config.recipe
    reason, detail = "small_class", f"no class with {recipe.min_images_per_class} accepted pictures"
    if recipe.class_map:
        reason, detail = "unknown_class", f"no class of {recipe.class_map}"
    return {"outside": {"reason": reason, "detail": detail}, "single_label": source.single_label}


def _last_val_hashes(candidates: Iterator[dict[str, list[int]]], per_class: int) -> dict[str, int]:
    """For every class with at least twice as many pictures the largest split hash that is val."""
    smallest: dict[str, list[int]] = {}
    for found in candidates:
        for label, values in found.items():
            smallest[label] = sorted([*smallest.get(label, ()), *values])[: 2 * per_class]
    return {label: values[per_class - 1] for label, values in smallest.items() if len(values) >= 2 * per_class}


def _has_weights(dealt: Sequence[PartitionedRecords], base: Base | None) -> bool:
    num_weighted, num_accepted = sum(d.num_weighted for d in dealt), sum(d.num_accepted for d in dealt)
    if num_weighted not in (0, num_accepted):
        raise ValueError(
            f"{num_weighted:,} of {num_accepted:,} examples have weights; the source promises a weight for every label "
            "of every example or for none. Correct the source."
        )
    weighted = num_weighted > 0
    if base and base.manifest.has_weights != weighted:
        raise ValueError(
            f"{base.corpus.uri} has {'' if base.manifest.has_weights else 'no '}weights of labels, the added images "
            "differ. Prepare them as a corpus of their own."
        )
    return weighted


def _selected(buckets: Iterator[Selected]) -> tuple[list[Selected], CorpusStats]:
    """The buckets in order, and their statistics as one: merged as they come, since each is large."""
    found, stats = [], None
    for each in buckets:
        own = CorpusStats.from_json(each.stats)
        stats = merged(stats, own) if stats else own
        found.append(each.model_copy(update={"stats": {}}))
    assert stats is not None
    return sorted(found, key=lambda each: each.bucket), stats


def plan_corpus(selection: Selection, views: Views, sharding: ShardingConfig, base: Base | None) -> CorpusPlan:
    """Rows in their global random order, cut into row groups and shards."""
    present = [name for name in SPLIT_ORDER if selection.num_rows(name)]
    old = {name: base.segments(name) for name in SPLIT_ORDER} if base else {}
    known = [name for name in SPLIT_ORDER if name in present or old.get(name)]
    views = {name: members for name, members in views.items() if all(split_of(member) in known for member in members)}
    layouts = _layouts(selection, present, views, sharding)
    if base:
        splits = base.manifest.splits
        kept = {name: ShardLayout(s.rows_per_row_group, s.row_groups_per_shard) for name, s in splits.items()}
        layouts |= {name: layout for name, layout in kept.items() if name in SPLIT_ORDER}
        # A base that is older than a view may have splits of different layouts, which cannot be joined.
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
    """Where rows [start, stop) of a split lie, as (bucket, start, stop) in the buckets that begin at `starts`."""
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
    """R and row groups per shard of every split. Splits that a view joins share both, as one split has one R."""
    joined = {split_of(member) for members in views.values() if len(members) > 1 for member in members}
    rows = {name: selection.num_rows(name) for name in present}
    mean_bytes = {name: max(1.0, selection.num_bytes(name) / rows[name]) for name in present}
    layouts: dict[str, ShardLayout] = {}
    for name in present:
        family = sorted(joined & set(present)) if name in joined else [name]
        sizes = [(rows[member], mean_bytes[member]) for member in family]
        largest = max(mean_bytes[member] for member in family)
        sizes += [(num, largest) for num in _view_rows(views, family, rows)]
        # What has fewer rows than min_row_groups asks for nothing: it does not make the others' groups small.
        asking = [size for size in sizes if size[0] >= sharding.min_row_groups] or sizes
        per_group = min(_rows_per_row_group(num, each, sharding) for num, each in asking)
        per_shard = int(sharding.shard_bytes // (per_group * largest))
        layouts[name] = ShardLayout(per_group, min(max(1, per_shard), _MAX_ROW_GROUPS_PER_SHARD))
    return layouts


def split_of(member: str | FirstRows) -> str:
    """The split that a member of a view is, or whose first rows it is."""
    return member if isinstance(member, str) else member.split


def _view_rows(views: Views, family: Sequence[str], rows: Mapping[str, int]) -> list[int]:
    """Rows of every view on the first rows of train, alone or with others: it is trained on too, and needs row groups."""
    shown = [
        m for m in views.values() if isinstance(m[0], FirstRows) and split_of(m[0]) == "train" and "train" in family
    ]
    return [sum(m.num_rows if isinstance(m, FirstRows) else rows.get(m, 0) for m in members) for members in shown]


def _rows_per_row_group(num_rows: int, mean_bytes: float, sharding: ShardingConfig) -> int:
    by_bytes = int(sharding.row_group_bytes // mean_bytes)
    by_count = num_rows // sharding.min_row_groups
    return max(1, min(by_bytes, by_count))
