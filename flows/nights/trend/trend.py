"""The nights of each series with their scores, cost and data, for a page over time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from vitline.data_prep.find_corpus import Corpora
from vitline.flows.catalog.records import read_pipeline
from vitline.flows.nights.compare import MEAN, Difference
from vitline.flows.nights.from_records import known_nights, scores_of
from vitline.flows.nights.night_page import night_row
from vitline.flows.nights.night_record import ChampionRecord, NightRecord, read_champion
from vitline.infra.html.plots import Axis, Dot, Plot, ticks
from vitline.infra.html.text import percent
from vitline.infra.night import night_name, night_text
from vitline.infra.records import UnreadableRecord, read_each
from vitline.infra.storage import Store

KINDS = {"better": "good", "worse": "bad", "broken": "bad"}
"""Style of a verdict; any other is plain."""


@dataclass(frozen=True)
class NightPoint:
    """A night of a series."""

    night: NightRecord
    word: str
    """Its verdict."""
    tasks: Mapping[str, float]
    """Accuracy by name of the metric, the mean over seeds, 0 to 1; empty where the night has no scores."""
    wall_s: float | None = None
    """Seconds of its stages; a reused stage costs none."""
    num_images: int | None = None
    """Images of its corpora; None where one of them is gone."""
    is_early: bool = False
    """Whether it was decided early, so that it has no score on some tasks."""
    rest: float = 0.0
    """Of a night that was decided early: by how much the mean over all tasks is above that over the ones it has, in the night before
    that has all."""

    @property
    def mean(self) -> float | None:
        """Over all tasks; estimated for a night that was decided early."""
        return fmean(self.tasks.values()) + self.rest if self.tasks else None

    @property
    def against(self) -> Difference | None:
        """The mean over tasks compared with the champion, else with last night."""
        if self.night.verdict is None or not self.night.verdict.against:
            return None
        first = self.night.verdict.against[0]
        return next((each for each in first.differences if each.name == MEAN), None)


@dataclass(frozen=True)
class Series:
    """The nights of one name, oldest first."""

    name: str
    points: Sequence[NightPoint]
    champion: ChampionRecord | None


def all_series(root: Store, name: str | None, report: Callable[[UnreadableRecord], None]) -> list[Series]:
    """Every series below a root, or the one of this name. What cannot be read is reported and left out."""
    nights = [night for night in reversed(known_nights(root, report)) if name in (None, night.name)]
    images = {manifest.digest: manifest.counts.num_accepted for _, manifest in Corpora(root).all(report)}
    points = read_each(nights, lambda night: night_point(root, night, images))
    names = sorted({night.name for night in nights})
    return [
        Series(each, estimated([p for p in points if p.night.name == each]), _champion(root, each, report))
        for each in names
    ]


def estimated(points: Sequence[NightPoint]) -> list[NightPoint]:
    """The nights of a series, those that were decided early with an estimate of their mean over all tasks."""
    found, whole = list[NightPoint](), dict[str, float]()
    for point in points:
        if not point.is_early:
            whole = dict(point.tasks) or whole
        elif whole.keys() >= point.tasks.keys() and point.tasks:
            rest = fmean(whole.values()) - fmean(whole[name] for name in point.tasks)
            point = replace(point, rest=rest)
        found.append(point)
    return found


def _champion(root: Store, name: str, report: Callable[[UnreadableRecord], None]) -> ChampionRecord | None:
    try:
        return read_champion(root, name)
    except UnreadableRecord as odd:
        report(odd)
        return None


def night_point(root: Store, night: NightRecord, images: Mapping[str, int]) -> NightPoint:
    """A night with its scores and costs; `images` are the numbers of images by digest of a corpus."""
    word = night_row(night)["verdict"]
    if night.pipeline is None:
        return NightPoint(night, word, {})
    try:
        record = read_pipeline(root, night.pipeline)
        scores = scores_of(root, record, predictions=False) if record.state == "finished" else None
    except (FileNotFoundError, UnreadableRecord):  # deleted since; its verdict stays
        return NightPoint(night, word, {})
    tasks = {
        name: sum(s.value for s in of_task) / len(of_task) for name, of_task in (scores.tasks if scores else {}).items()
    }
    wall_s = sum(stage.wall_s for stage in record.stages if not stage.reused)
    found = [images.get(digest) for digest in record.corpora.values()]
    num_images = None if not found or None in found else sum(number for number in found if number is not None)
    return NightPoint(night, word, tasks, wall_s, num_images, record.decided_early)


def trend_plot(series: Series) -> Plot | None:
    """The mean over tasks by night, with the band of the champion; None without scores."""
    scored = [(point, point.mean) for point in series.points if point.mean is not None]
    if not scored:
        return None
    bands = {
        point.night.night.timestamp(): tuple(known.theirs + point.rest + side * known.half_width for side in (-1, 1))
        for point, _ in scored
        if (known := point.against) is not None and known.half_width is not None
    }
    values = [*(mean for _, mean in scored), *(value for band in bands.values() for value in band)]
    first, last = scored[0][0].night.night.timestamp(), scored[-1][0].night.night.timestamp()
    y_ticks = ticks(min(values), max(values))
    low, high = y_ticks[0], y_ticks[-1]

    def x(at: float) -> float:
        return (at - first) / (last - first) if last > first else 0.5

    def y(value: float) -> float:
        return (value - low) / (high - low)

    upper = [(x(at), y(above)) for at, (_, above) in bands.items()]
    lower = [(x(at), y(below)) for at, (below, _) in bands.items()]
    shown = scored[:: -(-len(scored) // 5)]
    form = "%-d %b" if len({p.night.night.date() for p, _ in shown}) == len(shown) else "%-d %b %H:%M"
    return Plot(
        f"Mean top-1 over tasks of {len(scored)} nights of {series.name}",
        Axis("night (UTC)", [(x(p.night.night.timestamp()), p.night.night.strftime(form)) for p, _ in shown]),
        Axis("mean top-1 over tasks, %", [(y(tick), f"{100 * tick:.4g}") for tick in y_ticks]),
        dots=[
            Dot(
                x(point.night.night.timestamp()),
                y(mean),
                f"{night_text(point.night.night)}: {mean_text(point)}, {point.word}",
                f"#{row_id(point.night)}",
                KINDS.get(point.word, "plain"),
            )
            for point, mean in scored
        ],
        band=[*upper, *reversed(lower)],
    )


def mean_text(point: NightPoint) -> str:
    """`83.1 %`, or `about 83.1 %` of a night that was decided early."""
    return f"{'about ' * point.is_early}{percent(point.mean or 0.0)}"


def row_id(night: NightRecord) -> str:
    """Name of the row of a night in the page."""
    return f"{night.name}-{night_name(night.night)}"
