"""What the store keeps about who ran what: one record per attempt of a run, one per pipeline.

MLflow can be rebuilt from these, the configs, states and journals alone. Imports no engine.
"""

from datetime import date
from typing import Any, Literal

from pydantic import Field

from infra.config import FrozenConfig
from infra.runs.run_state import RunState
from infra.storage import Store

Trigger = Literal["command", "manual", "schedule"]


class Origin(FrozenConfig):
    """Who asked: a person's shell, or a Prefect flow run."""

    trigger: Trigger = "command"
    """A command, a flow run started by hand, or one that a schedule started."""
    flow_run_id: str | None = None
    """Of the outermost flow run."""
    flow_run_url: str | None = None
    """Its page in the Prefect UI."""
    deployment: str | None = None
    """`flow/deployment`."""
    name: str | None = None
    """Of the flow run, where a person gave it one."""
    pipeline: str | None = None
    """Key of the pipeline that this belongs to."""


class AttemptRecord(FrozenConfig):
    """`runs/<run key>/attempts/a<n>.json`, written once the attempt holds the claim."""

    schema_version: int = 1
    run_key: str
    attempt: int
    job_id: str
    """Ray submission id, or the like of a child process."""
    ray_address: str
    """URL of the job server, whose pages show the job. Empty: the job was a child process of its owner."""
    owner: str
    """user@host:pid of the process that submitted the job."""
    started_at: float
    """Unix seconds."""
    origin: Origin = Origin()


class StageRecord(FrozenConfig):
    """One stage of a pipeline."""

    stage: str
    """prepare, pretrain, finetune or evaluate."""
    run_key: str | None
    """None where finished corpora were found without a run of their own."""
    reused: bool
    """Finished before this pipeline asked for it."""
    wall_s: float
    what: str
    """One line for people."""
    where: str
    """URI of what it made."""


class PipelineRecord(FrozenConfig):
    """`pipelines/<pipeline key>.json`, written at the start, after every stage and at the end."""

    schema_version: int = 1
    key: str
    """<name>-<12 hex> of the whole request and the night."""
    name: str
    request: dict[str, Any]
    """The request as it was resolved, JSON."""
    night: date | None = None
    origin: Origin = Origin()
    state: RunState = "running"
    reason: str = ""
    """Why it ended otherwise than finished."""
    started_at: float
    updated_at: float
    stages: tuple[StageRecord, ...] = ()
    corpora: dict[str, str] = Field(default_factory=dict)
    """Digest by name of the corpora."""
    model: str | None = None
    """URI of the published model."""
    model_digest: str | None = None
    images_seen: int | None = None
    """By the published model."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Headline metrics under the names of DESIGN 3.5, as `val/top1` and `tasks/digits/top1`."""
    report: str | None = None
    """URI of the HTML report."""


def attempt_records(run: Store) -> list[AttemptRecord]:
    """The attempts of a run, oldest first."""
    records = [AttemptRecord.model_validate(run.read_json(key)) for key in run.list("attempts/")]
    return sorted(records, key=lambda record: record.attempt)


def read_pipeline(root: Store, key: str) -> PipelineRecord:
    """Raises FileNotFoundError for a pipeline that never was."""
    return PipelineRecord.model_validate(root.read_json(f"pipelines/{key}.json"))


def write_pipeline(root: Store, record: PipelineRecord) -> None:
    root.write_json(f"pipelines/{record.key}.json", record.model_dump(mode="json"))


def list_run_keys(root: Store) -> list[str]:
    """Keys of all runs below a root that have a config."""
    return [key.split("/")[1] for key in root.list("runs/") if key.endswith("/config.json") and key.count("/") == 2]
