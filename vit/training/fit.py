"""Trains a run to its end or to a stop, saves on the way, and rewinds where the spike guard requests it.

The order in which an attempt writes. Because of it, a kill at any point loses only the steps since the last checkpoint and repeats
no result. "Lease" stands for a check of the lease, which ends an attempt that has lost it.

1. Lease. Rank 0 counts the start (`starts/`) before anything that could fail each time, so that no failure repeats without end.
2. All ranks restore the newest whole checkpoint. Lease: rank 0 marks damaged ones.
3. Lease. Rank 0 writes `mixture.json`, once, and `state.json` as running.
4. Opening the journal closes those of earlier attempts: from here they seal nothing more.
5. Before the first step of the run: `inputs.png`.
6. The metrics of a step are recorded in memory; every 30 s a thread seals them (lease). Lease: record and page of a spike.
7. Then the due hooks run in order. The first one saves in a thread. Lease: each rank writes its tensors, then their index. Rank 0
   waits for the indexes of all ranks. Lease: it seals the journal up to this step and marks the best checkpoint. Lease: it writes
   the mark of a permanent checkpoint, then the manifest, which completes the checkpoint. Lease: a branch unpins its parent's, and
   older checkpoints are deleted, each manifest first. The error of a save ends the loop at the next sync point.
8. Before an early stop the state is saved, unless a cancel discards it. `fit` returns after the last save is complete.
9. A rewind starts when no save is in flight: the older state is restored. Lease: later checkpoints are deleted, each manifest
   first, and the ranks meet before the next step.
10. At the end, with the last checkpoint complete: scores are recorded, the model is published (lease), its figures are drawn.
    Lease: the best checkpoint is marked. The rest of the journal is sealed (lease). Lease: `state.json` is written last.

Steps 1 to 5 and 10 are in `run/training_run.py`, 7 in `checkpoints/save.py`, 9 in `checkpoints/restore.py`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from vitline.infra.runs.run_state import RunState
from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.input.batches import Batch, LoaderResources, Source, source_batches
from vitline.vit.training.bad_examples import BadExamples
from vitline.vit.training.guard.spike_guard import Spike
from vitline.vit.training.loop import Hook, TrainState, train
from vitline.vit.training.metrics import Metrics
from vitline.vit.training.world import World


@dataclass(frozen=True)
class FitPlan:
    """What is trained, on what, and how far this attempt goes."""

    recipe: TrainRecipe
    execution: ExecutionConfig
    sources: Sequence[Source]
    loading: LoaderResources
    micro_batch: int
    epoch: int
    """Examples in an epoch of all sources."""
    mask_bad: bool = True
    """Leaves out examples that cannot be decoded, and counts them; otherwise the first one raises ShardError."""
    pause_at_step: int | None = None
    pause_at: float | None = None
    """Unix seconds."""

    def pauses(self, step: int) -> bool:
        """Whether this attempt pauses after this step."""
        return self.pause_at_step is not None and self.pause_at_step <= step < self.recipe.total_steps


class Saver(Protocol):
    """Saves in the background, such as `CheckpointSaver`."""

    def raise_error(self) -> None:
        """Raises the error of the last save as soon as there is one, without waiting."""

    def wait(self) -> None:
        """Returns once no save is in flight. Raises the error of the last save."""


@dataclass(frozen=True)
class RunIO:
    """What connects a training to its run. `stopped` and `reached` are called on rank 0 only, the others on every rank."""

    stopped: Callable[[], RunState | None]
    reached: Callable[[int], None]
    """Called with each step after which the ranks meet."""
    report: Callable[[int, Metrics], None]
    spike: Callable[[Spike, Sequence[Batch], Sequence[Tensor]], None]
    seen: Callable[[int, Iterator[Sequence[Batch]]], Iterator[Sequence[Batch]]]
    """Given a step and the batches after it: the same batches, observed as they are read."""
    save_every: Callable[[], tuple[Hook, Saver]]
    """Called at the start and after each rewind."""
    rewind: Callable[[TrainState], None]


class Fitted(NamedTuple):
    """How a training ended, and why, if the training itself knows."""

    outcome: RunState
    reason: str | None


def fit(plan: FitPlan, state: TrainState, world: World, io: RunIO, hooks: Sequence[Hook]) -> Fitted:
    """Trains from `state` to the last step, or to a stop. Every rank must call it.

    Raises CannotResume where there is nothing to go back to, LeaseLost, and what reading and saving raise.
    """
    bad = BadExamples(plan.execution.max_bad_fraction, plan.epoch)
    while (outcome := _train(plan, state, world, io, hooks, bad)) == "rewind":
        io.rewind(state)
    if outcome == "failed":  # without an error, because a restart of the worker group would not help
        return Fitted(outcome, bad.reason(world))
    too_many = outcome == "diverged" and state.guard.too_many(state.step)
    return Fitted(outcome, state.guard.reason(state.step) if too_many else None)


def _train(
    plan: FitPlan, state: TrainState, world: World, io: RunIO, hooks: Sequence[Hook], bad: BadExamples
) -> RunState | Literal["rewind"]:
    save, saver = io.save_every()

    def stop_requested() -> RunState | None:
        io.reached(state.step)
        saver.raise_error()  # a lease that was lost at a save ends the loop now, not at the next save
        in_time = plan.pause_at is None or time.time() < plan.pause_at
        return io.stopped() or ("paused" if plan.pauses(state.step) or not in_time else None)

    if plan.pauses(state.step):  # it was killed after its last checkpoint
        return "paused"
    with source_batches(
        plan.sources,
        plan.recipe.input,
        seed=plan.recipe.seed,
        micro_batch_size=plan.micro_batch,
        start_step=state.step,
        num_steps=plan.recipe.total_steps,
        mask_bad=plan.mask_bad,
        loading=plan.loading,
    ) as loaded:
        for hook in hooks:
            hook.make_up(state)
        outcome = train(
            state,
            io.seen(state.step, loaded),
            plan.recipe,
            plan.execution,
            world,
            report=io.report,
            hooks=[save, *hooks],
            stop_requested=stop_requested,
            bad=bad,
            input_waits=lambda: loaded.waits,
            input_ready=lambda: loaded.is_ready,
            seen_spike=io.spike,
            pause_at_step=plan.pause_at_step,
        )
    saver.wait()
    return outcome
