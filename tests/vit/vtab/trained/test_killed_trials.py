"""Trials whose processes hang or are killed, stopped trials, and trials of several ranks."""

import signal
import subprocess
import sys

import pytest

from vitline.infra.config import replace
from vitline.infra.runs.handle import Run
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import request_stop
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import newest_step
from vitline.vit.evaluation import run_trial as running
from vitline.vit.evaluation.evaluate import plan_task_sweeps
from vitline.vit.evaluation.packing import Place
from vitline.vit.evaluation.run_trial import TrialStopped, ensure_trial, run_trial
from vitline.vit.ray_jobs.task_driver import _run_trial
from vitline.vit.training.fit import fit
from vitline.vit.training.predictions import Predictions

from ...unleased import Unleased
from ..tiny_protocol import PROTOCOL


@pytest.fixture
def longer(spec_of, root):
    """The final trial of 40 steps, and the run of an evaluation that has a lease."""
    spec = spec_of().model_copy(update={"protocol": replace(PROTOCOL, learning_rates=(0.1,), total_steps=40)})
    run = open_store(root).child("runs/evaluation")
    acquire_lease(run, "evaluation", job_state=lambda job: "failed", owner="test")
    return plan_task_sweeps(spec)[0].final_trial([]), run


@pytest.fixture
def begun_at(monkeypatch):
    """The steps from which trainings begin."""
    steps = []
    monkeypatch.setattr(running, "fit", lambda plan, state, *more: steps.append(state.step) or fit(plan, state, *more))
    return steps


HUNG_TRIAL = """
import sys, threading
import torch._dynamo  # by the first network; takes seconds on a busy machine
from vitline.infra.runs.handle import Run
from vitline.infra.runs.watchdog import Watchdog, note_progress
from vitline.infra.storage import open_store
from vitline.vit.input.decoding import training
from vitline.vit.evaluation.run_trial import ensure_trial
from vitline.vit.evaluation.trials import Trial

hangs = threading.Event()

def waits_for_ever(*args):
    hangs.set()
    threading.Event().wait()

def start_is_no_hang():
    while not hangs.wait(1):  # on a busy machine the start takes long
        note_progress()

threading.Thread(target=start_is_no_hang, daemon=True).start()

training._gather = waits_for_ever
run, trials, trial = sys.argv[1:]
with Watchdog(run, 1, 15.0, who="trial-x"):
    ensure_trial(Run(open_store(run), 1), open_store(trials), Trial.model_validate_json(trial))
"""


@pytest.mark.slow
def test_a_hung_trial_is_killed_with_its_stacks_and_runs_again(spec_of, root):
    trial = plan_task_sweeps(spec_of())[0].select_trials()[0]
    trials, run = open_store(root).child("trials"), open_store(root).child("runs/evaluation")
    acquire_lease(run, "evaluation", job_state=lambda job: "failed", owner="test")
    ended = subprocess.run([sys.executable, "-c", HUNG_TRIAL, run.uri, trials.uri, trial.model_dump_json()])
    assert ended.returncode == -signal.SIGKILL
    (error,) = [run.read_json(key) for key in run.list("errors/")]
    assert "in waits_for_ever" in run.read(error["stacks"]).decode()
    assert trials.list() == []
    assert ensure_trial(Unleased(trials, 1), trials, trial).num_examples > 0


KILLED_TRIAL = """
import signal, sys, time
import psutil
from vitline.infra.runs.handle import Run
from vitline.infra.storage import open_store
from vitline.vit.evaluation import ranks as of_trial
from vitline.vit.evaluation import run_trial as running
from vitline.vit.evaluation.packing import Place
from vitline.vit.evaluation.trials import Trial
from vitline.vit.training import loop

run, trials, trial, step, save_every_s, ranks = sys.argv[1:]
running.SAVE_EVERY_S = float(save_every_s)
real = loop.update_average

def dies(state, recipe, finite):
    if state.step == int(step):
        me = psutil.Process()
        others = [each for each in me.children() if "vitline.vit.evaluation.ranks" in each.cmdline()]
        (*others, me)[0].send_signal(signal.SIGKILL)
    return real(state, recipe, finite)

def starts_late(training):
    time.sleep(0.01)  # the clocks of two ranks never agree
    return starts(training)

def notices_late(rank, child, *events):
    child.wait()
    time.sleep(0.5)  # torch says first that the other rank has ended
    ends_with(rank, child, *events)

ends_with = of_trial._end_with
of_trial._end_with = notices_late
starts = running.TrialTraining.save_every
running.TrialTraining.save_every = starts_late
loop.update_average = dies
place = Place(ranks=int(ranks))
running.ensure_trial(Run(open_store(run), 1), open_store(trials), Trial.model_validate_json(trial), place)
"""


