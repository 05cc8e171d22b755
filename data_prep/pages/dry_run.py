"""Dry run of a preparation: lists the source, examines a sample, and estimates the rest before anything is spent.

Nothing is written to the store: listing and sample are kept in a temporary folder of this machine. The result distinguishes
counts from estimates. Duplicates and leakage would need the whole corpus and are not searched.
"""

import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.config import CorpusConfig, CorpusRecipe
from vitline.data_prep.labels.class_maps import load_class_map
from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.pages.dry_run_report import Cores, DryRun, Estimate, render
from vitline.data_prep.pages.expected_rows import Kept, kept_rows, shares
from vitline.data_prep.pages.sample_source import BUDGET, Budget, ListedSource, Sample, list_parts, take_sample
from vitline.data_prep.plan.check_refused import too_many, why_none_is_left
from vitline.data_prep.plan.corpus_stats import CorpusStats, SampleRule
from vitline.data_prep.plan.plan_shards import SPLIT_ORDER, Base, Selection, plan_corpus
from vitline.data_prep.plan.sort_records import ROW_SCHEMA, Selected, with_label_ids
from vitline.data_prep.records import NOT_COUNTED, RECORD_SCHEMA, UNCOUNTED
from vitline.data_prep.shards.verify_shards import ShardSpec
from vitline.data_prep.shards.write_shards import ShardTask, write_shard
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.raw import ImageSource, WorkFolder, kept_lists
from vitline.infra.storage import open_store

# Most that one request moves, in the code of stores and readers.
_LIST_PAGE, _WINDOW_BYTES, _UPLOAD_BYTES = 1000, 4 << 20, 32 << 20


@dataclass(frozen=True)
class _Observed:
    """A request with its source, as far as a dry run looked at it: what an estimate is computed from."""

    config: CorpusConfig
    source: ImageSource
    base: Base | None
    listed: ListedSource
    sample: Sample
    work: WorkFolder


@dataclass(frozen=True)
class _SampleVerdicts:
    """The records of the sample, divided by the rules that can be applied to single images."""

    records: pa.Table
    accepted: pa.Table
    """As ROW_SCHEMA."""
    rejects: pa.Table
    class_map: ClassMap
    """Classes of the accepted images."""

    @property
    def mean_bytes(self) -> float:
        mean: float = pc.mean(self.accepted["num_bytes"]).as_py()
        return mean


@dataclass(frozen=True)
class _Expected:
    """What a preparation is expected to find, refuse and keep."""

    found: Estimate
    complete: bool
    """Whether the sample is the whole source."""
    refused: dict[str, Estimate]
    kept: Kept | None
    """What the recipe keeps; None if the source says nothing before it is read."""
    splits: dict[str, int]
    """Accepted rows by split."""

    @property
    def num_accepted(self) -> int:
        return sum(self.splits.values())


def dry_run(
    config: CorpusConfig, cores: Cores, base: Base | None = None, budget: Budget = BUDGET
) -> tuple[DryRun, str]:
    """The expected result and cost of a request, and an HTML page with a sample sheet.

    `base`: the corpus that the request adds to. Raises ValueError if the source does not exist, is not of the expected kind,
    or has no image in the sample; and what the store raises.
    """
    with tempfile.TemporaryDirectory(prefix="vitline-dry-run-", ignore_cleanup_errors=True) as folder:
        scratch, source = open_store(folder), open_source(config)
        work = WorkFolder(scratch.child("root"), scratch.child("source"), config.execution.examples_per_chunk)
        listed = list_parts(source, work, config, base.shards() if base else (), budget)
        sample = take_sample(source, work, listed, config, budget)
        found = _estimate(_Observed(config, source, base, listed, sample, work), cores)
        return found, render(found, config)


