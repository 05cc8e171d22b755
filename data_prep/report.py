"""report.html: one page that opens anywhere and shows what is in a corpus. No scripts, no files beside it."""

import base64
import html
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from data_prep.decode import decode
from data_prep.examine import read_example
from data_prep.labels import ClassMap
from data_prep.shard_format import Manifest
from infra.storage import open_store

_MAX_SAMPLE_CLASSES, _SAMPLES_PER_CLASS, _THUMBNAIL_PX = 24, 6, 64
_MAX_BARS, _MAX_REJECTS_SHOWN = 200, 8
_STYLE = """
:root { color-scheme: light dark; --line: #8883; --soft: #777; --bar: #4a7dbd }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
.soft { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1.2rem 0 }
.figures b { display: block; font-size: 1.5rem }
table { border-collapse: collapse } td, th { text-align: left; padding: .25rem 1.2rem .25rem 0; vertical-align: top }
tr + tr { border-top: 1px solid var(--line) } td.n { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: 110px; display: block } svg rect { fill: var(--bar) }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 2rem }
.axis { display: flex; justify-content: space-between }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(13.5rem, 1fr)); gap: 1rem }
.sheet img { width: 64px; height: 64px; object-fit: contain; background: #fff; border: 1px solid var(--line) }
pre { white-space: pre-wrap; font-size: .8rem }
"""


@dataclass(frozen=True)
class ReportData:
    """What the report shows: the manifest, and the examples as `select_examples` gives them."""

    manifest: Manifest
    class_map: ClassMap
    accepted: pa.Table
    rejects: pa.Table


def render_report(data: ReportData) -> str:
    """The page, self-contained. Reads the source images of the sample sheet."""
    manifest, counts = data.manifest, data.manifest.counts
    figures = {
        "pictures": f"{counts.num_accepted:,}",
        "classes": f"{manifest.num_classes:,}",
        "bytes of pictures": _bytes(counts.num_bytes),
        "refused": f"{counts.num_refused:,}",
    }
    steps = [(step, f"{value:.1f} s") for step, value in manifest.provenance["seconds"].items()]
    sections = [
        ("Splits", _splits(manifest)),
        ("Classes, from large to small", _classes(data)),
        ("Sizes", _sizes(data.accepted)),
        ("Refused", _refused(data.rejects)),
        ("Sample of the classes", _sample_sheet(data)),
        ("Time of the steps", _table(steps)),
        ("How it was made", f"<pre>{_text(json.dumps(manifest.provenance, indent=1, ensure_ascii=False))}</pre>"),
    ]
    title = _text(f"{manifest.name}/{manifest.version}")
    body = "".join(f"<section><h2>{heading}</h2>{content}</section>" for heading, content in sections)
    tiles = "".join(f"<div><b>{value}</b>{_text(name)}</div>" for name, value in figures.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f'<div class="soft">digest {manifest.digest}<br>{_text(manifest.provenance["credit"])}</div>'
        f'<div class="figures">{tiles}</div>{body}</html>\n'
    )


def _splits(manifest: Manifest) -> str:
    rows = []
    for name, split in manifest.splits.items():
        owners = [segment.split for segment in split.segments]
        shards = sum(segment.num_shards for segment in split.segments)
        note = "" if owners == [name] else "view of " + " + ".join(owners)
        rows.append((name, f"{split.num_rows:,}", f"{split.num_row_groups:,}", f"{shards:,}", note))
    return _table(rows, ("split", "pictures", "row groups", "shards", ""))


def _classes(data: ReportData) -> str:
    names = [info.name for info in data.class_map.classes]
    counts = np.bincount(pc.list_flatten(data.accepted["labels"]).to_numpy(), minlength=len(names))
    order = np.argsort(-counts, kind="stable")
    shown = counts[order]
    if len(shown) > _MAX_BARS:  # a bar is then the mean of neighbours in rank
        shown = np.array([part.mean() for part in np.array_split(shown, _MAX_BARS)])
    ends = [f"{names[i]}: {counts[i]:,}" for i in (order[0], order[-1])]
    return _bars(shown.tolist(), *ends)


