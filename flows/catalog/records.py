"""Records in the store of who ran what: one per attempt of a run, one per pipeline.

MLflow can be rebuilt from these records, the configs, states and journals alone. Imports no engine.
"""

from typing import Any, Literal

from pydantic import Field

from vitline.infra.night import Night
from vitline.infra.records import StoredRecord
from vitline.infra.runs.run_state import RunState
from vitline.infra.storage import Store

Trigger = Literal["command", "manual", "schedule"]


class Origin(StoredRecord):
    """What requested a run: a command in a shell, or a Prefect flow run."""

    trigger: Trigger = "command"
    """A command, a flow run that a person started, or one that a schedule started."""
    flow_run_id: str | None = None
    """Id of the outermost flow run."""
    flow_run_url: str | None = None
    """Its page in the Prefect UI."""
    deployment: str | None = None
    """`flow/deployment`."""
    name: str | None = None
    """Name of the flow run, if a person chose one."""
    pipeline: str | None = None
    """Key of the pipeline that the run belongs to."""


class AttemptRecord(StoredRecord):
    """`runs/<run key>/attempts/a<n>.json`, written once the attempt holds the lease."""

    schema_version: int = 1
    run_key: str
    attempt: int
    job_id: str
    """Ray submission id, or an id of the same form for a child process."""
    ray_address: str
    """URL of the job server, whose pages show the job. Empty: the job was a child process of its owner."""
    owner: str
    """user@host:pid of the process that submitted the job."""
    started_at: float
    """Unix seconds."""
    origin: Origin = Origin()


class StageRecord(StoredRecord):
    """One stage of a pipeline."""

    stage: str
    """prepare, advance (of a long run), pretrain, finetune or evaluate."""
    run_key: str | None
    """None if all corpora were finished already, so that no run was needed."""
    reused: bool
    """Whether it was finished before this pipeline requested it."""
    resumed: bool = False
    """Whether a part of it was, so that `wall_s` is less than it takes."""
    wall_s: float
    what: str
    """Summary in one line."""
    where: str
    """URI of the output."""
    protocol: str | None = None
    """Of an evaluation: its protocol, by its name in the request. None in records from before requests had several."""


class Look(StoredRecord):
    """An interim look at the scores of a night: the part of its evaluation that a verdict was made from."""

    groups: tuple[tuple[str, ...], ...]
    """The tasks, by the names of their corpora, in the groups in which they are scored."""
    num_tasks: int
    num_seeds: int
    of_seeds: int
    cost_fraction: float
    """Of the whole evaluation, by what it cost in an earlier night."""
    level: float
    """The probability of a false `better` or `worse` that this look may spend."""

    @property
    def of_tasks(self) -> int:
        return sum(len(group) for group in self.groups)

    @property
    def is_last(self) -> bool:
        return (self.num_tasks, self.num_seeds) == (self.of_tasks, self.of_seeds)

    @property
    def scored(self) -> str:
        """`7 of 19 tasks and 31 % of the cost`"""
        seeds = f" of {self.num_seeds} of {self.of_seeds} seeds" if self.of_seeds > 1 else ""
        return f"{self.num_tasks} of {self.of_tasks} tasks{seeds} and {100 * self.cost_fraction:.0f} % of the cost"


class PipelineRecord(StoredRecord):
    """`pipelines/<pipeline key>.json`, written at the start, after every stage and at the end."""

    schema_version: int = 1
    key: str
    """<name>-<12 hex> of the whole request and the night."""
    name: str
    request: dict[str, Any]
    """The validated request as JSON."""
    night: Night | None = None
    origin: Origin = Origin()
    state: RunState = "running"
    reason: str = ""
    """Why it ended in another state than finished."""
    part: str = ""
    """What it has begun last, in words: `preparation`, `pre-training` or `evaluation with vit-paper`, of the seed if there are several."""
    started_at: float
    updated_at: float
    stages: tuple[StageRecord, ...] = ()
    corpora: dict[str, str] = Field(default_factory=dict)
    """Digests of the corpora by name."""
    images: dict[str, int] = Field(default_factory=dict)
    """Images of the corpora by name."""
    model: str | None = None
    """URI of the published model."""
    model_digest: str | None = None
    images_seen: int | None = None
    """Images that the published model was trained on, counting repeats."""
    long_run_step: int | None = None
    """With `nights.advance_images`: the step up to which this pipeline trains the long run. With `nights.cooldown_at_hours`: the step
    from which it is cooled down."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Headline metrics by name (docs/generate/metrics.py), such as `val/top1` and `tasks/digits/top1`."""
    report: str | None = None
    """URI of the HTML report."""
    protocols: tuple[str, ...] = ()
    """The protocols of the request, in their order."""
    verdict_protocol: str | None = None
    """The protocol whose scores are compared with those of other pipelines."""
    look: Look | None = None
    """Of a night that was evaluated group by group: the last look at its scores."""

    @property
    def decided_early(self) -> bool:
        """Whether a part of its evaluation was left out, as the verdict of the night was certain without it."""
        return self.look is not None and not self.look.is_last

    def training(self, root: Store) -> Store | None:
        """The run of its pre-training; of several seeds the first. None before it began."""
        stage = self.first_stages.get("pretrain")
        return root.child(f"runs/{stage.run_key}") if stage and stage.run_key else None

    @property
    def stages_by_name(self) -> dict[str, list[StageRecord]]:
        """The stages of all seeds by name. `evaluate` is the evaluation that is compared with those of other pipelines; any other one
        is `evaluate/<protocol>`."""
        named: dict[str, list[StageRecord]] = {}
        for stage in self.stages:
            other = stage.protocol is not None and stage.protocol != self.verdict_protocol
            named.setdefault(f"{stage.stage}/{stage.protocol}" if other else stage.stage, []).append(stage)
        return named

    @property
    def first_stages(self) -> dict[str, StageRecord]:
        """The stages by name; of several seeds the first, whose model the record names."""
        return {name: stages[0] for name, stages in self.stages_by_name.items()}

    @property
    def other_metrics(self) -> dict[str, float]:
        """The headline metrics of all protocols but the one that is compared with other pipelines."""
        others = {stage.protocol for stage in self.stages} - {self.verdict_protocol, None}
        return {name: value for name, value in self.metrics.items() if name.partition("/")[0] in others}


def attempt_records(run: Store) -> list[AttemptRecord]:
    """The attempts of a run, oldest first. Raises UnreadableRecord."""
    found = (AttemptRecord.load(run, key) for key in run.list("attempts/"))
    return sorted(found, key=lambda record: record.attempt)


def read_pipeline(root: Store, key: str) -> PipelineRecord:
    """The record of a pipeline. Raises FileNotFoundError if there is none, UnreadableRecord if it is of another kind."""
    return PipelineRecord.load(root, f"pipelines/{key}.json")


def write_pipeline(root: Store, record: PipelineRecord) -> None:
    root.write_json(f"pipelines/{record.key}.json", record.model_dump(mode="json"))


def list_pipeline_keys(root: Store) -> list[str]:
    """Keys of all pipelines below a root."""
    keys = [key.removeprefix("pipelines/") for key in root.list("pipelines/")]
    return [key.removesuffix(".json") for key in keys if key.endswith(".json") and "/" not in key]


def list_run_keys(root: Store) -> list[str]:
    """Keys of all runs below a root that have a config."""
    return [key.split("/")[1] for key in root.list("runs/") if key.endswith("/config.json") and key.count("/") == 2]
