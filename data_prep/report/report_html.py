"""Pieces of the report's HTML: style, tables, plots. No scripts, nothing from elsewhere; light and dark."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #62676d; --paper: #fff; --card: #f5f6f7; --line: #dcdfe3;
 --train: #2f6db5; --val: #cf7614; --test: #22906b; --bad: #a8231b; --bad-card: #fdeeec; --good-card: #ebf5ef }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e8; --soft: #9aa1a9; --paper: #141619; --card: #1d2024;
 --line: #343a41; --train: #6ca6ee; --val: #eda24d; --test: #5cc9a0; --bad: #ff9388; --bad-card: #381a18;
 --good-card: #15291f } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 66rem;
 margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .7rem; padding-top: .7rem; border-top: 1px solid var(--line) }
h3 { font-size: .95rem; margin: 1.4rem 0 .4rem }
p { margin: .4rem 0 .8rem; max-width: 46rem }
.soft { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .7rem; margin: 1.2rem 0 }
.tiles div { background: var(--card); border-radius: 6px; padding: .6rem .8rem; font-size: .85rem; color: var(--soft) }
.tiles b { display: block; font-size: 1.35rem; line-height: 1.3; color: var(--ink) }
.tiles .bad, .banner.bad { background: var(--bad-card) } .tiles .bad b, .bad > strong { color: var(--bad) }
.banner { background: var(--good-card); border-radius: 6px; padding: .7rem .9rem; margin: .7rem 0; max-width: none }
.banner.plain { background: var(--card) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem }
td, th { text-align: left; padding: .22rem 1.2rem .22rem 0; vertical-align: top; overflow-wrap: break-word }
th { color: var(--soft); font-weight: 500 } .wrap td { overflow-wrap: anywhere }
.scroll td:last-child:not(.n) { min-width: 9rem } tr + tr { border-top: 1px solid var(--line) }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem 2.5rem }
.three { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 1rem 2rem }
.two > *, .three > * { min-width: 0 } .three .soft { text-align: center }
.plot { margin: .6rem 0 1.2rem; padding-right: 1.4rem }
.plot { display: grid; grid-template-columns: 3rem 1fr; font-size: .75rem; color: var(--soft) }
.plot .y, .plot .x { position: relative } .plot .y span, .plot .x span { position: absolute; white-space: nowrap }
.plot .y span { right: .4rem; transform: translateY(-50%) } .plot .x { grid-column: 2; height: 1.3rem; margin-top: .2rem }
.plot .x span { transform: translateX(-50%) } .plot .top { grid-column: 1 / 3; margin-bottom: .5rem }
.plot .below { grid-column: 2; text-align: center } .plot svg { width: 100%; height: 11rem; display: block; overflow: visible }
.plot.tall svg { height: 16rem }
svg rect { fill: var(--train) } svg rect:hover { fill: var(--val) }
svg path { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke }
svg .grid { stroke: var(--line); stroke-width: 1 }
.train { --own: var(--train) } .val { --own: var(--val) } .test { --own: var(--test) } path { stroke: var(--own) }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; background: var(--own); margin-right: .35em }
.legend span { margin-right: 1.2em; white-space: nowrap }
.bars { display: grid; grid-template-columns: minmax(4rem, max-content) 1fr max-content; gap: .15rem .8rem; font-size: .85rem;
 align-items: center } .bars > :first-child { overflow-wrap: anywhere }
.bar { display: flex; height: .8rem } .bar i { background: var(--own) }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(15.6rem, 1fr)); gap: 1.3rem 1.2rem }
.sheet > div { min-width: 0 } .strip { display: flex; flex-wrap: wrap; gap: .3rem }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: 1.1rem; margin: .6rem 0 1rem }
.pairs > div { min-width: 0 }
.found { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .9rem 1.2rem }
.found > div { display: flex; gap: .6rem; min-width: 0 } .found .soft { min-width: 0; line-height: 1.35 }
.pic { width: 76px; height: 76px; flex: none; object-fit: contain; background: #fff; border: 1px solid var(--line);
 border-radius: 3px }
.none { background: var(--card); border-style: dashed; color: var(--soft); font-size: .7rem; line-height: 1.2;
 display: flex; align-items: center; justify-content: center; text-align: center; padding: .2rem; overflow: hidden;
 overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; line-height: 1.4 }
.list { columns: 17rem; column-gap: 2rem } summary { cursor: pointer; margin: .6rem 0 }
"""


def text(value: object) -> str:
    """Escape a value for HTML."""
    return html.escape(str(value))


def page(title: str, body: str) -> str:
    """A complete HTML document. Its content policy forbids scripts and external resources."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{text(title)}</title><style>{STYLE}</style>{body}</html>\n"
    )


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table of plain texts; columns whose cells all start with a digit are right-aligned."""
    lines = [[text(cell) for cell in row] for row in rows]
    titles = [text(name) for name in head]
    right = [all(line[i][:1].isdigit() or not line[i] for line in lines) for i in range(len(lines[0]) if lines else 0)]
    marks = [" class=n" if column else "" for column in right]
    shown = "".join("<tr>" + "".join(f"<td{m}>{c}" for m, c in zip(marks, line, strict=True)) for line in lines)
    first = "<tr>" + "".join(f"<th{m}>{c}" for m, c in zip(marks, titles, strict=False)) if titles else ""
    return f'<div class="scroll"><table>{first}{shown}</table></div>'


