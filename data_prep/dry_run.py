"""What a preparation will be like, before anything is spent: the source listed, a sample examined, the rest estimated.

Nothing is written to the store: lists and the sample lie in a temporary folder of this machine. What was counted and
what is estimated are told apart. Duplicates and leakage take a whole corpus, and are not looked for.
"""

import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_prep.class_maps import load_class_map
from data_prep.config import CorpusConfig
from data_prep.corpora.open_source import open_source
from data_prep.corpora.raw import Place, RawCorpus
from data_prep.corpus_stats import CorpusStats, SampleRow, SampleRule
from data_prep.examine import read_located
from data_prep.labels import ClassMap
from data_prep.plan_shards import Base, Selection, plan_corpus
from data_prep.records import NOT_COUNTED, RECORD_SCHEMA
from data_prep.report import formats_section, refused_section, sample_sheet, sizes_section
from data_prep.report_html import duration, num_bytes, page, table, text
from data_prep.report_pictures import load_pictures
from data_prep.sample_source import BUDGET, Budget, ListedSource, Sample, list_parts, take_sample
from data_prep.sort_records import ROW_SCHEMA, Selected, with_label_ids
from data_prep.verify_shards import ShardSpec
from data_prep.write_shards import ShardTask, write_shard
from infra.storage import Store, open_store

_MAX_CLASSES_SHOWN = 200
# Of the store's and the readers' code: what one request moves at most.
_LIST_PAGE, _WINDOW_BYTES, _UPLOAD_BYTES = 1000, 4 << 20, 32 << 20


@dataclass(frozen=True)
class Cores:
    """On how many cores the preparation will run, and where they are."""

    number: int
    where: str


@dataclass(frozen=True)
class Number:
    """A count, or an estimate from a sample."""

    value: float
    exact: bool

    def __str__(self) -> str:
        return f"{'' if self.exact else 'about '}{self.value:,.0f}"


_PLAIN = (
    *("name", "origin", "num_parts", "classes_exact", "bytes_out", "num_shards", "num_sampled", "mean_bytes"),
    *("mean_pixels", "examined_per_s", "written_per_s", "hours"),
)