def _sizes(accepted: pa.Table) -> str:
    width = accepted["width_px"].to_numpy().astype(float)
    height = accepted["height_px"].to_numpy().astype(float)
    formats = Counter(zip(accepted["format"].to_pylist(), accepted["mode"].to_pylist(), strict=True))
    return (
        f'<div class="two"><div>{_histogram(np.sqrt(width * height), "square root of the pixels: {:.0f}")}</div>'
        f"<div>{_histogram(width / height, 'width over height: {:.2f}')}</div></div>"
        + _table([(f"{name} {mode}", f"{count:,}") for (name, mode), count in formats.most_common()])
    )


def _histogram(values: np.ndarray, label: str) -> str:
    edges = np.geomspace(values.min() * 0.999, values.max() * 1.001, 33)
    return _bars(np.histogram(values, edges)[0].tolist(), label.format(values.min()), f"{values.max():.4g}")


def _refused(rejects: pa.Table) -> str:
    if not rejects.num_rows:
        return "<p>None.</p>"
    rows = []
    for reason, count in Counter(rejects["reason"].to_pylist()).most_common():
        first = rejects.filter(pc.equal(rejects["reason"], reason)).slice(0, _MAX_REJECTS_SHOWN).to_pylist()
        lines = (f"{_text(row['example_id'])} <span class=soft>{_text(row['detail'])}</span>" for row in first)
        examples = "<br>".join(lines)
        rows.append(f"<tr><td>{reason}<td class=n>{count:,}<td>{examples}")
    return f"<table><tr><th>reason<th>files<th>the first of them{''.join(rows)}</table>"


def _sample_sheet(data: ReportData) -> str:
    """Classes spread evenly over the class list, each with its first pictures in the order of the corpus."""
    rows = data.accepted.sort_by("order_key")
    first_label = pc.list_element(rows["labels"], 0)
    num_classes = len(data.class_map.classes)
    chosen = np.unique(np.linspace(0, num_classes - 1, min(num_classes, _MAX_SAMPLE_CLASSES)).astype(int))
    parts = []
    for label in chosen.tolist():
        own = rows.filter(pc.equal(first_label, label)).slice(0, _SAMPLES_PER_CLASS).to_pylist()
        images = "".join(
            f'<img alt="" title="{_text(row["example_id"])}" src="{_thumbnail(row, data.manifest)}">' for row in own
        )
        parts.append(f"<div>{images}<div class=soft>{_text(data.class_map.classes[label].name)}</div></div>")
    return f'<div class="sheet">{"".join(parts)}</div>'


def _thumbnail(row: dict[str, object], manifest: Manifest) -> str:
    pixels = decode(read_example(row, open_store(str(row["base"]))), manifest.decode_policy)
    image = Image.fromarray(pixels)
    image.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def _bars(values: Sequence[float], left: str, right: str) -> str:
    top, step = max([*values, 1e-9]), 1000 / max(len(values), 1)
    heights = [100 * value / top for value in values]
    width = min(max(step * 0.9, 1), 40)
    rects = "".join(
        f'<rect x="{i * step:.1f}" y="{100 - height:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        for i, height in enumerate(heights)
    )
    return (
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none">{rects}</svg>'
        f'<div class="axis soft"><span>{_text(left)}</span><span>{_text(right)}</span></div>'
    )


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    titles = "<tr>" + "".join(f"<th>{_text(name)}" for name in head) if head else ""
    lines = ("<tr>" + "".join(_cell(cell) for cell in row) for row in rows)
    return f"<table>{titles}{''.join(lines)}</table>"


def _cell(text: str) -> str:
    return f"<td{' class=n' if text[:1].isdigit() else ''}>{_text(text)}"


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _text(value: object) -> str:
    return html.escape(str(value))
