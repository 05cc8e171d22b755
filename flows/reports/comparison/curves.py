"""Curves of pre-trainings on the same axes: images seen, hours of training, and, where the networks differ, compute.

A branch, such as the cooldown of a long run, begins with the curve of its parent up to its checkpoint.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from vitline.flows.catalog.records import PipelineRecord
from vitline.infra.html.plots import Plot, line_plot
from vitline.infra.records import UnreadableRecord
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.segments import JournalRecord
from vitline.infra.storage import Store, open_store
from vitline.vit.cost.estimate import hours_of
from vitline.vit.models.config import network_config
from vitline.vit.models.flops import training_flops
from vitline.vit.published.model_record import published_record

CURVES = {"train/loss": "Pre-training loss", "val/top1": "Accuracy on held-out images"}
LOSS, RATE = "train/loss", "throughput/images_per_s"
_UNITS = ((1e21, "ZFLOP"), (1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


class Point(NamedTuple):
    """A value of a metric during a training."""

    metric: str
    images: int
    """Images seen so far, counting repeats."""
    hours: float
    """Hours of training so far, without the time between attempts."""
    value: float


def curves(root: Store, records: Sequence[PipelineRecord]) -> list[Plot]:
    """Loss and held-out accuracy of the pre-trainings by images seen and, where their networks differ, by FLOPs; the loss by hours."""
    courses, flops = dict[str, list[Point]](), dict[str, float | None]()
    for record in records:
        stage = record.first_stages.get("pretrain")
        if stage is not None and stage.run_key is not None:
            courses[record.key] = list(course(root, stage.run_key))
            flops[record.key] = flops_per_image(root, stage.run_key, record.model)
    plots = [_by_images(metric, courses) for metric in CURVES]
    known = {key: each for key, each in flops.items() if each is not None}
    if len({*known.values()}) > 1:
        plots += [_by_flops(metric, {key: courses[key] for key in known}, known) for metric in CURVES]
    by_hours = {key: [(p.hours, p.value) for p in points if p.metric == LOSS] for key, points in courses.items()}
    plots.append(_plot(f"{CURVES[LOSS]} by hours", "hours of training", by_hours))
    return [plot for plot in plots if plot is not None]


def course(root: Store, run_key: str, until: int | None = None) -> Iterator[Point]:
    """The points of a training and, before them, of the runs that it branched from; up to a step, if one is given.

    A run that was deleted since has none.
    """
    run = root.child(f"runs/{run_key}")
    if (config := _config(run)) is None:
        return
    batch, hours, images = config["recipe"]["input"]["global_batch_size"], 0.0, 0
    if (parent := config.get("parent")) is not None:
        images = parent["step"] * batch
        for point in course(root, parent["run"].rstrip("/").rpartition("/")[2], parent["step"]):
            yield point
            hours, images = point.hours, point.images
    steps = _by_step(record for record in read_journal(run) if until is None or record.step <= until)
    last_ms: int | None = None
    for step, found in steps:
        if (loss := found.get(LOSS)) is not None:
            hours += _hours_since(loss, found.get(RATE), step * batch - images, last_ms)
            images, last_ms = step * batch, loss.timestamp_ms
        for metric in CURVES:
            if metric in found:
                yield Point(metric, step * batch, hours, found[metric].value)


def _config(run: Store) -> dict[str, Any] | None:
    """The training's config; None for a run that was deleted since."""
    file = run.read_json_or_none("config.json") or {}
    config: dict[str, Any] | None = file.get("config")
    return config


def _by_step(records: Iterable[JournalRecord]) -> list[tuple[int, Mapping[str, JournalRecord]]]:
    steps = dict[int, dict[str, JournalRecord]]()
    for record in records:
        if record.key in (*CURVES, RATE):
            steps.setdefault(record.step, {})[record.key] = record
    return sorted(steps.items(), key=lambda item: item[0])


def _hours_since(loss: JournalRecord, rate: JournalRecord | None, images: int, last_ms: int | None) -> float:
    """Hours of training for so many images: by their rate, which leaves out the time between attempts, else by the clock."""
    if rate is not None and rate.value > 0:
        return hours_of(images, rate.value)
    return 0.0 if last_ms is None else max(loss.timestamp_ms - last_ms, 0) / 3_600_000


def flops_per_image(root: Store, run_key: str, model: str | None) -> float | None:
    """FLOPs of training on one image (arXiv:2010.11929, Table 6); None where network or classes are not on record."""
    config = _config(root.child(f"runs/{run_key}"))
    if config is None:
        return None
    try:
        num_classes = published_record(open_store(model))["num_classes"] if model else 0
        return float(training_flops(network_config(config["recipe"]["model"]), num_classes))
    except (KeyError, FileNotFoundError, UnreadableRecord, ValidationError):
        return None


def _by_images(metric: str, courses: Mapping[str, Sequence[Point]]) -> Plot | None:
    lines = {key: [(p.images, p.value) for p in points if p.metric == metric] for key, points in courses.items()}
    return _plot(f"{CURVES[metric]} by images seen", "images seen", lines)


def _by_flops(metric: str, courses: Mapping[str, Sequence[Point]], flops: Mapping[str, float]) -> Plot | None:
    most = max((flops[key] * point.images for key, points in courses.items() for point in points), default=0.0)
    unit, name = next((each for each in _UNITS if most >= each[0]), (1.0, "FLOP"))
    lines = {
        key: [(flops[key] * p.images / unit, p.value) for p in points if p.metric == metric]
        for key, points in courses.items()
    }
    return _plot(f"{CURVES[metric]} by compute", f"{name} of training", lines)


def _plot(title: str, axis: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> Plot | None:
    drawn = {key: points for key, points in lines.items() if points}
    return line_plot(title, axis, drawn) if any(len(points) > 1 for points in drawn.values()) else None