@dataclass(frozen=True)
class DryRun:
    """What was found and what is expected. Times are seconds of one core unless they say otherwise."""

    name: str
    origin: str
    num_parts: int
    found: Number
    """Examples and files that are none."""
    source_bytes: Number
    classes: Mapping[str, int]
    """Pictures by label, as the source calls it, before decoding; of the whole source if `classes_exact`."""
    classes_exact: bool
    class_names: Mapping[str, str]
    refused: Mapping[str, Number]
    """Files by reason."""
    splits: Mapping[str, int]
    """Expected rows."""
    bytes_out: float
    rows_per_row_group: Mapping[str, int]
    num_shards: int
    requests: Mapping[str, float]
    """To an object store, where source and corpus lie in one, by kind."""
    num_sampled: int
    mean_bytes: float
    mean_pixels: float
    examined_per_s: float
    """Images a second of one core: read, decoded, hashed."""
    written_per_s: float
    """The same of reading again and writing to a shard."""
    cores: Cores
    hours: float
    """On all these cores; starting, listing and planning not counted."""
    notes: tuple[str, ...]
    class_map: ClassMap
    stats: CorpusStats
    """Of the sample; likewise the class map."""

    def rows(self) -> list[tuple[str, str]]:
        """As lines of a table."""
        accepted = sum(self.splits.values())
        largest = sorted(self.classes.items(), key=lambda item: (-item[1], item[0]))[:5]
        return [
            ("source", f"{self.origin}, in {self.num_parts:,} part{'s' * (self.num_parts != 1)}"),
            (
                "files found",
                f"{self.found}, {'' if self.source_bytes.exact else 'about '}{num_bytes(self.source_bytes.value)}",
            ),
            (
                "pictures expected",
                f"about {accepted:,}, {num_bytes(accepted * self.mean_bytes)}, before duplicates are dropped",
            ),
            ("splits", ", ".join(f"{name} {rows:,}" for name, rows in self.splits.items()) or "none"),
            (
                "classes",
                f"{len(self.classes):,}{'' if self.classes_exact else ' in the sample'}: "
                + ", ".join(f"{self.class_names.get(label, label)} {count:,}" for label, count in largest)
                + (", ..." if len(self.classes) > len(largest) else ""),
            ),
            (
                "formats",
                ", ".join(
                    f"{kind} {100 * n / max(1, self.stats.num_rows):.3g} %" for kind, n in _by_count(self.stats.kinds)
                ),
            ),
            (
                "refused",
                ", ".join(
                    f"{reason} {number} ({100 * number.value / max(1, self.found.value):.2g} %)"
                    for reason, number in sorted(self.refused.items(), key=lambda item: -item[1].value)
                )
                or "none in the sample",
            ),
            ("a picture", f"{num_bytes(self.mean_bytes)}, {self.mean_pixels / 1e6:.3g} megapixels on average"),
            (
                "shards",
                f"about {self.num_shards:,} of {num_bytes(self.bytes_out)} in all; rows a row group: "
                + ", ".join(f"{name} {rows:,}" for name, rows in self.rows_per_row_group.items()),
            ),
            (
                "speed",
                f"examining {self.examined_per_s:,.0f} images/s a core, writing {self.written_per_s:,.0f} images/s a core",
            ),
            ("time", f"about {duration(3600 * self.hours)} on {self.cores.number:,} cores of {self.cores.where}"),
            (
                "requests",
                ", ".join(f"{kind} {_round(n)}" for kind, n in self.requests.items()) + ", on an object store",
            ),
            ("sample", f"{self.num_sampled:,} files"),
            *(("note", note) for note in self.notes),
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything but pictures, as plain JSON."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: vars(getattr(self, name)) for name in ("found", "source_bytes", "cores")},
            **{name: dict(getattr(self, name)) for name in ("classes", "splits", "rows_per_row_group", "requests")},
            "refused": {reason: vars(number) for reason, number in self.refused.items()},
            "formats": dict(self.stats.kinds),
            "notes": list(self.notes),
        }


def dry_run(
    config: CorpusConfig, cores: Cores, base: Base | None = None, budget: Budget = BUDGET
) -> tuple[DryRun, str]:
    """What is to be expected of a request, and a page with a sample sheet.

    `base` is the corpus that it adds to. Raises ValueError where the source does not exist, is not what it should be,
    or has no picture among those tried; and what the store raises.
    """
    with tempfile.TemporaryDirectory(prefix="vitline-dry-run-", ignore_cleanup_errors=True) as folder:
        work, source = open_store(folder), open_source(config)
        place = Place(work.child("root"), work.child("source"), config.execution.examples_per_chunk)
        listed = list_parts(source, place, config)
        sample = take_sample(source, place, listed, config, budget)
        found = _estimate(config, source, cores, base, listed, sample, work)
        return found, _page(found, config)