def _estimate(observed: _Observed, cores: Cores) -> DryRun:
    config, source, listed, sample = observed.config, observed.source, observed.listed, observed.sample
    verdicts = _judge_sample(observed)
    expected = _expect(observed, verdicts)
    stats = CorpusStats.of(verdicts.accepted, verdicts.rejects, len(verdicts.class_map.classes), SampleRule())
    selection = _expected_selection(source, verdicts, expected, stats)
    plan = plan_corpus(selection, source.views, config.recipe.sharding, observed.base)
    rows_per_row_group = {name: plan.layouts[name].rows_per_row_group for name in expected.splits}
    num_accepted, num_shards, mean_bytes = expected.num_accepted, len(plan.shards), verdicts.mean_bytes
    write_s, bytes_ratio = _measure_writing(observed, verdicts, selection, max(rows_per_row_group.values()))
    examined_per_s = sample.num_readable / max(sample.seconds, 1e-9)
    written_per_s = len(verdicts.accepted) / max(write_s, 1e-9)
    num_readable = _num_readable(observed, verdicts, expected)
    examine_s = num_readable / examined_per_s / min(cores.number, listed.num_parts)
    write_all_s = num_accepted / written_per_s / min(cores.number, num_shards)
    bytes_out = num_accepted * mean_bytes * bytes_ratio
    labels = _label_counts(observed, expected)
    return DryRun(
        name=config.name,
        origin=source.origin,
        structure=source.structure(observed.work),
        num_parts=listed.num_parts,
        found=expected.found,
        source_bytes=Estimate(listed.num_bytes or expected.found.value * mean_bytes, listed.listed),
        classes=dict(sorted(labels.items())),
        classes_exact=listed.listed or expected.complete,
        class_names={label: source.class_info(label).name for label in labels},
        refused=expected.refused,
        splits=expected.splits,
        splits_exact=_splits_are_exact(expected),
        complete=expected.complete,
        train_at_most=expected.kept.train_at_most if expected.kept else None,
        bytes_out=bytes_out,
        rows_per_row_group=rows_per_row_group,
        num_shards=num_shards,
        requests=_requests(observed, expected, num_readable, bytes_out, num_shards),
        num_sampled=len(verdicts.records),
        mean_bytes=mean_bytes,
        mean_pixels=_mean_pixels(verdicts.accepted),
        examined_per_s=examined_per_s,
        written_per_s=written_per_s,
        cores=cores,
        hours=(examine_s + write_all_s) / 3600,
        notes=tuple(_notes(observed, expected)),
        class_map=verdicts.class_map,
        stats=stats,
    )


def _judge_sample(observed: _Observed) -> _SampleVerdicts:
    """Divide the sample into accepted and refused images. Raises ValueError if no image is accepted."""
    sample = observed.sample
    sample.rows = list({row["example_id"]: row for row in reversed(sample.rows)}.values())[::-1]  # the first of each id
    records = pa.Table.from_pylist(sample.rows, schema=RECORD_SCHEMA)
    accepted, rejects, class_map = _verdicts(observed.config, observed.source, records)
    if not len(accepted):
        reasons = ", ".join(f"{reason} {n}" for reason, n in Counter(rejects["reason"].to_pylist()).items())
        raise ValueError(
            f"{observed.source.origin}: none of the {len(records):,} sampled files is a labelled image "
            f"({_late(sample) if sample.late else reasons}). Check that source and kind are correct."
        )
    return _SampleVerdicts(records, accepted, rejects, class_map)


def _expect(observed: _Observed, verdicts: _SampleVerdicts) -> _Expected:
    """Extrapolate the sample to the whole source. Raises ValueError if nothing would be left for train."""
    listed, records = observed.listed, verdicts.records
    found = _found(listed, observed.sample)
    distinct = Estimate(found.value - listed.num_merged, found.exact)
    complete = found.exact and len(records) == distinct.value
    kept = _kept(observed, records.filter(pc.is_null(records["reason"])) if complete else None)
    refused = _refused(listed, distinct, verdicts.rejects, observed.sample)
    if complete:
        refused = {reason: Estimate(round(number.value), True) for reason, number in refused.items()}
    num_expected = distinct.value - sum(number.value for number in refused.values())
    if kept:
        num_decoded = num_expected + refused.pop("unknown_class", Estimate(0, True)).value
        refused |= {reason: Estimate(lost * num_decoded / kept.total, complete) for reason, lost in kept.lost.items()}
        num_expected = num_decoded * kept.share
        _check_left(observed, kept)
    by_split = kept.splits if kept else Counter(verdicts.accepted["split"].to_pylist())
    splits = shares(by_split, max(1, round(num_expected)))
    return _Expected(found, complete, refused, kept, {name: splits[name] for name in SPLIT_ORDER if name in splits})


def _expected_selection(
    source: ImageSource, verdicts: _SampleVerdicts, expected: _Expected, stats: CorpusStats
) -> Selection:
    """The selection that planning would make of the expected rows, as a single bucket."""
    bucket = Selected(
        bucket=0,
        num_rows=expected.splits,
        num_bytes={name: round(rows * verdicts.mean_bytes) for name, rows in expected.splits.items()},
        num_rejects=0,
        stats={},
    )
    return Selection(
        class_map=verdicts.class_map,
        single_label=source.single_label,
        has_weights=verdicts.accepted["weights"].null_count == 0,
        stats=stats,
        buckets=(bucket,),
    )


