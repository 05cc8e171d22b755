"""What a preparation will be like, before anything is spent: the source listed, a sample examined, the rest estimated.

Nothing is written to the store: lists and the sample lie in a temporary folder of this machine. What was counted and
what is estimated are told apart. Duplicates and leakage take a whole corpus, and are not looked for.
"""

import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from data_prep.config import CorpusConfig, CorpusRecipe
from data_prep.corpora.open_source import open_source
from data_prep.corpora.raw import RawCorpus, WorkFolder, kept_lists
from data_prep.corpus_stats import CorpusStats, SampleRule
from data_prep.inspect.dry_run_report import Cores, DryRun, Number, render
from data_prep.inspect.expected_rows import Kept, kept_rows, shares
from data_prep.inspect.sample_source import BUDGET, Budget, ListedSource, Sample, list_parts, take_sample
from data_prep.labels.class_maps import load_class_map
from data_prep.labels.classes import ClassMap
from data_prep.plan.plan_shards import SPLIT_ORDER, Base, Selection, known_shards, plan_corpus
from data_prep.plan.sort_records import ROW_SCHEMA, Selected, with_label_ids
from data_prep.records import NOT_COUNTED, RECORD_SCHEMA, UNCOUNTED
from data_prep.shards.verify_shards import ShardSpec
from data_prep.shards.write_shards import ShardTask, write_shard
from infra.storage import Store, open_store

# Of the store's and the readers' code: what one request moves at most.
_LIST_PAGE, _WINDOW_BYTES, _UPLOAD_BYTES = 1000, 4 << 20, 32 << 20


def dry_run(
    config: CorpusConfig, cores: Cores, base: Base | None = None, budget: Budget = BUDGET
) -> tuple[DryRun, str]:
    """What is to be expected of a request, and a page with a sample sheet.

    `base` is the corpus that it adds to. Raises ValueError where the source does not exist, is not what it should be,
    or has no picture among those tried; and what the store raises.
    """
    with tempfile.TemporaryDirectory(prefix="vitline-dry-run-", ignore_cleanup_errors=True) as folder:
        scratch, source = open_store(folder), open_source(config)
        work = WorkFolder(scratch.child("root"), scratch.child("source"), config.execution.examples_per_chunk)
        listed = list_parts(source, work, config, known_shards(base) if base else (), budget)
        sample = take_sample(source, work, listed, config, budget)
        found = _estimate(config, source, cores, base, listed, sample, work)
        return found, render(found, config)


def _estimate(
    config: CorpusConfig,
    source: RawCorpus,
    cores: Cores,
    base: Base | None,
    listed: ListedSource,
    sample: Sample,
    work: WorkFolder,
) -> DryRun:
    sample.rows = list({row["example_id"]: row for row in reversed(sample.rows)}.values())[::-1]  # what repeats, once
    records = pa.Table.from_pylist(sample.rows, schema=RECORD_SCHEMA)
    accepted, rejects, class_map = _verdicts(config, source, records)
    if not len(accepted):
        reasons = ", ".join(f"{reason} {n}" for reason, n in Counter(rejects["reason"].to_pylist()).items())
        raise ValueError(
            f"{source.origin}: none of {len(records):,} files that were tried is a labelled picture "
            f"({_late(sample) if sample.late else reasons}). Look whether source and kind are what you mean."
        )
    stats = CorpusStats.of(accepted, rejects, len(class_map.classes), SampleRule())
    found = _found(listed, sample)
    distinct = Number(found.value - listed.num_merged, found.exact)
    complete = found.exact and len(records) == distinct.value
    readable_rows = records.filter(pc.is_null(records["reason"]))
    kept = _kept(config, source, base, listed, work, readable_rows if complete else None)
    refused = _refused(listed, distinct, rejects, sample)
    if complete:
        refused = {reason: Number(round(number.value), True) for reason, number in refused.items()}
    expected = distinct.value - sum(number.value for number in refused.values())
    if kept:
        decoded = expected + refused.pop("unknown_class", Number(0, True)).value
        refused |= {reason: Number(lost * decoded / _total(kept), complete) for reason, lost in kept.lost.items()}
        expected = decoded * kept.share
        _check_left(kept, config, source, base)
    num_accepted = max(1, round(expected))
    mean_bytes = pc.mean(accepted["num_bytes"]).as_py()
    splits = shares(kept.splits if kept else Counter(accepted["split"].to_pylist()), num_accepted)
    splits = {name: splits[name] for name in SPLIT_ORDER if name in splits}
    selection = Selection(
        class_map=class_map,
        single_label=source.single_label,
        has_weights=accepted["weights"].null_count == 0,
        stats=stats,
        buckets=(
            Selected(
                bucket=0,
                num_rows=splits,
                num_bytes={name: round(rows * mean_bytes) for name, rows in splits.items()},
                num_rejects=0,
                num_counted=0,
                stats={},
            ),
        ),
    )
    plan = plan_corpus(selection, source.views, config.recipe.sharding, base)
    layouts = {name: plan.layouts[name] for name in splits}
    write_seconds, share_out = _write(
        accepted, selection, source, max(layout.rows_per_row_group for layout in layouts.values()), work.work
    )
    bytes_out = num_accepted * mean_bytes * share_out
    examined_per_s, written_per_s = (
        sample.num_readable / max(sample.seconds, 1e-9),
        len(accepted) / max(write_seconds, 1e-9),
    )
    readable = (
        found.value - sum(listed.refused.values())
        if listed.listed
        else found.value * sample.num_readable / len(records)
    )
    labels = Counter(label for row in sample.rows if not row["reason"] for label in row["labels"])
    if listed.listed and not complete:
        labels = listed.labels
    return DryRun(
        name=config.name,
        origin=source.origin,
        num_parts=listed.num_parts,
        found=found,
        source_bytes=Number(listed.num_bytes or found.value * mean_bytes, listed.listed),
        classes=dict(sorted(labels.items())),
        classes_exact=listed.listed or complete,
        class_names={label: source.class_info(label).name for label in labels},
        refused=refused,
        splits=splits,
        splits_exact=complete or (kept is not None and not kept.num_drawn and all(n.exact for n in refused.values())),
        complete=complete,
        train_at_most=kept.train_at_most if kept else None,
        bytes_out=bytes_out,
        rows_per_row_group={name: layout.rows_per_row_group for name, layout in layouts.items()},
        num_shards=len(plan.shards),
        requests=_requests(listed, sample, found, readable, num_accepted, bytes_out, len(plan.shards)),
        num_sampled=len(records),
        mean_bytes=mean_bytes,
        mean_pixels=pc.mean(pc.multiply(accepted["width_px"].cast(pa.int64()), accepted["height_px"])).as_py(),
        examined_per_s=examined_per_s,
        written_per_s=written_per_s,
        cores=cores,
        hours=(
            readable / examined_per_s / min(cores.number, listed.num_parts)
            + num_accepted / written_per_s / min(cores.number, len(plan.shards))
        )
        / 3600,
        notes=tuple(_notes(config, listed, sample, found, refused, kept)),
        class_map=class_map,
        stats=stats,
    )


