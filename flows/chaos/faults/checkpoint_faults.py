"""Damaged checkpoints, and numbers that are none."""

import itertools
import math
from typing import Any
from unittest.mock import patch

import vitline.vit.training.train as loop
from vitline.flows.chaos.bench import Bench, Training
from vitline.flows.chaos.promises import require
from vitline.flows.chaos.scenario import scenario
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import StopReason
from vitline.infra.runs.stopping import StopPoller
from vitline.vit.training.checkpoints.names import list_checkpoints
from vitline.vit.training.checkpoints.search import newest_checkpoint

STOP_AT = 12


@scenario("one bit of the newest checkpoint flips", "the store", about_s=4)
def damaged_checkpoint(bench: Bench) -> str:
    """A damaged checkpoint is marked by name and kept; the run resumes from an older one and ends bit for bit as without the
    fault."""
    run = stopped(bench.training("bit-rot", keep_checkpoints=3))
    newest, older, *_ = list_checkpoints(run.run)
    flip_bit(run, newest)
    before = run.run.list(newest)
    run.claim()
    run.train()
    bench.require_undisturbed(run)
    require(run.run.exists(f"{newest}/rejected.json"), f"{newest} is damaged, but was not marked")
    lost = set(before) - set(run.run.list(newest))
    require(not lost, f"{', '.join(lost)} of the damaged checkpoint was deleted")
    return f"{newest} marked, resumed from {older}"


@scenario("a bit flips in every checkpoint of a run", "the store", about_s=4)
def no_whole_checkpoint(bench: Bench) -> str:
    """A run whose checkpoints are all damaged stops with their list; it neither starts anew nor deletes one."""
    run = stopped(bench.training("all-rejected"))
    checkpoints = list_checkpoints(run.run)
    for prefix in checkpoints:
        flip_bit(run, prefix)
    before, losses = {key: run.run.read(key) for key in run.run.list("checkpoints/")}, run.losses
    run.claim()
    ended = run.train()
    require(ended == "failed", f"the run went on and ended as {ended}")
    require(run.losses == losses, "the run computed further steps")
    unnamed = [prefix for prefix in checkpoints if prefix not in run.reason]
    require(not unnamed, f"the reason does not name {', '.join(unnamed)}: {run.reason}")
    gone = [key for key, data in before.items() if not run.run.exists(key) or run.run.read(key) != data]
    require(not gone, f"changed or deleted: {', '.join(gone)}")
    return f"failed, and named {len(checkpoints)} checkpoints"


def stopped(run: Training, at: int = STOP_AT) -> Training:
    """The training after an attempt that ended as preempted at a step, with a checkpoint."""
    steps = itertools.count(1)

    def asked(poller: StopPoller) -> StopReason | None:
        return "preempted" if next(steps) == at else None

    with patch.object(StopPoller, "asked", asked):
        ended = run.train()
    require(ended == "preempted", f"the attempt that was asked to stop ended as {ended}")
    return run


def flip_bit(run: Training, prefix: str) -> None:
    """Flips a bit of the last tensor in a checkpoint."""
    key = next(key for key in run.run.list(prefix) if key.endswith(".safetensors"))
    data = bytearray(run.run.read(key))
    data[-1] ^= 1
    run.run.write(key, bytes(data))


@scenario("the gradient of one step is not a number", "the store", about_s=3)
def nan_in_one_step(bench: Bench) -> str:
    """A gradient that is not finite is never applied: the step is skipped and noted in the journal, and the run goes on."""
    run = bench.training("nan")
    with nan_in_steps({7}):
        ended = run.train()
    require(ended == "finished", f"the run ended as {ended}")
    require_finite(run)
    skipped = {r.step for r in read_journal(run.run) if r.key == "guard/nonfinite_steps" and r.value}
    require(skipped == {7}, f"the journal has the skipped steps {sorted(skipped)}, not 7")
    return "step 7 skipped and noted"


@scenario("every gradient from step 7 on is not a number", "the store", about_s=3)
def nan_for_good(bench: Bench) -> str:
    """A training whose gradients stay without a number ends as diverged, and its checkpoints hold finite numbers only."""
    run = bench.training("diverging", max_nonfinite_steps=2)
    with nan_in_steps(range(7, 1000)):
        ended = run.train()
    require(ended == "diverged", f"the run ended as {ended}")
    require_finite(run)
    return f"diverged after {len(run.losses)} steps"


def nan_in_steps(steps: "set[int] | range") -> Any:
    """While it is open, the logits of these steps are not a number; a step has two micro-batches."""
    forward, calls = loop.forward, itertools.count()

    def poisoned(*arguments: Any) -> Any:
        logits = forward(*arguments)
        return logits * math.nan if next(calls) // 2 + 1 in steps else logits

    return patch.object(loop, "forward", poisoned)


def require_finite(run: Training) -> None:
    def rejected(prefix: str, error: Exception) -> None:
        require(False, f"{prefix} is damaged: {error}")

    newest = newest_checkpoint(run.run, rejected)
    require(newest is not None, "there is no checkpoint")
    assert newest is not None
    bad = [name for name, tensor in newest[1].items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    require(not bad, f"{newest[0].prefix} holds numbers that are not finite in {', '.join(bad[:3])}")