@pytest.mark.slow
def test_a_killed_trial_goes_on_from_its_checkpoint_and_ends_as_if_undisturbed(longer, root, begun_at):
    trial, run = longer
    trials = open_store(root).child("trials")
    command = [sys.executable, "-c", KILLED_TRIAL, run.uri, trials.uri, trial.model_dump_json()]
    assert subprocess.run([*command, "30", "0", "1"]).returncode == -signal.SIGKILL
    of_trial = trials.child(trial.key)
    assert 20 <= (saved := newest_step(of_trial)) <= 30  # one save may have been in flight
    result = ensure_trial(Unleased(run, 2), trials, trial)
    assert begun_at == [saved]
    assert {key.split("/")[-1] for key in of_trial.list()} == {key.split("/")[-1] for key in result.files}
    undisturbed, _ = run_trial(Unleased(open_store(root).child("elsewhere"), 1), trial)
    assert begun_at == [saved, 0]
    equal(result, undisturbed)


@pytest.mark.slow
def test_a_trial_whose_checkpoints_are_damaged_begins_anew(spec_of, root, caplog):
    trial = plan_task_sweeps(spec_of())[0].select_trials()[0]
    run, trials = (open_store(root).child(name) for name in ("runs/evaluation", "trials"))
    acquire_lease(run, "evaluation", job_state=lambda job: "failed", owner="test")
    command = [sys.executable, "-c", KILLED_TRIAL, run.uri, trials.uri, trial.model_dump_json()]
    assert subprocess.run([*command, "3", "0", "1"]).returncode == -signal.SIGKILL
    of_trial = trials.child(trial.key)
    damaged = [key for key in of_trial.list("checkpoints/") if key.endswith(".safetensors")]
    for key in damaged:
        of_trial.write(key, b"")
    assert damaged
    result = ensure_trial(Unleased(run, 2), trials, trial)
    assert "begins anew: None of the" in caplog.text
    assert [step for step, _ in result.train_losses] == [1, 2, 3, 4]
    assert of_trial.list() == []


class Stopped(Unleased):
    """Is requested to stop after some looks."""

    looks = 0

    def stopped(self):
        self.looks += 1
        return "suspended" if self.looks > 33 else None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_trial_goes_on_from_its_stop_and_ends_as_if_undisturbed(longer, root, begun_at, ranks):
    trial, run = longer
    trials = open_store(root).child("trials")
    with pytest.raises(TrialStopped) as stopped:
        ensure_trial(Stopped(run, 1), trials, trial, Place(ranks=ranks))
    saved = newest_step(trials.child(trial.key))
    assert 0 < saved < 40
    assert f"stopped at step {saved} of 40" in str(stopped.value)
    result = ensure_trial(Unleased(run, 2), trials, trial)
    assert begun_at == [0, saved]
    undisturbed, _ = run_trial(Unleased(open_store(root).child("elsewhere"), 1), trial)
    (equal if ranks == 1 else nearly_equal)(result, undisturbed)


@pytest.mark.slow
def test_a_task_of_a_stopped_evaluation_saves_its_trial_and_gives_no_result(longer, root):
    trial, run = longer
    trials = open_store(root).child("trials")
    request_stop(run, "preempted", by="test", attempt=1)
    assert list(_run_trial(run.uri, 1, trials.uri, (trial, Place()))) == []
    assert newest_step(trials.child(trial.key)) == 1


def equal(result, other):
    assert result.train_losses == other.train_losses
    assert (result.loss, result.top1) == (other.loss, other.top1)


def nearly_equal(result, other):
    """To the rounding of sums in another order."""
    steps, losses = zip(*result.train_losses, strict=True)
    others, theirs = zip(*other.train_losses, strict=True)
    assert steps == others
    assert losses == pytest.approx(theirs, rel=1e-4)
    assert result.loss == pytest.approx(other.loss, rel=1e-4)
    assert abs(result.top1 - other.top1) * result.num_examples <= 1.01


@pytest.mark.slow
def test_two_ranks_end_like_one(longer, root):
    trial, run = longer
    trials = open_store(root).child("trials")
    together = ensure_trial(Run(run, 1), trials, trial, Place(ranks=2))
    alone, noted = run_trial(Unleased(open_store(root).child("elsewhere"), 1), trial)
    nearly_equal(together, alone)
    found = Predictions.from_parquet(trials.read(together.files[0]))
    assert found.row.tolist() == list(range(alone.num_examples))
    assert found.label.tolist() == Predictions.joined(noted).label.tolist()


@pytest.mark.slow
def test_a_trial_ends_with_a_rank_that_was_killed_and_goes_on_with_another_number_of_ranks(longer, root):
    trial, run = longer
    trials = open_store(root).child("trials")
    command = [sys.executable, "-c", KILLED_TRIAL, run.uri, trials.uri, trial.model_dump_json(), "30", "0", "2"]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert 20 <= newest_step(trials.child(trial.key)) <= 30
    alone, _ = run_trial(Unleased(open_store(root).child("elsewhere"), 1), trial)
    nearly_equal(ensure_trial(Unleased(run, 1), trials, trial), alone)


@pytest.mark.slow
def test_an_error_of_all_ranks_is_raised_by_the_first(longer, root):
    trial, run = longer
    trials = open_store(root).child("trials")
    wrong = replace(trial, corpus_digest="0" * 12)
    with pytest.raises(RuntimeError, match="planned with 000000000000"):
        ensure_trial(Run(run, 1), trials, wrong, Place(ranks=2))