def _estimate(
    config: CorpusConfig,
    source: RawCorpus,
    cores: Cores,
    base: Base | None,
    listed: ListedSource,
    sample: Sample,
    work: Store,
) -> DryRun:
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
    refused = _refused(listed, found, rejects, sample)
    num_accepted = max(1, round(found.value - sum(number.value for number in refused.values())))
    mean_bytes = pc.mean(accepted["num_bytes"]).as_py()
    splits = _shares(listed.splits or Counter(accepted["split"].to_pylist()), num_accepted)
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
        accepted, selection, source, max(layout.rows_per_row_group for layout in layouts.values()), work
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
    labels = listed.labels or Counter(label for row in sample.rows if not row["reason"] for label in row["labels"])
    return DryRun(
        name=config.name,
        origin=source.origin,
        num_parts=listed.num_parts,
        found=found,
        source_bytes=Number(listed.num_bytes or found.value * mean_bytes, listed.listed),
        classes=dict(sorted(labels.items())),
        classes_exact=listed.listed,
        class_names={label: source.class_info(label).name for label in labels},
        refused=refused,
        splits=splits,
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
        notes=tuple(_notes(config, listed, sample, found, refused)),
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
    place = ["example_id", "reason", "detail", "base", "key", "offset", "length"]
    unknown = lost.set_column(lost.column_names.index("reason"), "reason", pa.repeat("unknown_class", len(lost)))
    rejects = pa.concat_tables([records.filter(pc.is_valid(records["reason"])), unknown.cast(RECORD_SCHEMA)]).select(
        place
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


def _shares(counts: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` rows in proportion, for splits that get any."""
    every = sum(counts.values())
    shares = {name: round(total * counts[name] / every) for name in ("train", "val", "test") if counts.get(name)}
    return {name: rows for name, rows in shares.items() if rows} or {"train": total}


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
    config: CorpusConfig, listed: ListedSource, sample: Sample, found: Number, refused: Mapping[str, Number]
) -> Iterable[str]:
    recipe = config.recipe
    counted = sum(number.value for reason, number in refused.items() if reason not in NOT_COUNTED)
    pictures = found.value - sum(number.value for reason, number in refused.items() if reason in NOT_COUNTED)
    if counted > config.execution.max_refused_fraction * pictures:
        yield (
            f"{100 * counted / max(1.0, pictures):.3g} % of the pictures would be refused, more than "
            f"max_refused_fraction {config.execution.max_refused_fraction:g} allows: nothing would be published."
        )
    if sample.late:
        yield _late(sample)
    if listed.listed and recipe.min_images_per_class > 1:
        small = sum(count < recipe.min_images_per_class for count in listed.labels.values())
        yield f"Classes with fewer than {recipe.min_images_per_class:,} pictures, which would be left out: {small:,}."
    if recipe.val_per_class:
        yield "val_per_class is not in the expected splits."
    if listed.num_parts == 1 and not listed.listed:
        yield "The source is one part, whose first pictures are the sample: one worker examines it alone."
    yield "Duplicates, near duplicates and leakage take the whole corpus and are not looked for."


def _late(sample: Sample) -> str:
    return (
        f"Parts of which the sample has nothing, as they gave nothing in time: {len(sample.late):,} ({sample.late[0]}). "
        "A compressed tar is read to its end before its first picture."
    )


def _by_count(counts: Mapping[str, int]) -> Sequence[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _round(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}"


# The page


def _page(found: DryRun, config: CorpusConfig) -> str:
    pictures = load_pictures(found.stats, config.recipe.decode, _load)
    sections = [
        ("What to expect", table(found.rows(), ("", ""))),
        ("Classes", _classes(found)),
        ("Sizes", sizes_section(found.stats)),
        ("Formats", formats_section(found.stats)),
        ("Refused in the sample", refused_section(found.stats, pictures)),
        ("Sample of the classes", sample_sheet(found.class_map, found.stats, pictures)),
    ]
    head = f"<h1>{text(found.name)}: before it is prepared</h1><div class=soft>{text(found.origin)}</div>"
    body = "".join(f"<section><h2>{heading}</h2>{content}</section>" for heading, content in sections)
    return page(f"{found.name}, dry run", head + body)


def _load(row: SampleRow) -> bytes:
    return read_located(open_store(row.base), row.key, row.offset, row.length)


def _classes(found: DryRun) -> str:
    shown = _by_count(found.classes)
    rows = [(found.class_names.get(label, label), label, f"{count:,}") for label, count in shown[:_MAX_CLASSES_SHOWN]]
    more = f"<p>{len(shown) - len(rows):,} more.</p>" if len(shown) > len(rows) else ""
    kind = "pictures" if found.classes_exact else "pictures in the sample"
    return table(rows, ("class", "as the source calls it", kind)) + more
