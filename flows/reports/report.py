"""One self-contained HTML page for a pipeline: stages, scores, curves, and input images."""

import base64
import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from flows.console import duration, init_text, percent, setting
from flows.records import StageRecord
from vit.vtab.evaluate import Score

PALETTE = ("#3556a8", "#c2571a", "#2f7d4f", "#8a3a86", "#6b6b6b", "#a08a1a")

STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2330; background: #fff }
body { max-width: 60rem; margin: 2.5rem auto; padding: 0 1.25rem }
h1 { font-size: 1.7rem; margin: 0 0 .25rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
p.lead { color: #4a5365; margin-top: 0 } p.note { color: #4a5365; font-size: .92rem }
table { border-collapse: collapse; width: 100%; font-size: .92rem }
th { text-align: left; font-weight: 600; color: #4a5365; border-bottom: 2px solid #d5dae4; padding: .35rem .6rem .35rem 0 }
td { border-bottom: 1px solid #e6e9f0; padding: .35rem .6rem .35rem 0; vertical-align: top; overflow-wrap: anywhere }
td:first-child { white-space: nowrap } td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1.2rem }
.wide { overflow-x: auto } .wide td { min-width: 4rem }
@media (max-width: 40rem) { th.n { white-space: normal } table { font-size: .85rem } .wide td { min-width: 3rem } }
figure { margin: 0 } figcaption { font-size: .88rem; color: #4a5365; margin-bottom: .3rem }
svg { width: 100%; height: auto; display: block } svg text { font: 11px system-ui, sans-serif; fill: #5a6375 }
img { width: 100%; image-rendering: pixelated; border: 1px solid #e0e4ec; border-radius: 4px }
code { font-size: .86rem; background: #f3f5f9; padding: .05rem .3rem; border-radius: 3px }
.legend span { display: inline-block; margin-right: 1rem; font-size: .85rem }
.legend i { display: inline-block; width: .8rem; height: .2rem; margin-right: .35rem; vertical-align: middle }
"""


@dataclass(frozen=True)
class Curve:
    """A named line of (x, y) points."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """Curves over one pair of axes."""

    title: str
    x_label: str
    curves: Sequence[Curve]


@dataclass(frozen=True)
class ReportPage:
    """The content of the page."""

    title: str
    lead: str
    stages: Sequence[StageRecord]
    scores: Sequence[Score]
    plots: Sequence[Plot]
    inputs_png: bytes | None
    notes: Sequence[str] = field(default_factory=tuple)


SCORE_COLUMNS = (
    "task",
    "pre-trained",
    "from scratch",
    "difference",
    "majority class",
    "chance",
    "classes",
    "test images",
)


def score_rows(scores: Sequence[Score]) -> list[list[str]]:
    """One row per task: scores of model and control, of always predicting the majority class, and chance."""
    rows = []
    for task in dict.fromkeys(score.task for score in scores):
        model = next((s for s in scores if s.task == task and s.model_digest is not None), None)
        scratch = next((s for s in scores if s.task == task and s.model_digest is None), None)
        any_score = model or scratch
        assert any_score is not None
        difference = f"{100 * (model.value - scratch.value):+.1f}" if model and scratch else "-"
        rows.append(
            [
                task,
                *(percent(s.value) if s else "-" for s in (model, scratch)),
                difference,
                percent(any_score.majority_fraction),
                percent(1 / any_score.num_classes),
                f"{any_score.num_classes}",
                f"{any_score.num_examples:,}",
            ]
        )
    return rows


def stage_time(stage: StageRecord) -> str:
    """`2:31`, or `reused` if the stage was finished before."""
    return "reused" if stage.reused else duration(stage.wall_s)


def standard_error(score: Score) -> float:
    """Binomial standard error of an accuracy over its test images, as a fraction."""
    return math.sqrt(max(score.value * (1 - score.value), 0.0) / score.num_examples)


def render(page: ReportPage) -> str:
    """The page as one HTML file without external references."""
    stages = [[s.stage, s.what, s.where, stage_time(s)] for s in page.stages]
    parts = [
        f"<h1>{html.escape(page.title)}</h1>",
        f'<p class="lead">{html.escape(page.lead)}<br>{datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p>',
        "<h2>Scores</h2>" if page.scores else "",
        table_html(SCORE_COLUMNS, score_rows(page.scores), right=range(1, 8)) if page.scores else "",
        *(f'<p class="note">{html.escape(note)}</p>' for note in page.notes),
        "<h2>Stages</h2>",
        table_html(("stage", "what", "where", "time"), stages, right=(3,)),
        "<h2>Curves</h2>" if page.plots else "",
        '<div class="plots">' + "".join(figure(plot) for plot in page.plots) + "</div>" if page.plots else "",
    ]
    if page.scores:
        parts += ["<h2>Settings</h2>", settings_html(page.scores)] if any(score.tried for score in page.scores) else []
    if page.inputs_png:
        data = base64.b64encode(page.inputs_png).decode()
        parts += [
            "<h2>Inputs of the model</h2>",
            f'<img alt="Images of the first training batch" src="data:image/png;base64,{data}">',
            '<p class="note">The first images of the first batch after crop, flip and resize, as the network gets them.</p>',
        ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(page.title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>{body}</body></html>\n'
    )


def settings_html(scores: Sequence[Score]) -> str:
    rows = []
    for score in scores:
        for tried in score.tried:
            rows.append(
                [
                    score.task,
                    init_text(score.model_digest),
                    percent(tried["val_top1"]),
                    "chosen" if tried == score.chosen else "",
                    setting({name: value for name, value in tried.items() if name != "val_top1"}),
                ]
            )
    note = '<p class="note">Settings are chosen on validation images; test is read once, for the chosen one.</p>'
    return note + table_html(("task", "init", "validation", "", "setting"), rows, right=(2,))


def table_html(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in right else ''}>{html.escape(value)}</{tag}>" for i, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'  # a narrow screen scrolls the table, not the page


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover [low, high], at most about `most`."""
    span = high - low or abs(high) or 1.0
    step = next(s for s in _steps(span / most) if span / s <= most)
    first = math.floor(low / step + 1e-9)
    count = math.ceil(high / step - 1e-9) - first
    return [(first + i) * step for i in range(max(count, 1) + 1)]


def _steps(smallest: float) -> Iterator[float]:
    exponent = math.floor(math.log10(smallest))
    while True:
        yield from (m * 10.0**exponent for m in (1, 2, 5))
        exponent += 1


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 260, 52, 16, 10, 34


def figure(plot: Plot) -> str:
    """A line chart as inline SVG, with a legend if there are several curves."""
    points = [p for curve in plot.curves for p in curve.points if math.isfinite(p[1])]
    if not points:
        return ""
    x_ticks = ticks(0, max(x for x, _ in points))
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points))
    x_max, y_low, y_high = x_ticks[-1], y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = x / x_max, (y - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    marks = []
    for y in y_ticks:
        _, height = at(0, y)
        marks.append(f'<line x1="{LEFT}" y1="{height:.1f}" x2="{WIDTH - RIGHT}" y2="{height:.1f}" stroke="#e6e9f0"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    for x in x_ticks:
        marks.append(f'<text x="{at(x, 0)[0]:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{x:,.4g}</text>')
    middle = (LEFT + WIDTH) / 2
    marks.append(f'<text x="{middle:.0f}" y="{HEIGHT - 3}" text-anchor="middle">{html.escape(plot.x_label)}</text>')
    for index, curve in enumerate(plot.curves):
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in curve.points if math.isfinite(y))
        colour = PALETTE[index % len(PALETTE)]
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return (
        f"<figure><figcaption>{html.escape(plot.title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}</svg>{legend(plot.curves)}</figure>'
    )


def legend(curves: Sequence[Curve]) -> str:
    if len(curves) < 2:
        return ""
    names = (
        f'<span><i style="background:{PALETTE[i % len(PALETTE)]}"></i>{html.escape(c.name)}</span>'
        for i, c in enumerate(curves)
    )
    return f'<div class="legend">{"".join(names)}</div>'
