"""The state and progress of a run: step of the total, images per second, and the time left."""

from collections.abc import Mapping
from typing import Any, NotRequired, Required, cast

from vitline.data_prep.progress import PROGRESS_KEY, preparation_progress
from vitline.flows.catalog.snapshot import StoredRun
from vitline.flows.catalog.stored_configs import RunFile
from vitline.infra.html.text import clock
from vitline.infra.runs.progress import RunProgress
from vitline.infra.runs.run_state import WAITING
from vitline.infra.storage import Store
from vitline.vit.checkpoints.best import BestMark
from vitline.vit.run.run_spec import read_progress

AT_WORK = ("running", WAITING)
PROGRESS = ("step", "total_steps", "unit", "images_per_s", "bytes_per_s", "remaining_s", "refused", "loss", "running")


class RunStatus(RunProgress):
    """State of a run or pipeline, and its progress as far as it is known."""

    state: Required[str]
    """A run state, `waiting`, `not started` or `unreadable`."""
    attempt: NotRequired[int | None]
    """Of a run."""
    started_at: NotRequired[float]
    """Of a pipeline, in Unix seconds."""
    part: NotRequired[str]
    """The active stage of a pipeline, whose progress it has."""
    at_work: NotRequired[str]
    """Key of the run of this stage."""


class RunRow(RunStatus):
    """A run or a pipeline as a row of `vitline runs ls`."""

    run: str
    """Key of the run or pipeline."""
    stage: str
    val_top1: float | None
    reason: str | None
    model: str | None
    updated_at: float | None
    """Unix seconds; of a waiting run, the start of its attempt."""
    uri: str
    pipeline: NotRequired[str | None]
    """The pipeline of an active run."""


class WorkDetail(RunRow):
    """A run with its config, or a pipeline, which has the fields of its record in addition."""

    config: NotRequired[RunFile]
    metrics: dict[str, float]
    """The last value of every metric."""
    checkpoints: NotRequired[list[int]]
    """Steps of the kept checkpoints that are not marked as damaged; `vitline pretrain branch` starts from them."""
    best_checkpoint: NotRequired[BestMark]
    """With `execution.keep_best`: the one with the best validation score."""
    branch_of: NotRequired[str]
    """Of a branch: run key and step of its parent's checkpoint."""
    branches: NotRequired[list[str]]
    """The branches of a run, each as `<run key> at step <step>`."""


def run_status_of(root: Store, run: StoredRun, config: RunFile) -> RunStatus:
    """State and attempt, and for a running one its progress: step, total_steps, unit, images_per_s, remaining_s.

    `waiting` is an attempt that was submitted and has written no state yet: it is starting or waits for the cluster. So is one whose
    workers have to be started again and wait for room.
    """
    state = run.state
    if run.attempts > (state["attempt"] if state else 0):
        return {"state": WAITING, "attempt": run.attempts}
    if state is None:
        return {"state": "not started", "attempt": None}
    progress = progress_of(root, run.records, config) if state["state"] == "running" else None
    known = {name: value for name, value in progress.items() if value is not None} if progress else {}
    now = WAITING if known.get("waiting_for") else state["state"]
    return cast(RunStatus, {"attempt": state["attempt"], "step": state.get("step"), **known, "state": now})


def progress_of(root: Store, run: Store, config: RunFile) -> RunProgress | None:
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


def flattened(work: WorkDetail) -> dict[str, Any]:
    """A run or pipeline with its state first and the fields of its config under the names that `--set` takes."""
    head = ("run", "stage", "state", "reason", "attempt")
    shown: Mapping[str, Any] = work
    progress = {"progress": progress_text(work)} if progress_text(work) else {}
    rest = {
        k: v
        for k, v in shown.items()
        if k not in (*head, *PROGRESS, "config", "metrics") and v not in (None, "", [], {})
    }
    config = dict(shown.get("config", {}))
    training = config.pop("config", {})
    known = {"schema_version", "run_key", *training}
    config = {**training, **{name: value for name, value in config.items() if name not in known}}
    return {k: shown[k] for k in head if shown.get(k)} | progress | rest | {"metrics": work["metrics"], **config}


def progress_text(row: RunRow) -> str:
    """`120 of 600 steps, 640 images/s, 1:10 left`; empty if there is no step."""
    step, remaining_s = row.get("step"), row.get("remaining_s")
    if step is None:
        return ""
    total = f" of {row['total_steps']:,}" if row.get("total_steps") else ""
    part = f"{row['part']}: " if "part" in row else ""
    parts = [f"{part}{step:,}{total} {row.get('unit', 'steps')}"]
    if row.get("images_per_s"):
        parts.append(f"{row['images_per_s']:,.0f} images/s")
    if row["state"] == "running" and remaining_s is not None:
        parts.append(f"{clock(remaining_s)} left")
    return ", ".join(parts)
