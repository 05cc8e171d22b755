"""The spec, run key, progress and start records of a training run. Imports no torch, so that flows start fast."""

from datetime import date
from typing import NotRequired, TypedDict

from infra.config import FrozenConfig
from infra.keys import run_key
from infra.runs.progress import RunProgress
from infra.storage import Store, open_store
from vit.config import TrainConfig
from vit.corpora.training_corpora import open_corpora
from vit.model_record import published_record

# Ray Train tries to place the worker group for so long before it reports that there is no room, and tries again.
START_TRY_S = 30.0
MIXTURE_KEY = "mixture.json"
"""In the folder of a run on a mixture: `vit.corpora.training_corpora.MixtureRecord`."""


class RunSpec(FrozenConfig):
    """`config.json` of a run: its config and the inputs that the run key covers."""

    schema_version: int = 1
    run_key: str
    """<name>-<12 hex>, see `make_spec`."""
    config: TrainConfig
    inputs: dict[str, str]
    """Digests of corpus (of a mixture also of each of its corpora), decode policy and initial model; the names of the splits."""
    models: str
    """URI of the folder in which the model is published."""
    night: date | None = None
    """UTC date of the scheduled start of a nightly run."""


def make_spec(config: TrainConfig, root: str, night: date | None = None) -> RunSpec:
    """The spec of a run. Its key covers config, corpus and initial model; FileNotFoundError if one of them is missing."""
    # The corpus digest does not cover the names of the splits, but the results of the run depend on them.
    inputs = {"split": config.split, "val_split": config.val_split or "", **open_corpora(config).inputs()}
    if config.init_model is not None:
        inputs["init_model"] = published_record(open_store(config.init_model))["digest"]
    key = run_key(config.name, config.stage, config.config_digest, inputs, night)
    return RunSpec(
        run_key=key, config=config, inputs=inputs, models=f"{open_store(root).uri.rstrip('/')}/models", night=night
    )


def read_progress(run: Store) -> RunProgress | None:
    """The latest `progress.json`, or None if there is none yet."""
    progress: RunProgress | None = run.read_json_or_none("progress.json")
    return progress


class StartRecord(TypedDict):
    """`starts/a<attempt>-from-<checkpoint>-<number>.json`: a start of the worker group."""

    at: float
    """Unix seconds."""
    world_size: int
    host: NotRequired[str]
    versions: NotRequired[dict[str, str]]
    """Versions of packages, and `commit` if the code is a git checkout."""
    hardware: NotRequired[str]
    """Kind of the device of rank 0, without names of machines: `NVIDIA H100 80GB HBM3`, or the model of the CPU."""


class WorkerError(TypedDict):
    """`errors/a<attempt>-<milliseconds>-rank<rank>.json`: an error that ended a worker."""

    at: float
    """Unix seconds."""
    rank: int
    error: str
    stacks: NotRequired[str]
    """Key of the stacks of a worker that was killed because it made no progress."""


def read_starts(run: Store) -> list[StartRecord]:
    """The starts of the worker group, by their keys. Empty for a run that is no training."""
    return [run.read_json(key) for key in run.list("starts/")]
