"""Scores as a table: tasks as columns of the 19, group means, coverage, and the published rows beside (ViT, Table 9)."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from vit.vtab.tasks import GROUPS, VTAB_TASKS, benchmark_name

if TYPE_CHECKING:  # whoever only averages scores needs no torch
    from vit.vtab.evaluate import Score

# arXiv:2010.11929v2, Table 9: VTAB-1k top-1, percent, in the order of VTAB_TASKS; pre-training data in the name.
PUBLISHED: dict[str, tuple[float, ...]] = {
    "ViT-H/14 (JFT)": (95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9, 83.3, 96.7, 91.4, 76.6, 91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2),
    "ViT-L/16 (JFT)": (95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4, 83.6, 96.5, 89.7, 77.1, 86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1),
    "ViT-L/16 (I21k)": (90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9, 82.5, 95.6, 85.2, 75.3, 70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7),
}  # fmt: skip


def group_means(scores: Mapping[str, float]) -> dict[str, float]:
    """Metric keys of DESIGN 3.5 from fractions by task name: a group's mean only when all of its tasks are there, the
    overall mean as `vtab/all/top1` for 19 tasks and as `vtab/all_<n>of19/top1` for fewer."""
    means = {}
    for group in GROUPS:
        names = [task.name for task in VTAB_TASKS if task.group == group]
        if all(name in scores for name in names):
            means[f"vtab/{group}/top1"] = mean(scores[name] for name in names)
    have = [scores[task.name] for task in VTAB_TASKS if task.name in scores]
    if have:
        key = "vtab/all/top1" if len(have) == len(VTAB_TASKS) else f"vtab/all_{len(have)}of{len(VTAB_TASKS)}/top1"
        means[key] = mean(have)
    return means


def published_row(name: str) -> dict[str, float]:
    """A published row as fractions by task name."""
    return {task.name: value / 100 for task, value in zip(VTAB_TASKS, PUBLISHED[name], strict=True)}


def coverage(prepared: Iterable[str]) -> str:
    """`VTAB: 3 of 19 tasks prepared`, from names of corpora."""
    names = set(prepared)
    done = sum(task.corpus_name in names for task in VTAB_TASKS)
    return f"VTAB: {done} of {len(VTAB_TASKS)} tasks prepared"


def scores_by_model(scores: "Sequence[Score]") -> dict[str, dict[str, float]]:
    """Model label -> task -> top-1; several seeds of one model are averaged."""
    table: dict[str, dict[str, list[float]]] = {}
    for score in scores:
        # <models>/<name>/<version>: what people call it, and what `vitline model show` takes.
        label = "/".join(score.model.rstrip("/").split("/")[-2:]) if score.model else "from scratch"
        table.setdefault(f"{label} ({score.protocol})", {}).setdefault(benchmark_name(score.task), []).append(
            score.value
        )
    return {label: {task: mean(values) for task, values in row.items()} for label, row in table.items()}
