"""Data of bar and line plots, which the macro `plot` draws. Positions are fractions of an axis, from 0 to 1."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vitline.infra.html.text import short

NUM_COLOURS = 6
"""Classes c1 to c6 of the style sheet."""


@dataclass(frozen=True)
class Axis:
    """A title, and tick labels with their positions."""

    title: str
    ticks: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Bar:
    """A bar from the bottom, with a tooltip. `colour` is a class of the style sheet, or empty."""

    x: float
    width: float
    height: float
    tooltip: str
    colour: str = ""


@dataclass(frozen=True)
class Line:
    """A named line. `colour` is a class of the style sheet: train, val, test or c1 to c6."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Dot:
    """A point that links to a place of the page. `kind` is a class of the style sheet: good, bad, plain or none."""

    x: float
    y: float
    what: str
    link: str
    kind: str


@dataclass(frozen=True)
class Plot:
    """A plot. `what` is its text for screen readers. Two or more lines get a legend, and so do bars by `keys`: name and colour of
    each kind. `band` is the outline of an area."""

    what: str
    x: Axis
    y: Axis
    bars: Sequence[Bar] = ()
    keys: Sequence[tuple[str, str]] = ()
    lines: Sequence[Line] = ()
    dots: Sequence[Dot] = ()
    band: Sequence[tuple[float, float]] = ()


def line_plot(title: str, x_title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> Plot | None:
    """A plot of curves by name, of points with x >= 0. Values that are not finite are left out; None if no point is left."""
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    every = [point for points in finite.values() for point in points]
    if not every:
        return None
    right = max(x for x, _ in every) or 1
    x_ticks = [x for x in ticks(0, right) if x <= right]
    y_ticks = ticks(min(y for _, y in every), max(y for _, y in every))
    low, high = y_ticks[0], y_ticks[-1]
    return Plot(
        title,
        Axis(x_title, [(x / right, short(x)) for x in x_ticks]),
        Axis(title, [((y - low) / (high - low), f"{y:.4g}") for y in y_ticks]),
        lines=[
            Line(name, f"c{i % NUM_COLOURS + 1}", [(x / right, (y - low) / (high - low)) for x, y in points])
            for i, (name, points) in enumerate(finite.items())
        ],
    )


def bar_groups(title: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> Plot:
    """Bars of fractions in percent, side by side in groups: a value of each series for each group; None leaves a gap."""
    colours = {name: f"c{i % NUM_COLOURS + 1}" for i, name in enumerate(series)}
    wide = 1 / len(groups)
    width = 0.8 * wide / len(series)
    bars = [
        Bar((g + 0.1) * wide + i * width, 0.92 * width, value, f"{name}, {group}: {100 * value:.1f} %", colours[name])
        for g, group in enumerate(groups)
        for i, (name, values) in enumerate(series.items())
        if (value := values[g]) is not None
    ]
    return Plot(
        title,
        Axis("", [((g + 0.5) * wide, group) for g, group in enumerate(groups)]),
        Axis(f"{title}, %", [(y / 100, f"{y:g}") for y in ticks(0, 100)]),
        bars=bars,
        keys=[*colours.items()],
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers with a step of 1, 2 or 5 times a power of ten that cover [low, high]; about `most` at most."""
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
