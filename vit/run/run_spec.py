"""The spec, progress and start records of a training run. Imports no torch, so that flows start fast."""

from typing import TypedDict

from pydantic import PositiveFloat, PositiveInt

from vitline.infra.config import FrozenConfig
from vitline.infra.night import Night
from vitline.infra.records import UnreadableRecord, reading
from vitline.infra.runs.progress import RunProgress
from vitline.infra.storage import Store, open_store
from vitline.vit.config import ParentCheckpoint, TrainConfig

# Ray Train tries to place the worker group for so long before it reports that there is no room, and tries again.
START_TRY_S = 30.0
MIXTURE_KEY = "mixture.json"
"""In the folder of a run on a mixture: `vitline.vit.corpora.training_corpora.MixtureRecord`."""


class RunSpec(FrozenConfig):
    """`config.json` of a run: its config and the inputs that the run key covers."""

    schema_version: int = 1
    run_key: str
    """<name>-<12 hex>, see `vitline.vit.run.resolved`."""
    config: TrainConfig
    inputs: dict[str, str]
    """Digests of corpus (of a mixture also of each of its corpora), decode policy and initial model; the names of the splits; of a
    branch `parent`, run key and step of the checkpoint that it starts from."""
    models: str
    """URI of the folder in which the model is published."""
    night: Night | None = None
    """The scheduled start of a nightly run."""
    pause_at_step: PositiveInt | None = None
    """The step at which this attempt pauses with a checkpoint, from which a later one continues; None trains to the end."""
    pause_at: PositiveFloat | None = None
    """Unix seconds at which this attempt pauses likewise; None for no such time."""


def parent_spec(parent: ParentCheckpoint) -> RunSpec:
    """The spec of the run that a branch starts from. Raises ValueError if there is none."""
    run = open_store(parent.run)
    found = run.read_json_or_none("config.json")
    if found is None:
        raise ValueError(f"There is no run at {run.uri}; `vitline runs ls` lists them.")
    try:
        with reading(run.uri_of("config.json")):
            return RunSpec.model_validate(found)
    except UnreadableRecord as odd:
        raise ValueError(f"{odd} A branch needs a training that this version of vitline can read.") from odd


def read_progress(run: Store) -> RunProgress | None:
    """The latest `progress.json`, or None if there is none yet."""
    progress: RunProgress | None = run.read_json_or_none("progress.json")
    return progress


class StartRecord(TypedDict):
    """`starts/a<attempt>-from-<checkpoint>-<number>.json`: a start of the worker group."""

    at: float
    """Unix seconds."""
    world_size: int
    host: str
    versions: dict[str, str]
    """Versions of packages, and `commit` if the code is a git checkout."""
    hardware: str
    """Kind of the device of rank 0, without names of machines: `NVIDIA H100 80GB HBM3`, or the model of the CPU."""


def read_starts(run: Store) -> list[StartRecord]:
    """The starts of the worker group, by their keys. Empty for a run that is no training."""
    return [run.read_json(key) for key in run.list("starts/")]
