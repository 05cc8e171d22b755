"""report.html: a single self-contained page that shows what is in a corpus. No scripts, no other files."""

import html
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.pages.report_images import leaks_by_size, load_images
from vitline.data_prep.plan.check_refused import loss_text
from vitline.data_prep.plan.corpus_stats import (
    ASPECT_RATIO,
    FILE_BYTES,
    SIDE_PX,
    CorpusStats,
    LogScale,
    SampleRow,
)
from vitline.data_prep.plan.leakage import own_splits_text
from vitline.data_prep.shard_format import Manifest, SegmentInfo
from vitline.infra.html.page import render
from vitline.infra.html.plots import Axis, Bar, Line, Plot, ticks
from vitline.infra.html.text import duration, num_bytes, short

_MAX_CLASS_BARS, _MAX_CLASSES_NAMED, _MAX_LIST_CHARS = 40, 20, 800_000

_SPLIT_ORDER = ("train", "val", "test")
_ADJECTIVE = {"train": "training", "val": "validation"}
_KINDS = {
    "same_file": "the same file",
    "same_pixels": "same pixels, other bytes",
    "near": "similar images",
    "conflicting_labels": "of these, labels differ from the image that stays",
    "across_splits": "of these, in another split than the image that stays",
}


def render_report(
    manifest: Manifest,
    class_map: ClassMap,
    stats: CorpusStats,
    load: Callable[[SampleRow], bytes],
) -> str:
    """The page, self-contained, below 3 MB.

    `load` returns the bytes of an image and is called from 16 threads; if it raises, the page shows the reason in place of the
    image.
    """
    by_split = {name: stats.splits[name].class_counts for name in _by_order(stats.splits)}
    labels = stats.labels_per_image
    order = np.argsort(-stats.class_counts, kind="stable")
    many = len(order) > _MAX_CLASS_BARS
    return render(
        "data_prep/pages/report.html.j2",
        title=f"{manifest.name}/{manifest.version}",
        credit=manifest.provenance.get("credit") or manifest.provenance.get("origin", ""),
        manifest=manifest,
        stats=stats,
        images=load_images(stats, manifest.decode_policy, load),
        lost=loss_text(manifest),
        leaks=leaks_by_size(stats),
        num_leaked=sum(found.count - found.num_left_out for found in stats.leakage.values()),
        mean_labels=float(labels @ np.arange(len(labels))) / max(1, int(labels.sum())),
        clean=sorted(stats.compared - {(leak.corpus, leak.corpus_split) for leak in stats.leakage}),
        own_splits=own_splits_text(manifest),
        splits=_splits(manifest, stats),
        by_split=by_split,
        largest_first=order.tolist(),
        many_classes=_many_classes(class_map, stats.class_counts, order, by_split) if many else None,
        sizes=size_plots(stats),
        class_map=class_map,
        times=_times(manifest),
        provenance=_provenance(manifest),
        request=json.dumps(manifest.provenance.get("request", {}), indent=1, ensure_ascii=False),
        adjectives=_ADJECTIVE,
        kinds=_KINDS,
    )


def _splits(manifest: Manifest, stats: CorpusStats) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, split in manifest.splits.items():
        shards = sum(split.shards_in_use(segment) for segment in split.segments)
        owners = {segment.split for segment in split.segments}
        note = "" if owners == {name} else "consists of " + " + ".join(dict.fromkeys(map(_shown_of, split.segments)))
        size = num_bytes(stats.splits[name].num_bytes) if name in stats.splits else ""
        rows.append((name, f"{split.num_rows:,}", size, f"{split.num_row_groups:,}", f"{shards:,}", note))
    return rows


def _shown_of(segment: SegmentInfo) -> str:
    """The part of a segment that a joined split lists."""
    return f"the first {segment.num_rows:,} of {segment.split}" if segment.rows_left_out else segment.split


