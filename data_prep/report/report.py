"""report.html: a single self-contained page that shows what is in a corpus. No scripts, no other files."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from data_prep.corpus_stats import (
    ASPECT_RATIO,
    FILE_BYTES,
    SIDE_PX,
    CorpusStats,
    Finding,
    Findings,
    LogScale,
    SampleRow,
)
from data_prep.decode import DecodePolicy
from data_prep.labels.classes import ClassMap
from data_prep.plan.check_refused import loss_text
from data_prep.plan.leakage import own_splits_said
from data_prep.report.report_html import (
    Axis,
    bar_plot,
    duration,
    num_bytes,
    page,
    rank_plot,
    stacked_bars,
    table,
    text,
)
from data_prep.report.report_pictures import Pictures, leaks_by_size, load_pictures
from data_prep.shard_format import Manifest, SegmentInfo

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
    pictures = load_pictures(stats, manifest.decode_policy, load)
    title = f"{manifest.name}/{manifest.version}"
    credit = manifest.provenance.get("credit") or manifest.provenance.get("origin", "")
    sections = [
        ("Leakage", _leakage(stats, pictures) + _own_splits(manifest)),
        ("Splits", _splits(manifest, stats)),
        ("Classes", _classes(class_map, stats)),
        ("Sizes", sizes_section(stats)),
        ("Formats", formats_section(stats)),
        ("Refused", refused_section(stats, pictures)),
        ("Duplicates", _duplicates(stats, pictures)),
        ("Sample images by class", sample_sheet(class_map, stats, pictures)),
        ("Time by stage", _times(manifest)),
        ("Decode policy", _decode_policy(manifest.decode_policy)),
        ("Provenance", _provenance(manifest)),
    ]
    body = "".join(f"<section><h2>{heading}</h2>{content}</section>" for heading, content in sections)
    head = f'<h1>{text(title)}</h1><div class="soft">digest {manifest.digest}<br>{text(credit)}</div>'
    lost = loss_text(manifest)
    banner = f'<p class="banner bad"><strong>{text(lost)}</strong></p>' if lost else ""
    return page(title, head + banner + _tiles(manifest, stats) + body)


def _tiles(manifest: Manifest, stats: CorpusStats) -> str:
    leaked = sum(found.count - found.num_left_out for found in stats.leakage.values())
    tiles = [
        ("images", f"{manifest.counts.num_accepted:,}", ""),
        ("classes", f"{manifest.num_classes:,}", ""),
        ("bytes of images", num_bytes(manifest.counts.num_bytes), ""),
        ("refused", f"{manifest.counts.num_refused:,}", ""),
    ]
    if not manifest.single_label:
        numbers = stats.labels_per_image
        tiles.append(("labels per image", f"{(numbers @ np.arange(len(numbers))) / max(1, numbers.sum()):.2f}", ""))
    tiles.append(("leaked", f"{leaked:,}", " class=bad" if leaked else "") if stats.compared else ("leaked", "?", ""))
    return f'<div class="tiles">{"".join(f"<div{mark}><b>{v}</b>{text(name)}</div>" for name, v, mark in tiles)}</div>'


def _leakage(stats: CorpusStats, pictures: Pictures) -> str:
    leaks = leaks_by_size(stats)
    parts = []
    for leak, found, with_pictures in leaks:
        where = f"the {leak.corpus_split} split of {leak.corpus}"
        kept = found.count - found.num_left_out
        if not kept:
            after = "All of them are left out of this corpus."
        elif found.num_left_out:
            after = f"{found.num_left_out:,} of them are left out; {kept:,} are still in this corpus."
        else:
            after = "They are still in this corpus, so scores on that split would be too high."
        subject = (
            f"{_ADJECTIVE.get(leak.own_split, leak.own_split)} image{'s match' if found.count > 1 else ' matches'}"
        )
        mark = "bad" if kept else "plain"
        parts.append(
            f'<p class="banner {mark}"><strong>{found.count:,} {text(subject)} {text(where)}.</strong> {after}</p>'
        )
        if with_pictures:
            parts.append(_pairs(found, pictures, f"{leak.own_split} here", f"{leak.corpus_split} there"))
    if any(found.count > found.num_left_out for _, found, _ in leaks):
        parts.append(
            "<p>To leave such images out, name the evaluation corpora in <code>recipe.decontaminate</code> "
            "and prepare again.</p>"
        )
    return "".join(parts) + _compared(stats)


def _compared(stats: CorpusStats) -> str:
    if not stats.compared:
        return (
            '<p class="banner plain"><strong>Not checked.</strong> This corpus was not compared with any evaluation set (a '
            "corpus with a test split, or with a val split that its source names): either none was prepared under its root at "
            "that time, or this corpus is a benchmark, whose splits are as published. It may contain test images of other "
            "corpora.</p>"
        )
    older = ", ".join(sorted(stats.older_versions))
    older = f"<p>Older versions were not compared: {text(older)}.</p>" if older else ""
    clean = sorted(stats.compared - {(leak.corpus, leak.corpus_split) for leak in stats.leakage})
    if not clean:
        return older
    listed = ", ".join(f"{corpus} ({split})" for corpus, split in clean)
    start = "None found" if not stats.leakage else "None found in the other evaluation sets"
    return (
        f'<p class="banner"><strong>{start}.</strong> No training image of this corpus shows one of the evaluation images '
        f"that it was compared with: {text(listed)}.</p>{older}"
    )


def _own_splits(manifest: Manifest) -> str:
    sentence = own_splits_said(manifest)
    return f'<p class="banner plain">{text(sentence)}</p>' if sentence else ""


def _splits(manifest: Manifest, stats: CorpusStats) -> str:
    rows = []
    for name, split in manifest.splits.items():
        shards = sum(split.shards_in_use(segment) for segment in split.segments)
        owners = {segment.split for segment in split.segments}
        note = "" if owners == {name} else "consists of " + " + ".join(dict.fromkeys(map(_shown_of, split.segments)))
        size = num_bytes(stats.splits[name].num_bytes) if name in stats.splits else ""
        rows.append((name, f"{split.num_rows:,}", size, f"{split.num_row_groups:,}", f"{shards:,}", note))
    return table(rows, ("split", "images", "bytes", "row groups", "shards", ""))


def _shown_of(segment: SegmentInfo) -> str:
    """The part of a segment that a joined split lists."""
    return f"the first {segment.num_rows:,} of {segment.split}" if segment.rows_left_out else segment.split


def _classes(class_map: ClassMap, stats: CorpusStats) -> str:
    names = [info.name for info in class_map.classes]
    by_split = {name: stats.splits[name].class_counts for name in _by_order(stats.splits)}
    total = stats.class_counts
    order = np.argsort(-total, kind="stable")
    if len(names) <= _MAX_CLASS_BARS:
        return stacked_bars([names[i] for i in order], {name: counts[order] for name, counts in by_split.items()})
    ranked = {}
    for name, counts in by_split.items():
        ranked[name] = -np.sort(-counts)
    plot = rank_plot(ranked, f"sizes of {len(names):,} classes, from {total.max():,} to {total.min():,} images")

    def listed(labels: np.ndarray) -> str:
        rows = ((names[i], *(f"{counts[i]:,}" for counts in (total, *by_split.values()))) for i in labels.tolist())
        return table(rows, ("class", "all", *by_split))

    top = min(_MAX_CLASSES_NAMED, len(names) // 2)
    return (
        plot
        + _class_quantiles({"all": total, **by_split})
        + f'<div class="two"><div><h3>The {top} largest</h3>{listed(order[:top])}</div>'
        + f"<div><h3>The {top} smallest</h3>{listed(order[::-1][:top])}</div></div>"
        + _class_list(class_map, total)
    )


def _class_quantiles(counts: Mapping[str, np.ndarray]) -> str:
    rows = []
    for name, own in counts.items():
        quantiles = np.quantile(own, (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1), method="inverted_cdf").astype(int).tolist()
        largest_first = np.cumsum(-np.sort(-own))
        half = int(np.searchsorted(largest_first, largest_first[-1] / 2)) + 1
        rows.append((name, *(f"{q:,}" for q in quantiles), f"{half:,}", f"{(own == 0).sum():,}"))
    head = ("images per class", "minimum", "10 %", "25 %", "median", "75 %", "90 %", "maximum")
    return table(rows, (*head, "classes with half of all images", "empty classes"))


def _class_list(class_map: ClassMap, counts: np.ndarray) -> str:
    """Every class as a line of plain text, which browsers can search. Tables of 21,841 rows are slow."""
    order = sorted(range(len(counts)), key=lambda i: (class_map.classes[i].name.casefold(), i))
    lines, room = [], _MAX_LIST_CHARS
    for i in order:
        info = class_map.classes[i]
        source_id = f" ({info.source_id})" if info.source_id != info.name else ""
        lines.append(text(f"{info.name[:80]}{source_id[:40]} {counts[i]:,}"))
        room -= len(lines[-1])
        if room < 0:
            lines.append(f"... {len(order) - len(lines):,} more; classes.json and stats.json list all")
            break
    return f"<details><summary>All {len(order):,} classes by name</summary><pre class=list>{chr(10).join(lines)}</pre></details>"


def sizes_section(stats: CorpusStats) -> str:
    """Histograms of image sides, aspect ratios and file sizes."""
    powers_of_two, powers_of_ten = 2.0 ** np.arange(-8, 33), 10.0 ** np.arange(13)
    plots = [
        _histogram(stats.side_px, SIDE_PX, "√(width × height), px", powers_of_two, "{:.0f}".format),
        _histogram(stats.aspect_ratio, ASPECT_RATIO, "width / height", powers_of_two, "{:.3g}".format),
        _histogram(stats.file_bytes, FILE_BYTES, "file size in bytes", powers_of_ten, num_bytes),
    ]
    return f'<div class="three">{"".join(f"<div>{plot}</div>" for plot in plots)}</div>'


def _histogram(counts: np.ndarray, scale: LogScale, title: str, ticks: np.ndarray, name: Callable[[float], str]) -> str:
    """The octaves that are not empty, on a log scale."""
    used = np.flatnonzero(counts)
    if not len(used):
        return "<p>No images.</p>"
    step = scale.bins_per_octave
    low, high = used[0] // step * step, min(len(counts), (used[-1] // step + 1) * step)
    edges = scale.edges[low : high + 1]
    places = np.log(ticks / edges[0]) / np.log(edges[-1] / edges[0])
    inside = np.flatnonzero((places > -0.001) & (places < 1.001))
    shown = inside[:: max(1, -(-len(inside) // 6))]  # as many as fit on a phone
    marks = [(float(places[i]), name(float(ticks[i]))) for i in shown]
    names = [f"{name(a)} to {name(b)}" for a, b in itertools.pairwise(edges)]
    quantiles = (name(scale.quantile(counts, q)) for q in (0.05, 0.5, 0.95))
    percentiles = "<p class=soft>approximate percentiles: 5 % {}, median {}, 95 % {}</p>".format(*quantiles)
    return bar_plot(counts[low:high], names, Axis(f"{title}, log scale", marks), title) + percentiles


def formats_section(stats: CorpusStats) -> str:
    """Formats and colour modes, and the number of labels per image if it varies."""
    total = max(1, sum(stats.kinds.values()))
    rows = [
        (kind, f"{n:,}", f"{100 * n / total:.3g} %") for kind, n in sorted(stats.kinds.items(), key=lambda k: -k[1])
    ]
    labels = ""
    if stats.labels_per_image[2:].any():
        last = len(stats.labels_per_image) - 1
        numbers = (
            (f"{n}{' or more' if n == last else ''}", f"{count:,}") for n, count in enumerate(stats.labels_per_image)
        )
        labels = f"<div>{table((row for row in numbers if row[1] != '0'), ('labels', 'images'))}</div>"
    return f'<div class="two"><div>{table(rows, ("format and mode", "images", "share"))}</div>{labels}</div>'


def refused_section(stats: CorpusStats, pictures: Pictures) -> str:
    """Refused examples by reason, with the first images of each."""
    if not stats.refused:
        return "<p>None.</p>"
    ordered = sorted(stats.refused.items(), key=lambda item: (-item[1].count, item[0]))
    parts = [table([(reason.replace("_", " "), f"{found.count:,}") for reason, found in ordered], ("reason", "files"))]
    # Images that repeat another one are shown next to it, in the sections on duplicates and leakage.
    pairs = {"duplicate": stats.duplicates, "near_duplicate": stats.duplicates, "leakage": stats.leakage}
    for reason, found in ordered:
        if pairs.get(reason):
            continue
        shown = "".join(
            f"<div>{pictures.show(each.picture, reason)}<div class=soft>{text(each.picture.example_id)}<br>"
            f"{text(each.detail)}</div></div>"
            for each in found.first
        )
        more = f", {len(found.first)} of {found.count:,}" if found.count > len(found.first) else ""
        parts.append(f'<h3>{text(reason.replace("_", " "))}{more}</h3><div class="found">{shown}</div>')
    return "".join(parts)


def _duplicates(stats: CorpusStats, pictures: Pictures) -> str:
    ordered = [(kind, stats.duplicates[kind]) for kind in _KINDS if kind in stats.duplicates]
    if not ordered:
        return "<p>None.</p>"
    rows = ((_KINDS[kind], f"{found.count:,}", f"{found.num_left_out:,}") for kind, found in ordered)
    parts = [table(rows, ("kind", "images", "left out"))]
    for kind, found in ordered:
        parts.append(f"<h3>{text(kind.replace('_', ' '))}</h3>{_pairs(found, pictures, 'repeats', 'stays')}")
    return "".join(parts)


def _pairs(found: Findings, pictures: Pictures, left: str, right: str) -> str:
    shown = "".join(_pair(each, pictures, left, right) for each in found.first)
    more = f'<p class="soft">{len(found.first)} of {found.count:,}</p>' if found.count > len(found.first) else ""
    return f'<div class="pairs">{shown}</div>{more}'


def _pair(found: Finding, pictures: Pictures, left: str, right: str) -> str:
    other = found.other
    second = pictures.show(other) if other else ""
    second_id = f"<br>{text(right)}: {text(other.example_id)}" if other else ""
    return (
        f'<div><div class="strip">{pictures.show(found.picture)}{second}</div>'
        f"<div class=soft>{text(left)}: {text(found.picture.example_id)}{second_id}<br>"
        f"{text(_KINDS.get(found.detail, found.detail))}</div></div>"
    )


def sample_sheet(class_map: ClassMap, stats: CorpusStats, pictures: Pictures) -> str:
    """A few images of some classes."""
    total = stats.class_counts
    parts = []
    for label in stats.rule.labels(stats.num_classes).tolist():
        shown = "".join(pictures.show(row) for row in stats.sheet.get(label, ()))
        name = class_map.classes[label].name
        parts.append(
            f'<div><div class="strip">{shown}</div><div class=soft>{text(name)} · {total[label]:,}</div></div>'
        )
    return f'<div class="sheet">{"".join(parts)}</div>'


def _times(manifest: Manifest) -> str:
    counts = manifest.counts
    rows = []
    for step, seconds in manifest.provenance.get("seconds", {}).items():
        number = counts.num_found if step in ("list", "examine") else counts.num_accepted
        rate = f"{number / seconds:,.0f}/s" if seconds > 0 else ""
        moved = f"{num_bytes(counts.num_bytes / seconds)}/s" if step in ("examine", "write") and seconds > 0 else ""
        rows.append((step, duration(seconds), rate, moved))
    return table(rows, ("stage", "time", "images", "bytes of images"))


def _decode_policy(policy: DecodePolicy) -> str:
    rows = []
    for name, field in type(policy).model_fields.items():
        value = getattr(policy, name)
        shown = (
            ", ".join(map(str, value))
            if isinstance(value, tuple)
            else f"{value:,}"
            if isinstance(value, int)
            else value
        )
        meaning = " ".join((field.description or "").split())
        rows.append((name.replace("_", " "), f"{shown}", meaning))
    return table(rows, ("what", "policy", "meaning"))


def _provenance(manifest: Manifest) -> str:
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
    request = json.dumps(provenance.get("request", {}), indent=1, ensure_ascii=False)
    lines = "".join(f"<tr><th>{text(name)}<td>{text(value)}" for name, value in rows if value)
    return f'<table class="wrap">{lines}</table><h3>Request</h3><pre>{text(request)}</pre>'


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _by_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (_SPLIT_ORDER.index(name) if name in _SPLIT_ORDER else 3, name))