def _splits_are_exact(expected: _Expected) -> bool:
    """Whether the rows by split are counted: in the sample, or in a listing without drawn splits and estimated refusals."""
    if expected.complete:
        return True
    refused_exactly = all(number.exact for number in expected.refused.values())
    return expected.kept is not None and not expected.kept.num_drawn and refused_exactly


def _num_readable(observed: _Observed, verdicts: _SampleVerdicts, expected: _Expected) -> float:
    """Examples that the preparation will read and decode."""
    listed, found = observed.listed, expected.found.value
    if listed.listed:
        return found - sum(listed.refused.values())
    return found * observed.sample.num_readable / len(verdicts.records)


def _label_counts(observed: _Observed, expected: _Expected) -> Counter[str]:
    """Images by label: of the whole source if it was examined or is listed, else of the sample."""
    if observed.listed.listed and not expected.complete:
        return observed.listed.labels
    return Counter(label for row in observed.sample.rows if not row["reason"] for label in row["labels"])


def _mean_pixels(accepted: pa.Table) -> float:
    mean: float = pc.mean(pc.multiply(accepted["width_px"].cast(pa.int64()), accepted["height_px"])).as_py()
    return mean


def _verdicts(config: CorpusConfig, source: ImageSource, records: pa.Table) -> tuple[pa.Table, pa.Table, ClassMap]:
    """Accepted rows as ROW_SCHEMA, refused rows with their locations, and the classes of the accepted ones."""
    good = records.filter(pc.is_null(records["reason"]))
    seen = set(pc.list_flatten(good["labels"]).to_pylist())
    if config.recipe.class_map:
        seen &= set(load_class_map(config.recipe.class_map).source_ids)
    class_map = ClassMap.of(source.class_info(label) for label in seen)
    rows = with_label_ids(good, class_map)
    outside = pc.equal(pc.list_value_length(rows["labels"]), 0)
    lost = good.filter(outside)
    unknown = lost.set_column(lost.column_names.index("reason"), "reason", pa.repeat("unknown_class", len(lost)))
    rejects = pa.concat_tables([records.filter(pc.is_valid(records["reason"])), unknown.cast(RECORD_SCHEMA)])
    rejects = rejects.select(["example_id", "reason", "detail", "base", "key", "offset", "length"])
    accepted = rows.filter(pc.invert(outside)).select(ROW_SCHEMA.names).cast(ROW_SCHEMA)
    return accepted, rejects, class_map


def _found(listed: ListedSource, sample: Sample) -> Estimate:
    """Number of examples of the source. For parts that do not report their number, it is estimated from their bytes."""
    counted = {name: n for name, n in sample.counted.items() if name in listed.unknown}
    known = listed.num_known + sum(counted.values())
    left = listed.unknown_bytes - sum(listed.unknown[name] for name in counted)
    if len(counted) == listed.num_unknown:
        return Estimate(known, True)
    if left <= 0:
        return Estimate(known, False)
    if counted and (read := sum(listed.unknown[name] for name in counted)):
        return Estimate(known + left * sum(counted.values()) / read, False)
    sizes = [row.get("num_bytes") or 0 for row in sample.of_unknown]
    return Estimate(known + left * len(sizes) / max(1, sum(sizes)), False)


def _refused(listed: ListedSource, found: Estimate, rejects: pa.Table, sample: Sample) -> dict[str, Estimate]:
    """Refused files by reason: counted as far as the source lists them, otherwise extrapolated from the sample."""
    by_list, known = (listed.refused, sample.refused_unread) if listed.listed else (Counter[str](), Counter[str]())
    shown = Counter(rejects["reason"].to_pylist()) - known
    scale = (found.value - by_list.total()) / max(1, len(sample.rows) - known.total())
    return {r: Estimate(by_list[r] + shown[r] * scale, not shown[r]) for r in sorted(by_list | shown)}


def _kept(observed: _Observed, every: pa.Table | None) -> Kept | None:
    """What the recipe keeps. `every`: all readable images, if the sample is the whole source; otherwise the listed images are
    used. None if the source does not list its examples."""
    request = observed.config, observed.source, observed.base
    if every is not None:
        return kept_rows(lambda: [every], *request)
    if not observed.listed.listed:
        return None

    def readable() -> Iterable[pa.Table]:
        return (rows.filter(pc.is_null(rows["reason"])) for rows in kept_lists(observed.work))

    return kept_rows(readable, *request, examined=False)


