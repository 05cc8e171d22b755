"""Runs side by side: what differs in their recipes, and how they ended."""

from collections.abc import Sequence
from typing import Any

from flows.catalog import show_run
from infra.config import flatten
from infra.storage import Store

Row = dict[str, Any]


def compare_runs(runs: Sequence[Store]) -> Row:
    """{"runs": keys, "differences": {field: values}, "metrics": {metric: last values}}; a missing value is None."""
    shown = [show_run(run) for run in runs]
    configs = [flatten(recipe_of(row["config"])) for row in shown]
    fields = sorted(set().union(*configs))
    differences = {
        field: [config.get(field) for config in configs]
        for field in fields
        if len({repr(config.get(field)) for config in configs}) > 1
    }
    metrics = sorted(set().union(*(row["metrics"] for row in shown)))
    return {
        "runs": [row["run"] for row in shown],
        "states": [row["state"] for row in shown],
        "differences": differences,
        "metrics": {metric: [row["metrics"].get(metric) for row in shown] for metric in metrics},
    }


def recipe_of(config: Row) -> Row:
    """What the numbers of a run depend on: its recipe and the digests of its inputs."""
    if "config" in config:
        return {"recipe": config["config"]["recipe"], "inputs": config["inputs"]}
    return {key: config[key] for key in ("tasks", "models", "protocol", "seed")}