def _verdicts(config: CorpusConfig, source: RawCorpus, records: pa.Table) -> tuple[pa.Table, pa.Table, ClassMap]:
    """Of the sample: accepted rows as ROW_SCHEMA, what is refused with its place, classes of what is accepted."""
    good = records.filter(pc.is_null(records["reason"]))
    seen = set(pc.list_flatten(good["labels"]).to_pylist())
    if config.recipe.class_map:
        seen &= set(load_class_map(config.recipe.class_map).source_ids)
    class_map = ClassMap.of(source.class_info(label) for label in seen)
    rows = with_label_ids(good, class_map)
    outside = pc.equal(pc.list_value_length(rows["labels"]), 0)
    lost = good.filter(outside)
    work = ["example_id", "reason", "detail", "base", "key", "offset", "length"]
    unknown = lost.set_column(lost.column_names.index("reason"), "reason", pa.repeat("unknown_class", len(lost)))
    rejects = pa.concat_tables([records.filter(pc.is_valid(records["reason"])), unknown.cast(RECORD_SCHEMA)]).select(
        work
    )
    accepted = rows.filter(pc.invert(outside)).select(ROW_SCHEMA.names).cast(ROW_SCHEMA)
    return accepted, rejects, class_map


def _found(listed: ListedSource, sample: Sample) -> Number:
    """Examples of the source. Parts that do not say how many they hold count by their bytes."""
    counted = {name: n for name, n in sample.counted.items() if name in listed.unknown}
    known = listed.num_known + sum(counted.values())
    left = listed.unknown_bytes - sum(listed.unknown[name] for name in counted)
    if len(counted) == listed.num_unknown:
        return Number(known, True)
    if left <= 0:
        return Number(known, False)
    if counted and (read := sum(listed.unknown[name] for name in counted)):
        return Number(known + left * sum(counted.values()) / read, False)
    sizes = [row.get("num_bytes") or 0 for row in sample.of_unknown]
    return Number(known + left * len(sizes) / max(1, sum(sizes)), False)


def _refused(listed: ListedSource, found: Number, rejects: pa.Table, sample: Sample) -> dict[str, Number]:
    """Files by reason: what the lists say is counted, what the sample has shown beside is carried over to all."""
    by_list, known = (listed.refused, sample.refused_unread) if listed.listed else (Counter[str](), Counter[str]())
    shown = Counter(rejects["reason"].to_pylist()) - known
    scale = (found.value - by_list.total()) / max(1, len(sample.rows) - known.total())
    return {r: Number(by_list[r] + shown[r] * scale, not shown[r]) for r in sorted(by_list | shown)}


def _kept(
    config: CorpusConfig,
    source: RawCorpus,
    base: Base | None,
    listed: ListedSource,
    work: WorkFolder,
    every: pa.Table | None,
) -> Kept | None:
    """What the recipe keeps: of all readable pictures where the sample is `every` one of them, else of those that are
    listed. None where a source says nothing before it is read."""
    if every is not None:
        return kept_rows(lambda: [every], config, source, base)
    if not listed.listed:
        return None

    def readable() -> Iterable[pa.Table]:
        return (rows.filter(pc.is_null(rows["reason"])) for rows in kept_lists(work))

    return kept_rows(readable, config, source, base, examined=False)


