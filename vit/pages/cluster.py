"""The page of `vitline plan cluster`: images per second and days by number of nodes, where the time goes, what is assumed."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil, floor, log10

from vitline.infra.html.page import render
from vitline.infra.html.plots import Axis, Bar, Line, Plot
from vitline.infra.html.text import percent, short
from vitline.vit.cost.cluster_assumptions import ClusterAssumptions
from vitline.vit.cost.cluster_twin import ClusterRow, ClusterTwin, Part

_MOST_TICKS = 6
_SPENT: Mapping[str, tuple[str, tuple[Part, ...]]] = {
    "steps": ("c3", ("steps",)),
    "waits for the slowest rank": ("c1", ("slowest rank",)),
    "waits for network and input": ("c4", ("network", "input")),
    "saves": ("c5", ("saves",)),
    "lost work": ("c6", ("lost work",)),
    "starts, waits for nodes": ("c2", ("starts and waits",)),
}
"""Colour and parts of each kind, from the bottom of a bar to its top."""


def cluster_html(
    name: str,
    what: str,
    twin: ClusterTwin,
    table: Sequence[Mapping[str, str]],
    sentences: Sequence[str],
    assumed: ClusterAssumptions,
) -> str:
    """One HTML page, of a training and what it is. `table` has the rows as text, by column."""
    rows, plots = twin.rows, list[Plot]()
    why = {name: (field.description or "").replace("`", "") for name, field in ClusterAssumptions.model_fields.items()}
    if rows:
        many = {row.nodes: row for row in rows}
        rates = {nodes: row.images_per_s for nodes, row in many.items()}
        ideal = {nodes: nodes / rows[0].nodes * rows[0].images_per_s for nodes in many}
        days, ranges = {nodes: row.days for nodes, row in many.items()}, [(row.days_low, row.days_high) for row in rows]
        knee = twin.knee.nodes if twin.knee else rows[0].nodes
        plots = [
            _log_plot("images/s", {"images/s": rates, "in proportion to the nodes": ideal}, knee),
            _log_plot("days", {"days, median and range of 90 %": days}, knee, ranges),
        ]
    return render(
        "vit/pages/cluster.html.j2",
        title=f"How many nodes for {name}?",
        what=what,
        sentences=sentences,
        plots=plots,
        time=_time_plot(rows),
        rows=[[*table[0]], [[*row.values()] for row in table]] if table else None,
        assumptions=[
            [name, "none" if value is None else f"{value:g}", why[name]] for name, value in assumed.model_dump().items()
        ],
    )


def _log_plot(
    title: str, curves: Mapping[str, Mapping[int, float]], knee: int, ranges: Sequence[tuple[float, float]] = ()
) -> Plot:
    """Curves by number of nodes, both axes logarithmic, with a line at the knee."""
    nodes = [*next(iter(curves.values()))]
    at = {many: (i + 0.5) / len(nodes) for i, many in enumerate(nodes)}
    every = [value for curve in curves.values() for value in curve.values()] + [
        value for both in ranges for value in both
    ]
    ticks = _log_ticks(min(every), max(every))
    low, span = log10(ticks[0]), log10(ticks[-1] / ticks[0])

    def height(value: float) -> float:
        return (log10(value) - low) / span

    lines = [
        Line(name, colour, [(at[many], height(value)) for many, value in curve.items()])
        for (name, curve), colour in zip(curves.items(), ("c1", "c5"), strict=False)
    ]
    upper = [(at[many], height(high)) for many, (_, high) in zip(nodes, ranges, strict=bool(ranges))]
    lower = [(at[many], height(low)) for many, (low, _) in zip(nodes, ranges, strict=bool(ranges))]
    return Plot(
        f"{title} by number of nodes",
        Axis("nodes", [(at[many], f"{many:,}") for many in nodes]),
        Axis(title, [(height(tick), short(tick)) for tick in ticks]),
        lines=[
            *lines,
            Line(f"the knee, {knee:,} {'node' if knee == 1 else 'nodes'}", "c2", [(at[knee], 0), (at[knee], 1)]),
        ],
        band=[*upper, *reversed(lower)],
    )


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that cover [low, high], or the powers alone where these are many. At least two."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**power for power in (powers[0] - 1, *powers) for factor in factors]
        first = max(i for i, tick in enumerate(ticks) if tick <= low)
        last = min(i for i, tick in enumerate(ticks) if i > first and tick >= high)
        found = ticks[first : last + 1]
        if len(found) <= _MOST_TICKS:
            break
    return found


def _time_plot(rows: Sequence[ClusterRow]) -> Plot:
    """Stacked bars of where the time goes."""
    return Plot(
        "shares of the time by number of nodes",
        Axis("nodes", [((i + 0.5) / len(rows), f"{row.nodes:,}") for i, row in enumerate(rows)]),
        Axis("share of the time, %", [(share / 100, f"{share}") for share in range(0, 101, 20)]),
        bars=[bar for i, row in enumerate(rows) for bar in _stack(row, (i + 0.15) / len(rows), 0.7 / len(rows))],
        keys=[(name, colour) for name, (colour, _) in _SPENT.items()],
    )


def _stack(row: ClusterRow, x: float, width: float) -> Iterator[Bar]:
    """Bars that all begin at the bottom: the tallest is drawn first, and each one covers the next below it."""
    shares = {name: sum(row.shares[part] for part in parts) for name, (_, parts) in _SPENT.items()}
    for (name, share), top in reversed([*zip(shares.items(), accumulate(shares.values()), strict=True)]):
        yield Bar(x, width, min(top, 1.0), f"{name}, {row.nodes:,} nodes: {percent(share)}", _SPENT[name][0])
