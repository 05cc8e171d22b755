"""Runs and pipelines side by side: differences of their requests, final metrics, and the published rows."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from vitline.flows.catalog.lists import find_run, list_pipelines, show_run
from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.catalog.stored_configs import RunFile
from vitline.infra.config import flatten
from vitline.infra.names import matching
from vitline.infra.night import night_text
from vitline.infra.storage import Store
from vitline.vit.evaluation.reference.published_scores import ROWS
from vitline.vit.evaluation.reference.report import published_mean, published_metrics
from vitline.vit.evaluation.tasks import GROUPS, VTAB_TASKS


class Comparison(TypedDict):
    """Runs side by side: each list has a value for each run, None where it has none."""

    runs: list[str]
    """Keys of runs or pipelines, and labels of published rows."""
    states: list[str]
    differences: dict[str, list[Any]]
    """Fields of the requests that differ."""
    metrics: dict[str, list[float | None]]
    """The last value of every metric."""


def compare_runs(root: str, runs: Sequence[Store]) -> Comparison:
    shown = [show_run(root, run) for run in runs]
    return side_by_side(
        [row["run"] for row in shown],
        [row["state"] for row in shown],
        [recipe_of(row["config"]) for row in shown],
        # The load of the machines says nothing about a result.
        [{k: v for k, v in row["metrics"].items() if not k.startswith("system/")} for row in shown],
    )


def compare_pipelines(records: Sequence[PipelineRecord]) -> Comparison:
    """The same for pipelines, with the published rows of the scored tasks as further columns."""
    names = [record.key for record in records]
    requests = [{"night": r.night and night_text(r.night), "request": r.request, "corpora": r.corpora} for r in records]
    metrics: list[Mapping[str, float]] = [record.metrics for record in records]
    states = [str(record.state) for record in records]
    for label, row in published_beside({name for scored in metrics for name in scored}).items():
        metrics.append(row)
        names, states, requests = [*names, label], [*states, "published"], [*requests, {}]
    return side_by_side(names, states, requests, metrics)


def published_beside(scored: Collection[str]) -> dict[str, dict[str, float]]:
    """Metrics of published rows by label for the scored tasks: the paper's Tables 2 and 9 and BiT's re-runs. If tasks of VTAB
    were scored, also the means of VTAB, over all tasks and over the scored ones."""
    tasks = [task.corpus_name for task in VTAB_TASKS if f"vtab/{task.name}/top1" in scored]
    partial_mean = f"vtab/all_{len(tasks)}of{len(VTAB_TASKS)}/top1"
    names = {*scored} | ({f"vtab/{group}/top1" for group in (*GROUPS, "all")} if tasks else set())
    rows = {}
    for label, row in ROWS.items():
        if row.is_headline:
            metrics = published_metrics(row)
            if partial_mean in scored and (mean := published_mean(row, "all", tasks)) is not None:
                metrics[partial_mean] = mean
            if shown := {name: value for name, value in metrics.items() if name in names}:
                rows[label] = shown
    return rows


def compare_newest(root: str, keys: Sequence[str], newest: int) -> Comparison:
    """Compares the pipelines or runs whose keys begin with `keys`, or without keys the newest pipelines.

    Raises ValueError for a key that matches none or several, and for fewer than two runs.
    """
    chosen = _pipelines_or_none(root, keys, newest)
    if chosen is not None:
        return compare_pipelines(chosen)
    return compare_runs(root, [find_run(root, key) for key in keys])


def pipelines_of(root: str, keys: Sequence[str], newest: int) -> list[PipelineRecord]:
    """The same pipelines, for a page. Raises ValueError for keys of runs as well."""
    chosen = _pipelines_or_none(root, keys, newest)
    if chosen is None:
        raise ValueError(
            f"A page compares pipelines, and {' '.join(keys)} are not all keys of pipelines; `vitline runs ls` lists them."
        )
    return chosen


def _pipelines_or_none(root: str, keys: Sequence[str], newest: int) -> list[PipelineRecord] | None:
    """The pipelines of these keys, or the newest; None if a key is not that of one pipeline."""
    records = list_pipelines(root)
    if not keys:
        chosen = records[:newest]
        if len(chosen) < 2:
            raise ValueError(
                f"There are {len(chosen)} pipelines below {root}; comparing takes at least two. Give the keys of runs instead."
            )
        return chosen
    if len(keys) < 2:
        raise ValueError(f"Comparing takes at least two runs, not {keys[0]!r} alone; `vitline runs ls` lists them.")
    pipelines = {record.key: record for record in records}
    found = [matching(pipelines, key) for key in keys]
    return [pipelines[matches[0]] for matches in found] if all(len(matches) == 1 for matches in found) else None


def side_by_side(
    names: Sequence[str], states: Sequence[str], requests: Sequence[Any], metrics: Sequence[Mapping[str, float]]
) -> Comparison:
    configs = [flatten(tree) for tree in requests]
    fields = sorted(set().union(*configs))
    differences = {
        field: [config.get(field) for config in configs]
        for field in fields
        if len({repr(config.get(field)) for config in configs if config}) > 1
    }
    every = sorted(set().union(*metrics))
    return {
        "runs": list(names),
        "states": list(states),
        "differences": differences,
        "metrics": {metric: [row.get(metric) for row in metrics] for metric in every},
    }


def recipe_of(config: RunFile) -> dict[str, Any]:
    """The part of a config that the results of a run depend on: its recipe and the digests of its inputs."""
    if "config" in config:
        return {"recipe": config["config"]["recipe"], "inputs": config["inputs"]}
    if "requests" in config:
        return {"requests": config["requests"]}
    return {key: value for key, value in config.items() if key in ("tasks", "models", "protocol", "seed")}
