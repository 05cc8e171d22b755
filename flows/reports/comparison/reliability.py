"""Reliability diagrams of pipelines on the same axes, one for each task."""

from collections.abc import Mapping, Sequence

from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.nights.judge import short_name
from vitline.flows.reports.comparison.comparison import scores_by_task
from vitline.infra.html.plots import NUM_COLOURS, Axis, Line, Plot
from vitline.infra.html.text import percent
from vitline.infra.storage import Store
from vitline.vit.evaluation.calibration import Calibration

_TICKS = [(fifth / 5, f"{20 * fifth}") for fifth in range(6)]


def reliability(root: Store, records: Sequence[PipelineRecord]) -> list[Plot]:
    """Accuracy by confidence for each task on which a pipeline has scores with probabilities, of the models of its first seed."""
    tasks = dict[str, dict[str, Calibration]]()
    for record in records:
        for name, score in scores_by_task(root, record).items():
            if score.calibration is not None:
                tasks.setdefault(name, {})[record.key] = score.calibration
    places = {record.key: i % NUM_COLOURS + 1 for i, record in enumerate(records)}
    return [_plot(short_name(name), found, places) for name, found in tasks.items()]


def _plot(task: str, found: Mapping[str, Calibration], places: Mapping[str, int]) -> Plot:
    lines = [
        Line(
            f"{key}, ECE {percent(calibration.ece)}",
            f"c{places[key]}",
            [(each.confidence, each.accuracy) for each in calibration.bins if each.examples],
        )
        for key, calibration in found.items()
    ]
    return Plot(
        f"Reliability on {task}: accuracy by confidence",
        Axis("confidence, %", _TICKS),
        Axis(f"{task}: accuracy, %", _TICKS),
        lines=[Line("as often right as sure", "grid", [(0, 0), (1, 1)]), *lines],
    )
