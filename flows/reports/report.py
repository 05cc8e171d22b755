"""One self-contained HTML page for a pipeline: stages, scores, curves, and input images."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from vitline.flows.catalog.records import StageRecord
from vitline.flows.reports.score_lines import setting
from vitline.infra.html.page import data_uri
from vitline.infra.html.page import render as render_page
from vitline.infra.html.plots import Plot
from vitline.infra.html.text import clock, percent
from vitline.vit.evaluation.evaluate import Score, init_text
from vitline.vit.evaluation.protocols import over_seeds
from vitline.vit.evaluation.reference.report import metrics_over_seeds

SCORE_COLUMNS = (
    "task",
    "protocol",
    "pre-trained",
    "from scratch",
    "difference",
    "ECE",
    "majority class",
    "chance",
    "classes",
    "test images",
)


def score_rows(scores: Sequence[Score]) -> list[list[str]]:
    """One row per task and protocol: scores of model and control over the seeds, the expected calibration error of the model (without
    one, of the control), the score of always predicting the majority class, and chance."""
    rows = []
    for task, protocol in dict.fromkeys((score.task, score.protocol) for score in scores):
        own = [score for score in scores if (score.task, score.protocol) == (task, protocol)]
        of_model, of_control = ([s for s in own if (s.model_digest is None) == control] for control in (False, True))
        model, scratch = mean_value(of_model), mean_value(of_control)
        ece = metrics_over_seeds(of_model or of_control).get(own[0].ece_name)
        any_score = own[0]
        difference = f"{100 * (model - scratch):+.1f}" if model is not None and scratch is not None else "-"
        rows.append(
            [
                task,
                protocol,
                *("-" if value is None else percent(value) for value in (model, scratch)),
                difference,
                "-" if ece is None else percent(ece),
                percent(any_score.majority_fraction),
                percent(1 / any_score.num_classes),
                f"{any_score.num_classes}",
                f"{any_score.num_examples:,}",
            ]
        )
    return rows


def mean_value(scores: Sequence[Score]) -> float | None:
    """The score over seeds; None without scores."""
    return over_seeds(scores[0].protocol, [score.value for score in scores]) if scores else None


def stage_time(stage: StageRecord) -> str:
    """`2:31`, or `reused` if the stage was finished before."""
    return "reused" if stage.reused else clock(stage.wall_s)


def standard_error(score: Score) -> float:
    """Binomial standard error of an accuracy over its test images, as a fraction."""
    return math.sqrt(max(score.value * (1 - score.value), 0.0) / score.num_examples)


def render(
    *,
    title: str,
    lead: str,
    stages: Sequence[StageRecord],
    scores: Sequence[Score],
    plots: Sequence[Plot | None],
    inputs_png: bytes | None,
    notes: Sequence[str],
) -> str:
    """The page as one HTML file without external references. Plots without values are None."""
    return render_page(
        "flows/reports/report.html.j2",
        title=title,
        lead=lead,
        now=datetime.now(UTC),
        score_columns=SCORE_COLUMNS,
        scores=score_rows(scores),
        notes=notes,
        stages=[(s.stage, s.what, s.where, stage_time(s)) for s in stages],
        plots=[plot for plot in plots if plot],
        settings=[setting_row(score, tried) for score in scores for tried in score.tried],
        inputs=data_uri(inputs_png) if inputs_png else None,
    )


def setting_row(score: Score, tried: Mapping[str, Any]) -> tuple[str, ...]:
    """A setting that was tried, with its accuracy on validation images."""
    chosen = "chosen" if tried == score.chosen else ""
    chosen = f"failed: {tried['failed']}" if "failed" in tried else chosen
    words = setting({name: value for name, value in tried.items() if name not in ("val_top1", "failed")})
    val = percent(tried["val_top1"]) if "val_top1" in tried else "-"
    return score.task, score.protocol, init_text(score.model_digest), val, chosen, words
