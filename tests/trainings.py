"""Trainings of networks that take milliseconds a step: as a flow leaves them for their drivers, and what they gave. Without torch
until one is carried out."""

from typing import Any, NamedTuple

from vitline.infra.config import replace
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.lease import Lease, acquire_lease
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.storage import Store, open_store
from vitline.vit.config import ExecutionConfig, OptimConfig, TrainConfig, TrainRecipe
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.config import ViTConfig
from vitline.vit.run.resolved import resolve

SIZE = {"image_size_px": 16, "patch_size_px": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}
EXECUTION = {"micro_batch_size": 8, "save_every_steps": 10, "log_every_steps": 1, "inspect_images": 0}


def tiny_config(name: str, corpus: str, workers: int = 1, steps: int = 20, **execution: object) -> TrainConfig:
    """With dropout and decay, so that resuming has something to get wrong."""
    return TrainConfig(
        name=name,
        corpus=corpus,
        val_split="val",
        recipe=TrainRecipe(
            model=ViTConfig(**SIZE, dropout_rate=0.1),
            input=InputConfig(global_batch_size=16, num_lanes=4, augment=AugmentConfig(image_size_px=16)),
            optim=OptimConfig(warmup_steps=2, weight_decay=0.1),
            total_steps=steps,
        ),
        execution=ExecutionConfig.model_validate({"num_workers": workers, **EXECUTION, **execution}),
    )


def begin(config: TrainConfig, root: str, run: Store | None = None, **changes: Any) -> tuple[Store, Lease]:
    """The run of a config and the lease of its next attempt; `run` for one that goes on, `changes` of its spec."""
    spec = replace(resolve(config, root).spec(), **changes)
    run = run or open_store(root).child(f"runs/{spec.run_key}")
    run.write_json("config.json", spec.model_dump(mode="json"))
    return run, acquire_lease(run, spec.run_key, job_state=lambda job: "failed", owner="test")


def finish(config: TrainConfig, root: str, run: Store | None = None) -> Store:
    """The run of a config after an attempt in this process that has come to its end."""
    from vitline.vit.run.training_run import TrainingRun
    from vitline.vit.training.world import World

    run, lease = begin(config, root, run)
    assert TrainingRun(run, lease.attempt, World()).execute() == "finished"
    return run


class Outcome(NamedTuple):
    """What no fault and no store may change: the loss of every step, the score, and the digest of the model."""

    losses: dict[int, float]
    val_top1: float
    digest: str


def losses_of(run: Store) -> dict[int, float]:
    """By step, as far as they are sealed in the journal."""
    return {record.step: record.value for record in read_journal(run) if record.key == "train/loss"}


def outcome_of(run: Store) -> Outcome:
    """Fails unless the run is finished."""
    from vitline.vit.published.models import load_model

    state = read_state(run) or NO_STATE
    assert state["state"] == "finished", f"{run.uri} is {state['state']}: {state.get('reason', 'no reason')}"
    return Outcome(losses_of(run), state["val_top1"], load_model(state["model"]).digest)