def num_bytes(number: float) -> str:
    """Formats bytes, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} PB"


def short(number: float) -> str:
    """Formats a number for an axis, such as 20k or 1.5M."""
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def duration(seconds: float) -> str:
    """Formats seconds, such as 0.8 s, 12 min or 3.5 h."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Axis:
    """A title, and tick labels with their positions as shares of the length."""

    title: str
    ticks: Sequence[tuple[float, str]]


def bar_plot(counts: np.ndarray, bin_names: Sequence[str], x: Axis, what: str) -> str:
    """One bar per bin; its tooltip shows name and count."""
    top, y = _linear_axis(int(counts.max()), "images")
    width = 1000 / len(counts)
    bars = "".join(
        f'<rect x="{i * width:.1f}" y="{100 - 100 * n / top:.2f}" width="{width * 0.92:.1f}" height="{100 * n / top:.2f}">'
        f"<title>{text(bin_names[i])}: {n:,}</title></rect>"
        for i, n in enumerate(counts.tolist())
        if n
    )
    return _plot(bars, x, y, what)


def rank_plot(sorted_counts: dict[str, np.ndarray], what: str) -> str:
    """Class sizes in descending order on a log scale, one line per split; a line ends where empty classes begin."""
    num_ranks = max(map(len, sorted_counts.values()))
    largest = max(int(counts[0]) for counts in sorted_counts.values())
    decades = max(1, math.ceil(math.log10(max(largest, 2))))
    y = Axis("images in the class, log scale", [(d / decades, short(10**d)) for d in range(decades + 1)])
    paths = "".join(
        f'<path class="{name}" d="{_steps(counts[counts > 0], num_ranks, decades)}"/>'
        for name, counts in sorted_counts.items()
        if counts[0]
    )
    legend = "".join(f'<span class="{name}"><i class="key"></i>{text(name)}</span>' for name in sorted_counts)
    step = _nice(num_ranks / 5)
    marks = [1, *range(step, num_ranks - step // 2, step), num_ranks]
    x = Axis("classes by rank, largest first", [((m - 0.5) / num_ranks, f"{m:,}") for m in marks])
    return f'<div class="legend soft">{legend}</div>' + _plot(paths, x, y, what, "plot tall")


def _steps(counts: np.ndarray, num_ranks: int, decades: int) -> str:
    """A path of at most a few hundred steps; the first 100 classes are drawn one by one."""
    ranks = np.unique(np.concatenate([np.arange(100), np.linspace(0, len(counts) - 1, 400).astype(int)]))
    ranks = ranks[ranks < len(counts)]
    starts = 1000 * ranks / num_ranks
    ends = np.append(starts[1:], 1000 * len(counts) / num_ranks)
    heights = 100 - 100 * np.log10(np.maximum(counts[ranks], 1)) / decades
    moves = "".join(f"V{y:.2f}H{end:.1f}" for y, end in zip(heights, ends, strict=True))
    return f"M{starts[0]:.1f} {heights[0]:.2f}{moves}"


def stacked_bars(names: Sequence[str], parts: dict[str, np.ndarray]) -> str:
    """One bar per name, stacked from the counts of the splits."""
    total = sum(parts.values(), np.zeros(len(names), np.int64))
    top = max(1, int(total.max()))
    lines = []
    for i, name in enumerate(names):
        pieces = "".join(
            f'<i class="{split}" style="width:{100 * counts[i] / top:.2f}%" title="{split}: {counts[i]:,}"></i>'
            for split, counts in parts.items()
        )
        lines.append(f'<span>{text(name)}</span><span class="bar">{pieces}</span><span class="n">{total[i]:,}</span>')
    legend = "".join(f'<span class="{split}"><i class="key"></i>{text(split)}</span>' for split in parts)
    return f'<p class="legend soft">{legend}</p><div class="bars">{"".join(lines)}</div>'


def _plot(marks: str, x: Axis, y: Axis, what: str, kind: str = "plot") -> str:
    grid = "".join(
        f'<line class="grid" x1="0" x2="1000" y1="{100 - 100 * at:.2f}" y2="{100 - 100 * at:.2f}" '
        'vector-effect="non-scaling-stroke"/>'
        for at, _ in y.ticks
    )
    ys = "".join(f'<span style="top:{100 - 100 * at:.2f}%">{text(name)}</span>' for at, name in y.ticks)
    xs = "".join(f'<span style="left:{100 * at:.2f}%">{text(name)}</span>' for at, name in x.ticks)
    return (
        f'<div class="{kind}"><div class="top">{text(y.title)}</div><div class="y">{ys}</div>'
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{text(what)}">{grid}{marks}</svg>'
        f'<div class="x">{xs}</div><div class="below">{text(x.title)}</div></div>'
    )


def _linear_axis(largest: int, title: str) -> tuple[int, Axis]:
    step = _nice(largest / 4)
    top = max(step, -(-largest // step) * step)
    return top, Axis(title, [(value / top, short(value)) for value in range(0, top + 1, step)])


def _nice(number: float) -> int:
    """The next number above that is 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(max(number, 1)))
    return int(next(m * power for m in (1, 2, 5, 10) if m * power >= max(number, 1)))
