"""The state and progress of a run: step of the total, images per second, and the time left."""

from collections.abc import Iterable
from typing import Any

from data_prep.progress import PROGRESS_KEY, preparation_progress
from flows.console import duration
from infra.storage import Store
from vit.run_spec import read_progress

JSON = dict[str, Any]
AT_WORK = ("running", "waiting")
PROGRESS = ("step", "total_steps", "unit", "images_per_s", "bytes_per_s", "remaining_s", "refused", "loss", "running")


def attempts_of(keys: Iterable[str]) -> int:
    """The newest attempt among the keys of a run; 0 before the first."""
    numbers = (key.rpartition("/a")[2].removesuffix(".json") for key in keys if "attempts/a" in key)
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def standing(root: Store, run: Store, config: JSON, state: JSON | None, attempts: int) -> JSON:
    """State and attempt, and for a running one its progress: step, total_steps, unit, images_per_s, remaining_s.

    `waiting` is an attempt that was submitted and has written no state yet: it is starting or waits for the cluster.
    """
    written = state or {}
    if attempts > written.get("attempt", 0):
        return {"state": "waiting", "attempt": attempts}
    found = {
        "state": written.get("state", "not started"),
        "attempt": written.get("attempt"),
        "step": written.get("step"),
    }
    if found["state"] != "running":
        return found
    return found | {name: value for name, value in (progress_of(root, run, config) or {}).items() if value is not None}


def progress_of(root: Store, run: Store, config: JSON) -> JSON | None:
    """The progress that observers show; None before the first step."""
    if "requests" not in config:
        return read_progress(run)
    corpora = []
    for name in (request["name"] for request in config["requests"]):
        # To compute the version, the source would have to be listed, which can take long. The newest progress is taken.
        keys = [key for key in root.list(f"corpora/{name}/") if key.endswith(PROGRESS_KEY)]
        if keys:
            newest = max(keys, key=lambda key: root.read_json(key)["started_at"])
            corpora.append(root.child(newest.removesuffix(f"/{PROGRESS_KEY}")))
    return preparation_progress(corpora)


def for_people(shown: JSON) -> JSON:
    """A run or pipeline with its state first and the fields of its config under the names that `--set` takes."""
    head = ("run", "stage", "state", "reason", "attempt")
    progress = {"progress": progress_text(shown)} if progress_text(shown) else {}
    rest = {
        k: v
        for k, v in shown.items()
        if k not in (*head, *PROGRESS, "config", "metrics") and v not in (None, "", [], {})
    }
    config = dict(shown.get("config", {}))
    training = config.pop("config", {})
    known = {"schema_version", "run_key", *training}
    config = {**training, **{name: value for name, value in config.items() if name not in known}}
    return {k: shown[k] for k in head if shown.get(k)} | progress | rest | {"metrics": shown["metrics"], **config}


def progress_text(row: JSON) -> str:
    """`120 of 600 steps, 640 images/s, 1:10 left`; empty if there is no step."""
    if row.get("step") is None:
        return ""
    total = f" of {row['total_steps']:,}" if row.get("total_steps") else ""
    part = f"{row['part']}: " if "part" in row else ""
    parts = [f"{part}{row['step']:,}{total} {row.get('unit', 'steps')}"]
    if row.get("images_per_s"):
        parts.append(f"{row['images_per_s']:,.0f} images/s")
    if row["state"] == "running" and row.get("remaining_s") is not None:
        parts.append(f"{duration(row['remaining_s'])} left")
    return ", ".join(parts)
