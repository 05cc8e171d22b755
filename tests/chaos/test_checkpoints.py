"""Damaged checkpoints, and numbers that are none."""

import hashlib
import itertools
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import vitline.vit.training.loop as loop
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import StopReason
from vitline.infra.runs.stopping import StopPoller
from vitline.vit.checkpoints import tensor_file
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.checkpoints.search import newest_checkpoint
from vitline.vit.run import start_state

from .bench import Training

pytestmark = pytest.mark.slow

STOP_AT = 12


def test_damaged_checkpoint(bench):
    """A damaged checkpoint is marked by name and kept; the run resumes from an older one and ends bit for bit as without the
    fault."""
    run = stopped(bench.training("bit-rot", keep_checkpoints=3))
    newest, *_ = list_checkpoints(run.run)
    flip_bit(run, newest)
    before = run.run.list(newest)
    run.lease()
    run.train()
    bench.require_undisturbed(run)
    assert run.run.exists(f"{newest}/rejected.json"), f"{newest} is damaged, but was not marked"
    lost = set(before) - set(run.run.list(newest))
    assert not lost, f"{', '.join(lost)} of the damaged checkpoint was deleted"


def test_no_whole_checkpoint(bench):
    """A run whose checkpoints are all damaged stops with their list; it neither starts anew nor deletes one."""
    run = stopped(bench.training("all-rejected"))
    checkpoints = list_checkpoints(run.run)
    for prefix in checkpoints:
        flip_bit(run, prefix)
    before, losses = {key: run.run.read(key) for key in run.run.list("checkpoints/")}, run.losses
    run.lease()
    ended = run.train()
    assert ended == "failed", f"the run went on and ended as {ended}"
    assert run.losses == losses, "the run computed further steps"
    unnamed = [prefix for prefix in checkpoints if prefix not in run.reason]
    assert not unnamed, f"the reason does not name {', '.join(unnamed)}: {run.reason}"
    gone = [key for key, data in before.items() if not run.run.exists(key) or run.run.read(key) != data]
    assert not gone, f"changed or deleted: {', '.join(gone)}"


def stopped(run: Training, at: int = STOP_AT) -> Training:
    """The training after an attempt that ended as preempted at a step, with a checkpoint."""
    steps = itertools.count(1)

    def asked(poller: StopPoller) -> StopReason | None:
        return "preempted" if next(steps) == at else None

    with patch.object(StopPoller, "asked", asked):
        ended = run.train()
    assert ended == "preempted", f"the attempt that was asked to stop ended as {ended}"
    return run


def flip_bit(run: Training, prefix: str) -> None:
    """Flips a bit of the last tensor in a checkpoint."""
    key = next(key for key in run.run.list(prefix) if key.endswith(".safetensors"))
    data = bytearray(run.run.read(key))
    data[-1] ^= 1
    run.run.write(key, bytes(data))


def test_nan_in_one_step(bench):
    """A gradient that is not finite is never applied: the step is skipped and noted in the journal, and the run goes on."""
    run = bench.training("nan")
    with nan_in_steps({7}):
        ended = run.train()
    assert ended == "finished", f"the run ended as {ended}"
    require_finite(run)
    skipped = {r.step for r in read_journal(run.run) if r.key == "guard/nonfinite_steps" and r.value}
    assert skipped == {7}, f"the journal has the skipped steps {sorted(skipped)}, not 7"


def test_nan_for_good(bench):
    """A training whose gradients stay without a number ends as diverged, and its checkpoints hold finite numbers only."""
    run = bench.training("diverging", max_nonfinite_steps=2)
    with nan_in_steps(range(7, 1000)):
        ended = run.train()
    assert ended == "diverged", f"the run ended as {ended}"
    require_finite(run)


def nan_in_steps(steps: "set[int] | range") -> Any:
    """While it is open, the logits of these steps are not a number; a step has two micro-batches."""
    forward, calls = loop.forward, itertools.count()

    def poisoned(*arguments: Any) -> Any:
        logits = forward(*arguments)
        return logits * math.nan if next(calls) // 2 + 1 in steps else logits

    return patch.object(loop, "forward", poisoned)


def require_finite(run: Training) -> None:
    def rejected(prefix: str, error: Exception) -> None:
        raise AssertionError(f"{prefix} is damaged: {error}")

    newest = newest_checkpoint(run.run, rejected)
    assert newest is not None, "there is no checkpoint"
    assert newest is not None
    bad = [name for name, tensor in newest[1].items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    assert not bad, f"{newest[0].prefix} holds numbers that are not finite in {', '.join(bad[:3])}"


def every_gradient_is_applied() -> Any:
    return patch.object(loop, "step_where_finite", lambda optimizer, finite: optimizer.step())


def unchecked_tensors() -> Any:
    """Tensors are read without comparing their sha256."""

    class Equal(str):
        def __ne__(self, other):
            return False

        __hash__ = str.__hash__

    class Sha256:
        def __init__(self, data=b""):
            self.real = hashlib.sha256(data)
            self.update, self.digest = self.real.update, self.real.digest

        def hexdigest(self):
            return Equal(self.real.hexdigest())

    return patch.object(tensor_file, "hashlib", SimpleNamespace(sha256=Sha256))


BREAKS = {
    test_damaged_checkpoint: unchecked_tensors,
    test_no_whole_checkpoint: lambda: patch.object(start_state, "resume", lambda *_: None),
    test_nan_in_one_step: every_gradient_is_applied,
    test_nan_for_good: lambda: patch.object(loop.NonfiniteSteps, "read", lambda *_: 0),
}


@pytest.mark.parametrize("scenario", BREAKS)
def test_a_broken_promise_is_noticed(scenario, fresh):
    with BREAKS[scenario](), pytest.raises(AssertionError):
        scenario(fresh)