def _check_left(observed: _Observed, kept: Kept) -> None:
    """Raises ValueError if the preparation would fail because no image is left for train."""
    config, source = observed.config, observed.source
    if kept.train_at_most or observed.base or source.is_test_set:
        return
    raise ValueError(
        f"{source.origin}: no image would be left for train. Of {kept.total:,} images {kept.lost.total():,} would be left out. "
        f"{why_none_is_left(config, kept.splits.total(), kept.lost, kept.labels)}"
    )


def _measure_writing(
    observed: _Observed, verdicts: _SampleVerdicts, selection: Selection, rows_per_row_group: int
) -> tuple[float, float]:
    """Seconds to write the accepted sample as one shard, read again from the source; and bytes written per image byte."""
    accepted = verdicts.accepted
    spec = ShardSpec(
        corpus_name=observed.config.name,
        key="train/s000/part-00000-of-00001.parquet",
        num_rows=len(accepted),
        rows_per_row_group=rows_per_row_group,
        num_classes=len(selection.class_map.classes),
        single_label=selection.single_label,
        has_weights=selection.has_weights,
    )
    shard = observed.work.store.child("shard")
    start = time.monotonic()
    info = write_shard(ShardTask(corpus=shard.uri, spec=spec, pieces=(), origin=observed.source.origin), accepted, "")
    return time.monotonic() - start, info.num_bytes / pc.sum(accepted["num_bytes"]).as_py()


def _requests(
    observed: _Observed, expected: _Expected, num_readable: float, bytes_out: float, num_shards: int
) -> dict[str, float]:
    """LIST, GET and PUT requests of listing, examining and writing."""
    listed, sample = observed.listed, observed.sample
    from_archives = sample.num_with_data / max(1, sample.num_readable)
    windows = listed.num_bytes / _WINDOW_BYTES + listed.num_parts
    examine = num_readable * (1 - from_archives) + windows * from_archives
    return {
        "LIST": math.ceil((expected.found.value if listed.listed else listed.num_parts) / _LIST_PAGE),
        "GET": examine + expected.num_accepted,
        "PUT": 2 * listed.num_parts + 4 * num_shards + bytes_out / _UPLOAD_BYTES,
    }


def _notes(observed: _Observed, expected: _Expected) -> Iterator[str]:
    """Sentences on what would go wrong, and on what the estimate does not include."""
    listed, kept = observed.listed, expected.kept
    yield from _refusal_notes(observed.config, expected)
    if observed.sample.late:
        yield _late(observed.sample)
    recipe = observed.config.recipe
    if kept and kept.num_small:
        yield (
            f"Classes with fewer than {recipe.min_images_per_class:,} images, which would be left out: "
            f"{kept.num_small:,}."
        )
    for name in ("min_images_per_class", "val_per_class"):
        if kept is None and getattr(recipe, name) != CorpusRecipe.model_fields[name].default:
            yield (
                f"recipe.{name} is not considered in the expected rows: the number of images per class is known only after "
                "this source was read completely."
            )
    if listed.num_merged:
        there = ", or that are in the corpus already" if recipe.known_ids == "skip" else ""
        yield f"Rows that equal another one in every field and are merged with it{there}: {listed.num_merged:,}."
    if listed.ids_looked_at is not None:
        yield (
            f"Only the first {listed.ids_looked_at:,} examples were checked for repeated ids; the preparation checks all of "
            "them before it reads an image."
        )
    if listed.num_parts == 1 and not listed.listed:
        yield "The source is a single part that one worker examines; the sample is its first images."
    yield "Duplicates, near duplicates and leakage are not searched: that needs the whole corpus."


def _refusal_notes(config: CorpusConfig, expected: _Expected) -> Iterator[str]:
    counted = {reason: round(n.value) for reason, n in expected.refused.items() if reason not in NOT_COUNTED}
    if problem := too_many(config, counted, expected.num_accepted):
        yield f"As estimated, {problem}: nothing would be published."
    if UNCOUNTED in expected.refused and config.execution.uncounted_losses == "refuse":
        yield (
            "The sample has archives, files or folders that cannot be read to their end, so the number of missing images is "
            "unknown: nothing would be published (execution.uncounted_losses)."
        )


def _late(sample: Sample) -> str:
    return (
        f"Parts left out of the sample because they timed out: {len(sample.late):,} ({sample.late[0]}). "
        "A compressed tar is read to its end before its first image is available."
    )
