"""How fast trainings ran, by their own records, beside what a plan would have said of them."""

import logging
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from vitline.flows.catalog.snapshot import RootSnapshot, StoredRun
from vitline.infra.html.text import num_bytes
from vitline.infra.records import UnreadableRecord, readable, reading
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import NO_STATE, RunStateRecord, read_state
from vitline.infra.storage import Store, open_store
from vitline.vit.config import TrainConfig
from vitline.vit.cost.estimate import TRAINING_MFU, PlanGpus, demand_of
from vitline.vit.run.run_spec import read_starts
from vitline.vit.training.timing.gpus import known_gpu

log = logging.getLogger(__name__)
# With fewer records, the warmup of caches and compilers would distort the median.
MIN_RECORDS = 3


@dataclass(frozen=True)
class MeasuredSpeed:
    """The speed of a training."""

    run: str
    config: TrainConfig
    images_per_s: float
    """Median over all workers."""
    workers: int
    hardware: str
    """The device of a worker, as in `StartRecord`; empty before the first start."""
    memory: tuple[int, int] | None = None
    """On GPUs: most bytes that a worker has had, and what a plan says."""

    def text(self, num_classes: int) -> str:
        """`birds-0a1b2c: 26,400 images/s on 8 x NVIDIA H100, 1.03 of the plan at 35% of its peak`"""
        recipe = self.config.recipe
        where = f"{self.workers} x {self.hardware}" if self.hardware else f"{self.workers} workers"
        said = f"{self.run}: {self.images_per_s:,.0f} images/s on {where}"
        if known_gpu(self.hardware) is not None:
            planned = self.workers * demand_of(recipe, num_classes, PlanGpus(self.hardware)).images_per_s
            said += f", {self.images_per_s / planned:.2f} of the plan at {TRAINING_MFU:.0%} of its peak"
        if self.memory is not None:
            had, plan = self.memory
            said += f"; {num_bytes(had)} of memory, {had / plan:.2f} of the plan"
        return said


def measured_speeds(root: str, training: TrainConfig) -> Iterator[MeasuredSpeed]:
    """The finished and paused trainings of the same network, batch, precision and frozen layers, the newest first."""
    with RootSnapshot.read(open_store(root), ["run"]) as snapshot:
        ended = {run.key: at for run in snapshot.runs.values() if (at := _ended_at(run)) is not None}
        for key in sorted(ended, key=lambda key: -ended[key]):
            run = snapshot.runs[key]
            # A config with fields of a newer version is none of the same training.
            config = next(readable([run], _config, lambda odd: None), None)
            if config is not None and _like(config) == _like(training) and (found := measured_speed(run.store, config)):
                yield found


def _ended_at(run: StoredRun) -> float | None:
    """When a run was finished or paused; None if it was not, or another attempt has followed."""
    state = run.state or NO_STATE
    ended = state["state"] in ("finished", "paused") and state["attempt"] >= run.attempts
    return state["updated_at"] if ended else None


def measured_speed(run: Store, config: TrainConfig) -> MeasuredSpeed | None:
    """The speed of one training; None if its journal has too few records or cannot be read, which fails nothing that only shows it."""
    try:
        rates = [record.value for record in read_journal(run) if record.key == "throughput/images_per_s"]
        last = max(read_starts(run), key=lambda start: start["at"], default=None)
        state = read_state(run)
    except (OSError, ValueError, UnreadableRecord) as error:
        log.warning("the speed of %s is not known: %s", run.uri, error)
        return None
    if len(rates) < MIN_RECORDS:
        return None
    workers, hardware = (last["world_size"], last["hardware"]) if last else (config.execution.num_workers, "")
    key = run.uri.rstrip("/").rpartition("/")[2]
    return MeasuredSpeed(key, config, statistics.median(rates), workers, hardware, _memory(state))


def _memory(state: RunStateRecord | None) -> tuple[int, int] | None:
    if state is None or "peak_memory_bytes" not in state:
        return None
    return state["peak_memory_bytes"], state["planned_memory_bytes"]


def _config(run: StoredRun) -> TrainConfig:
    with reading(run.store.uri_of("config.json")):
        return TrainConfig.model_validate(run.records.read_json("config.json")["config"])


def _like(training: TrainConfig) -> tuple[object, ...]:
    recipe = training.recipe
    return training.stage, recipe.model, recipe.input.global_batch_size, recipe.precision, recipe.optim.frozen