def _many_classes(
    class_map: ClassMap, total: np.ndarray, order: np.ndarray, by_split: Mapping[str, np.ndarray]
) -> dict[str, object]:
    """For the page of a corpus with too many classes for one bar each."""
    top = min(_MAX_CLASSES_NAMED, len(order) // 2)

    def rows(labels: np.ndarray) -> list[tuple[str, ...]]:
        every = (total, *by_split.values())
        return [(class_map.classes[i].name, *(f"{counts[i]:,}" for counts in every)) for i in labels.tolist()]

    return {
        "plot": _rank_plot({name: -np.sort(-counts) for name, counts in by_split.items()}),
        "quantiles": _class_quantiles({"all": total, **by_split}),
        "columns": ("class", "all", *by_split),
        "largest": rows(order[:top]),
        "smallest": rows(order[::-1][:top]),
        "list": _class_list(class_map, total),
    }


def _rank_plot(sorted_counts: Mapping[str, np.ndarray]) -> Plot:
    """Class sizes in descending order on a log scale, one line per split; a line ends where empty classes begin."""
    num_ranks = max(map(len, sorted_counts.values()))
    largest = max(int(counts[0]) for counts in sorted_counts.values())
    decades = max(1, math.ceil(math.log10(max(largest, 2))))
    marks = [1, *(int(t) for t in ticks(0, num_ranks)[1:] if t < 0.9 * num_ranks), num_ranks]
    return Plot(
        f"sizes of {num_ranks:,} classes, the largest of {largest:,} images",
        Axis("classes by rank, largest first", [((mark - 0.5) / num_ranks, f"{mark:,}") for mark in marks]),
        Axis("images in the class, log scale", [(d / decades, short(10**d)) for d in range(decades + 1)]),
        lines=[Line(name, name, _steps(own[own > 0], num_ranks, decades)) for name, own in sorted_counts.items()],
    )


def _steps(counts: np.ndarray, num_ranks: int, decades: int) -> list[tuple[float, float]]:
    """A line of at most a few hundred steps; the first 100 classes are drawn one by one."""
    ranks = np.unique(np.concatenate([np.arange(100), np.linspace(0, len(counts) - 1, 400).astype(int)]))
    ranks = ranks[(ranks >= 0) & (ranks < len(counts))]
    x = np.append(ranks, len(counts)) / num_ranks
    y = np.log10(counts[ranks]) / decades
    return list(zip(np.repeat(x, 2)[1:-1].tolist(), np.repeat(y, 2).tolist(), strict=True))


def _class_quantiles(counts: Mapping[str, np.ndarray]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, own in counts.items():
        quantiles = np.quantile(own, (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1), method="inverted_cdf").astype(int).tolist()
        largest_first = np.cumsum(-np.sort(-own))
        half = int(np.searchsorted(largest_first, largest_first[-1] / 2)) + 1
        rows.append((name, *(f"{q:,}" for q in quantiles), f"{half:,}", f"{(own == 0).sum():,}"))
    return rows


def _class_list(class_map: ClassMap, counts: np.ndarray) -> str:
    """Every class as a line of plain text, which browsers can search. Tables of 21,841 rows are slow."""
    order = sorted(range(len(counts)), key=lambda i: (class_map.classes[i].name.casefold(), i))
    lines, room = [], _MAX_LIST_CHARS
    for i in order:
        info = class_map.classes[i]
        source_id = f" ({info.source_id})" if info.source_id != info.name else ""
        lines.append(f"{info.name[:80]}{source_id[:40]} {counts[i]:,}")
        room -= len(html.escape(lines[-1]))
        if room < 0:
            lines.append(f"... {len(order) - len(lines):,} more; classes.json and stats.json list all")
            break
    return "\n".join(lines)


def size_plots(stats: CorpusStats) -> list[tuple[Plot, tuple[str, ...]] | None]:
    """Histograms of image sides, aspect ratios and file sizes, each with its percentiles 5, 50 and 95."""
    powers_of_two, powers_of_ten = 2.0 ** np.arange(-8, 33), 10.0 ** np.arange(13)
    return [
        _histogram(stats.side_px, SIDE_PX, "√(width × height), px", powers_of_two, "{:.0f}".format),
        _histogram(stats.aspect_ratio, ASPECT_RATIO, "width / height", powers_of_two, "{:.3g}".format),
        _histogram(stats.file_bytes, FILE_BYTES, "file size in bytes", powers_of_ten, num_bytes),
    ]


def _histogram(
    counts: np.ndarray, scale: LogScale, title: str, marks: np.ndarray, name: Callable[[float], str]
) -> tuple[Plot, tuple[str, ...]] | None:
    """The octaves that are not empty, on a log scale; None if all are."""
    used = np.flatnonzero(counts)
    if not len(used):
        return None
    step = scale.bins_per_octave
    low, high = used[0] // step * step, min(len(counts), (used[-1] // step + 1) * step)
    edges = scale.edges[low : high + 1]
    places = np.log(marks / edges[0]) / np.log(edges[-1] / edges[0])
    inside = np.flatnonzero((places > -0.001) & (places < 1.001))
    shown = inside[:: max(1, -(-len(inside) // 6))]  # as many as fit on a phone
    heights = [t for t in ticks(0, int(counts.max()), 4) if t == int(t)]
    width = 1 / (high - low)
    bars = [
        Bar(i * width, 0.92 * width, n / heights[-1], f"{name(a)} to {name(b)}: {n:,}")
        for i, (n, (a, b)) in enumerate(zip(counts[low:high].tolist(), itertools.pairwise(edges), strict=True))
        if n
    ]
    x = Axis(f"{title}, log scale", [(float(places[i]), name(float(marks[i]))) for i in shown])
    y = Axis("images", [(t / heights[-1], short(t)) for t in heights])
    return Plot(title, x, y, bars), tuple(name(scale.quantile(counts, q)) for q in (0.05, 0.5, 0.95))


def _times(manifest: Manifest) -> list[tuple[str, ...]]:
    counts = manifest.counts
    rows: list[tuple[str, ...]] = []
    for step, seconds in manifest.provenance.get("seconds", {}).items():
        number = counts.num_found if step in ("list", "examine") else counts.num_accepted
        rate = f"{number / seconds:,.0f}/s" if seconds > 0 else ""
        moved = f"{num_bytes(counts.num_bytes / seconds)}/s" if step in ("examine", "write") and seconds > 0 else ""
        rows.append((step, duration(seconds), rate, moved))
    return rows


def _provenance(manifest: Manifest) -> list[tuple[str, str]]:
    provenance = manifest.provenance
    known = ("request", "seconds", "libraries", "credit")
    libraries = ", ".join(f"{name} {version}" for name, version in provenance.get("libraries", {}).items())
    rows = [
        ("digest", manifest.digest),
        ("class map digest", manifest.class_map_digest),
        ("order seed", f"{manifest.order_seed}"),
        ("libraries", libraries),
        *((name.replace("_", " "), _plain(value)) for name, value in provenance.items() if name not in known),
    ]
    return [row for row in rows if row[1]]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _by_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (_SPLIT_ORDER.index(name) if name in _SPLIT_ORDER else 3, name))