def _total(kept: Kept) -> int:
    return max(1, kept.splits.total() + kept.lost.total())


def _check_left(kept: Kept, config: CorpusConfig, source: RawCorpus, base: Base | None) -> None:
    """Raises ValueError where the preparation would end as nothing is left for it."""
    if kept.train_at_most or base or (source.benchmark_rows and "train" not in source.benchmark_rows):
        return
    lost = kept.lost.total()
    why, next_step = "", "Add pictures, or lower val_fraction and test_fraction."
    if lost:
        label, count = kept.largest
        why = f": {lost:,} of {_total(kept):,} pictures are of no class that is kept (the largest, {label!r}, has {count:,})"
        next_step = f"Lower recipe.min_images_per_class, which is {config.recipe.min_images_per_class:,}."
        if "unknown_class" in kept.lost:
            next_step = "Look whether recipe.class_map is meant for this source."
    raise ValueError(f"{source.origin}: no picture would be left for train{why}. {next_step}")


def _write(
    accepted: pa.Table, selection: Selection, source: RawCorpus, rows_per_row_group: int, work: Store
) -> tuple[float, float]:
    """Seconds of writing the accepted sample as one shard, read again from the source; and bytes out over bytes in."""
    spec = ShardSpec(
        key="train/s000/part-00000-of-00001.parquet",
        num_rows=len(accepted),
        rows_per_row_group=rows_per_row_group,
        num_classes=len(selection.class_map.classes),
        single_label=selection.single_label,
        has_weights=selection.has_weights,
    )
    start = time.monotonic()
    info = write_shard(
        ShardTask(corpus=work.child("shard").uri, spec=spec, pieces=(), origin=source.origin), accepted, ""
    )
    return time.monotonic() - start, info.num_bytes / pc.sum(accepted["num_bytes"]).as_py()


def _requests(
    listed: ListedSource,
    sample: Sample,
    found: Number,
    readable: float,
    num_accepted: int,
    bytes_out: float,
    num_shards: int,
) -> dict[str, float]:
    """LIST, GET and PUT of listing and both passes."""
    from_archives = sample.num_with_data / max(1, sample.num_readable)
    windows = listed.num_bytes / _WINDOW_BYTES + listed.num_parts
    examine = readable * (1 - from_archives) + windows * from_archives
    return {
        "LIST": math.ceil((found.value if listed.listed else listed.num_parts) / _LIST_PAGE),
        "GET": examine + num_accepted,
        "PUT": 2 * listed.num_parts + 4 * num_shards + bytes_out / _UPLOAD_BYTES,
    }


def _notes(
    config: CorpusConfig,
    listed: ListedSource,
    sample: Sample,
    found: Number,
    refused: Mapping[str, Number],
    kept: Kept | None,
) -> Iterable[str]:
    recipe = config.recipe
    counted = sum(number.value for reason, number in refused.items() if reason not in NOT_COUNTED)
    pictures = found.value - sum(number.value for reason, number in refused.items() if reason in NOT_COUNTED)
    if counted > config.execution.max_refused_fraction * pictures:
        yield (
            f"{100 * counted / max(1.0, pictures):.3g} % of the pictures would be refused, more than "
            f"max_refused_fraction {config.execution.max_refused_fraction:g} allows: nothing would be published."
        )
    if UNCOUNTED in refused and config.execution.uncounted_losses == "refuse":
        yield (
            "The sample has archives, files or folders that cannot be read to their end, so that nobody knows how much "
            "is missing: nothing would be published (execution.uncounted_losses)."
        )
    if sample.late:
        yield _late(sample)
    if kept and kept.num_small:
        yield (
            f"Classes with fewer than {recipe.min_images_per_class:,} pictures, which would be left out: "
            f"{kept.num_small:,}."
        )
    for name in ("min_images_per_class", "val_per_class"):
        if kept is None and getattr(recipe, name) != CorpusRecipe.model_fields[name].default:
            yield (
                f"recipe.{name} is not in the expected rows: how many pictures a class has is known when all of this "
                "source has been read."
            )
    if listed.num_merged:
        yield f"Rows that repeat another one in everything, and are merged with it: {listed.num_merged:,}."
    if listed.ids_looked_at is not None:
        yield (
            f"Whether ids repeat was looked at for the first {listed.ids_looked_at:,} examples only; the preparation looks "
            "at all before it reads an image."
        )
    if listed.num_parts == 1 and not listed.listed:
        yield "The source is one part, whose first pictures are the sample: one worker examines it alone."
    yield "Duplicates, near duplicates and leakage take the whole corpus and are not looked for."


def _late(sample: Sample) -> str:
    return (
        f"Parts of which the sample has nothing, as they gave nothing in time: {len(sample.late):,} ({sample.late[0]}). "
        "A compressed tar is read to its end before its first picture."
    )
