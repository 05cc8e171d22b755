"""The page that compares pipelines: one HTML file."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.nights.compare import MEAN
from vitline.flows.nights.judge import short_name
from vitline.flows.nights.night_page import change_rows, notes
from vitline.flows.nights.night_scores import NightScores
from vitline.flows.reports.comparison.attention import attention_beside
from vitline.flows.reports.comparison.comparison import (
    MAX_PIPELINES,
    Other,
    compare_with_first,
    score_rows,
    task_pictures,
)
from vitline.flows.reports.comparison.corpora import corpora_by_digest, corpus_changes
from vitline.flows.reports.comparison.curves import curves
from vitline.flows.reports.comparison.reliability import reliability
from vitline.flows.reports.comparison.vtab_bars import vtab_bars
from vitline.infra.html.page import render
from vitline.infra.html.text import duration, points
from vitline.infra.storage import Store


def render_comparison(root: Store, records: Sequence[PipelineRecord]) -> str:
    """The page of two to six pipelines, of which the first is the reference. Raises ValueError for more."""
    if len(records) > MAX_PIPELINES:
        raise ValueError(
            f"A page compares at most {MAX_PIPELINES} pipelines, not {len(records)}; name those that matter."
        )
    corpora, (scores, others) = corpora_by_digest(root), compare_with_first(root, records)
    return render(
        "flows/reports/comparison/comparison.html.j2",
        title=" and ".join(record.key for record in records) if len(records) == 2 else f"{len(records)} pipelines",
        root=root.uri,
        now=datetime.now(UTC),
        first=records[0].key,
        pipelines=[_pipeline_row(record) for record in records],
        score_columns=["", *(record.key for record in records)],
        score_rows=[_score_row(name, of, scores, others) for name, of in score_rows(scores).items()],
        vtab=vtab_bars(root, records),
        sentences=[sentence for other in others for sentence in _sentences(other)],
        others=[
            {
                "key": other.key,
                "changed": change_rows(other.changed),
                "corpora": list(corpus_changes(corpora, records[0], record)),
            }
            for other, record in zip(others, records[1:], strict=True)
        ],
        reliability=reliability(root, records),
        plots=curves(root, records),
        time_columns=["", *(record.key for record in records)],
        time_rows=_time_rows(records),
        attention=attention_beside(root, records),
        tasks=task_pictures(root, corpora, records),
    )


def _pipeline_row(record: PipelineRecord) -> list[str]:
    images = "-" if record.images_seen is None else f"{record.images_seen:,}"
    started = time.strftime("%Y-%m-%d %H:%M", time.gmtime(record.started_at))
    spent = duration(sum(stage.wall_s for stage in record.stages if not stage.reused))
    return [record.key, record.state, started, images, spent, record.model or "-"]


def _score_row(
    name: str, tasks: Sequence[str], scores: Sequence[NightScores | None], others: Sequence[Other]
) -> list[str]:
    """A row of the table: percent, with the difference to the first pipeline."""
    cells = []
    for place, one in enumerate(scores):
        value = None if one is None else _value(tasks, one)
        if value is None:
            cells.append("-")
            continue
        text = f"{100 * value:.1f}"
        difference = others[place - 1].difference(name) if place else None
        if difference is not None:
            half = "" if difference.half_width is None else f" ±{100 * difference.half_width:.1f}"
            star = " *" if difference.word in ("better", "worse") else ""
            text += f" ({points(difference.value)}{half}){star}"
        cells.append(text)
    return [name if name == MEAN else short_name(name), *cells]


def _value(tasks: Sequence[str], one: NightScores) -> float | None:
    """The mean over tasks and seeds; None without a score on one of the tasks."""
    return float(one.values(tasks).mean()) if one.tasks.keys() >= {*tasks} else None


def _sentences(other: Other) -> list[str]:
    if other.compared is None:
        return [f"{other.key} cannot be compared: one of both has no scores."]
    identical = [f"{other.key} has the same models, bit for bit."] if other.compared.identical else []
    return identical + [f"{other.key}: {line}" for line in notes(other.compared, other.key, "the first")]


def _time_rows(records: Sequence[PipelineRecord]) -> list[list[str]]:
    stages = list(dict.fromkeys(name for record in records for name in record.stages_by_name))

    def spent(record: PipelineRecord, stage: str) -> str:
        found = record.stages_by_name.get(stage)
        if not found:
            return "-"
        return (
            "reused" if all(each.reused for each in found) else duration(sum(s.wall_s for s in found if not s.reused))
        )

    return [[stage, *(spent(record, stage) for record in records)] for stage in stages]
