"""Task sweeps on the digits: how a setting is chosen, what is scored how often, and what a second request returns."""

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

from vitline.data_prep.shard_format import load_manifest
from vitline.flows.reports.report import setting_row
from vitline.infra.config import replace
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import read_state, request_stop
from vitline.infra.storage import open_store
from vitline.vit.evaluation import run_trial as running
from vitline.vit.evaluation.evaluate import (
    AllSettingsFailed,
    Score,
    next_trials,
    plan_task_sweeps,
)
from vitline.vit.evaluation.own import protocol_of
from vitline.vit.evaluation.reference.report import latest_records, read_records
from vitline.vit.evaluation.run_trial import ensure_trial, run_trial
from vitline.vit.evaluation.tasks import find_task_splits
from vitline.vit.evaluation.trials import TrialResult
from vitline.vit.ray_jobs import task_driver

from ..unleased import Unleased
from .tiny_protocol import PROTOCOL

VTAB_NAMES = ("train800", "val200", "train800val200", "test")


@pytest.fixture
def scored(monkeypatch):
    """The splits that trials were scored on, in order."""
    seen = []
    real = running.eval_batches

    def counted(corpus, manifest, split, *args, **kwargs):
        seen.append(split)
        return real(corpus, manifest, split, *args, **kwargs)

    monkeypatch.setattr(running, "eval_batches", counted)
    return seen


def run_task_sweep(task_sweep, root):
    """Runs one task sweep in this process, as the driver of all task sweeps does."""
    trials = open_store(root).child("trials")
    while True:
        todo, score = next_trials(task_sweep, trials)
        if score is not None:
            return score.stored_first(open_store(root), task_sweep.score_key)
        for trial in todo:
            ensure_trial(Unleased(trials, 1), trials, trial)


def fake_result(trial, top1, diverged=False):
    return TrialResult(
        key=trial.key,
        top1=top1,
        loss=1.0,
        num_examples=200,
        majority_fraction=0.1,
        train_losses=(),
        wall_s=0.0,
        cpu_s=0.0,
        diverged=diverged,
    )


def chosen_lr(task_sweep, *outcomes):
    results = [
        fake_result(trial, *outcome) for trial, outcome in zip(task_sweep.select_trials(), outcomes, strict=True)
    ]
    return task_sweep.final_trial(results).recipe.optim.peak_lr


def test_scores_of_a_protocol_of_a_user_have_its_name_and_its_trials_its_settings(spec_of, model, root, tmp_path):
    """A linear probe by training, all weights after a linear probe, and an optimizer of torch."""
    path = tmp_path / "probes.yaml"
    for optim in (
        "frozen: backbone",
        "head_first_steps: 2, layer_decay: 0.5",
        "optimizer: 'torch.optim:Adafactor', optimizer_options: {d: 2.0}",
    ):
        path.write_text(
            "base: small-images\nprotocol: {learning_rates: [0.1], total_steps: 4, warmup_steps: 1, global_batch_size: 16, "
            f"num_lanes: 4, optim: {{{optim}}}}}\n"
        )
        spec = replace(spec_of((model,)), protocol=protocol_of(str(path)))
        (task_sweep,) = plan_task_sweeps(spec)
        score = run_task_sweep(task_sweep, root)
        assert score.protocol.startswith("own-probes-")
        assert task_sweep.score_key.startswith(f"scores/digits/{score.protocol}/")
        assert score.metric_name == "tasks/digits/top1"
    assert len(open_store(root).list("trials/")) > 2
    assert len({key.split("/")[2] for key in open_store(root).list("scores/")}) == 3


@pytest.mark.slow
def test_task_sweep_reads_test_once_and_scores_every_image_of_it(spec_of, model, root, digits, scored):
    pretrained, scratch = plan_task_sweeps(spec_of((model, None)))
    score = run_task_sweep(pretrained, root)
    assert scored == ["val200", "val200", "val200", "test"]
    assert score.num_examples == load_manifest(digits).splits["test"].num_rows == 797
    assert score.chosen["val_top1"] == max(tried["val_top1"] for tried in score.tried)
    assert [tried["peak_lr"] for tried in score.tried] == [1e-3, 0.3, 0.1]
    assert score.num_classes == 10
    assert 0 < score.majority_fraction < 0.2
    assert len(set(score.trials)) == 4

    control = run_task_sweep(scratch, root)
    assert scored.count("test") == 2
    assert (control.model, control.model_digest) == (None, None)
    assert {pretrained.score_key, scratch.score_key} == set(open_store(root).list("scores/"))


def test_finished_trials_are_not_run_again_and_score_records_do_not_change(spec_of, root, scored, monkeypatch):
    (task_sweep,) = plan_task_sweeps(spec_of())
    first = run_task_sweep(task_sweep, root)
    monkeypatch.setattr(running, "run_trial", lambda held, trial, _: pytest.fail(f"{trial.key} was run again"))
    assert run_task_sweep(task_sweep, root) == first
    other = first.model_copy(update={"value": 1.0})
    assert other.stored_first(open_store(root), task_sweep.score_key) == first
    assert Score.load_or_none(open_store(root), task_sweep.score_key) == first
    assert open_store(root).list("scores/") == [task_sweep.score_key]


@pytest.mark.slow
def test_repetition_trains_again_and_names_the_record_that_it_replaces(spec_of, root):
    (task_sweep,) = plan_task_sweeps(spec_of())
    first = run_task_sweep(task_sweep, root)
    (repeated,) = plan_task_sweeps(spec_of().model_copy(update={"repetition": 1}))
    assert set(t.key for t in task_sweep.select_trials()).isdisjoint(t.key for t in repeated.select_trials())
    second = run_task_sweep(repeated, root)
    assert (first.replaces, second.replaces) == (None, task_sweep.score_key)
    assert (second.value, second.chosen, second.split_digest) == (first.value, first.chosen, first.split_digest)
    assert repeated.score_key == task_sweep.score_key.replace(".json", "-r1.json")
    kept, left_out = latest_records(read_records(open_store(root), pytest.fail), {first.corpus_digest})
    assert ([record.score for record in kept], left_out) == ([second], 1)
    assert len({record.init for record in read_records(open_store(root), pytest.fail)}) == 1


def test_trial_returns_the_result_that_another_worker_stored_first(spec_of, root, monkeypatch):
    (task_sweep,) = plan_task_sweeps(spec_of())
    store, trial = open_store(root).child("trials"), task_sweep.select_trials()[0]
    theirs = fake_result(trial, 0.9)

    def overtaken(held, trial, place):
        store.create(f"{trial.key}.json", theirs.model_dump_json().encode())
        return fake_result(trial, 0.1), []

    monkeypatch.setattr(running, "run_trial", overtaken)
    assert ensure_trial(Unleased(store, 1), store, trial) == theirs


def test_best_validation_score_is_chosen_and_the_first_of_equals(spec_of):
    (task_sweep,) = plan_task_sweeps(spec_of())
    assert chosen_lr(task_sweep, (0.2,), (0.4,), (0.3,)) == 0.3
    assert chosen_lr(task_sweep, (0.4,), (0.4,), (0.4,)) == 1e-3
    assert chosen_lr(task_sweep, (0.2,), (0.4,), (0.4,)) == 0.3


def test_diverged_setting_is_never_chosen(spec_of):
    (task_sweep,) = plan_task_sweeps(spec_of())
    assert chosen_lr(task_sweep, (0.99, True), (0.1,), (0.05,)) == 0.3
    with pytest.raises(
        AllSettingsFailed, match=r"digits has no score for the network trained from scratch with seed 0, because"
    ):
        chosen_lr(task_sweep, (0.2, True), (0.3, True), (0.1, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "rate", "reason"),
    [(4, 1e38, "the loss of the trained network is "), (8, 1e30, "the training diverged")],
)
def test_training_that_ends_without_a_finite_loss_is_a_failed_setting(steps, rate, reason, spec_of, root, scored):
    diverging = replace(PROTOCOL, learning_rates=(rate, 1e-3), total_steps=steps)
    (task_sweep,) = plan_task_sweeps(spec_of().model_copy(update={"protocol": diverging}))
    score = run_task_sweep(task_sweep, root)
    failed, sound = score.tried
    assert failed["failed"].startswith(reason)
    assert "failed" not in sound
    assert score.chosen == sound
    assert "failed" in setting_row(score, failed)[4]
    assert Score.load_or_none(open_store(root), task_sweep.score_key) == score
    assert scored == ["val200", "val200", "test"]


def test_next_best_setting_is_trained_where_the_final_training_diverges(spec_of, root):
    (task_sweep,) = plan_task_sweeps(spec_of())
    trials = open_store(root).child("trials")

    def store(trial, *outcome):
        result = fake_result(trial, *outcome)
        trials.create(f"{trial.key}.json", result.model_dump_json().encode())
        return result

    selected = [store(t, top1) for t, top1 in zip(task_sweep.select_trials(), (0.2, 0.4, 0.3), strict=True)]
    first = task_sweep.final_trial(selected)
    store(first, 0.0, True)
    ((second,), _) = next_trials(task_sweep, trials)
    assert [first.recipe.optim.peak_lr, second.recipe.optim.peak_lr] == [0.3, 0.1]
    store(second, 0.25)
    _, score = next_trials(task_sweep, trials)
    assert (score.value, score.chosen["peak_lr"]) == (0.25, 0.1)
    assert [bool(tried.get("failed")) for tried in score.tried] == [False, True, False]
    assert score.trials[-2:] == (first.key, second.key)


def test_diverged_final_trial_reads_no_test_image(spec_of, root, scored):
    diverging = replace(PROTOCOL, learning_rates=(1e30,), total_steps=8)
    (task_sweep,) = plan_task_sweeps(spec_of().model_copy(update={"protocol": diverging}))
    final = task_sweep.final_trial([])
    assert run_trial(Unleased(open_store(root), 1), final)[0].diverged
    assert scored == []


def test_selection_never_uses_test_and_the_final_training_uses_all_thousand(spec_of):
    (task_sweep,) = plan_task_sweeps(spec_of())
    select = task_sweep.select_trials()
    assert {(t.train_split, t.score_split) for t in select} == {("train800", "val200")}
    final = task_sweep.final_trial([fake_result(trial, 0.5) for trial in select])
    assert (final.train_split, final.score_split) == ("train800val200", "test")
    assert final.recipe == select[0].recipe
    assert final.key not in {trial.key for trial in select}


def test_one_setting_is_trained_once_and_a_failure_of_it_leaves_none(spec_of, root, scored):
    once = spec_of().model_copy(update={"protocol": replace(PROTOCOL, learning_rates=(0.1,))})
    (task_sweep,) = plan_task_sweeps(once)
    ((final,), _) = next_trials(task_sweep, open_store(root).child("trials"))
    assert (final.phase, task_sweep.num_trials) == ("final", 1)
    with pytest.raises(AllSettingsFailed, match=r"peak_lr 0\.1 with 4 steps: the training diverged"):
        task_sweep.final_trial([], [fake_result(final, 0.0, diverged=True)])
    score = run_task_sweep(task_sweep, root)
    assert (scored, score.trials) == (["test"], (final.key,))
    assert score.chosen == score.tried[0] == {"peak_lr": 0.1, "total_steps": 4}
    assert setting_row(score, score.chosen) == ("digits", "tiny", "from scratch", "-", "chosen", "lr 0.1, 4 steps")


def test_trial_key_depends_on_content_and_not_on_location(spec_of, model):
    pretrained, scratch = plan_task_sweeps(spec_of((model, None)))
    keys = [trial.key for task_sweep in (pretrained, scratch) for trial in task_sweep.select_trials()]
    assert len(set(keys)) == 6
    trial = pretrained.select_trials()[0]
    moved = trial.model_copy(update={"model": "s3://elsewhere/model", "corpus": "s3://elsewhere/corpus"})
    assert moved.key == trial.key


def test_a_corpus_or_model_that_was_replaced_since_planning_is_refused(spec_of, root, model):
    (task_sweep,) = plan_task_sweeps(spec_of((model,)))
    trial = task_sweep.select_trials()[0]
    with pytest.raises(RuntimeError, match="planned with 000000000000"):
        run_trial(Unleased(open_store(root), 1), trial.model_copy(update={"corpus_digest": "0" * 64}))
    with pytest.raises(RuntimeError, match="planned with 000000000000"):
        run_trial(Unleased(open_store(root), 1), trial.model_copy(update={"model_digest": "0" * 64}))


def test_missing_model_is_refused_before_any_training(spec_of, root):
    with pytest.raises(ValueError, match="not a published model"):
        plan_task_sweeps(spec_of((f"{root}/models/absent/1",)))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (VTAB_NAMES, "train800 val200 train800val200"),
        ((*VTAB_NAMES, "train", "val", "trainval"), "train800 val200 train800val200"),
        ((*VTAB_NAMES, "train900", "val100", "train900val100"), "train800 val200 train800val200"),
        (("train400", "val100", "train400val100", "train", "val", "test"), "train400 val100 train400val100"),
        (("train40", "val10", "train40val10", "train400", "val100", "test"), "train40 val10 train40val10"),
        (("train80", "val20", "train80val20", "train400", "val100", "train400val100", "test"), "train400 val100 train400val100"),
        (("train800", "val200", "train", "val", "trainval", "test"), "train val trainval"),
    ],
)  # fmt: skip
def test_the_splits_of_a_task_are_found_by_their_names(names, found):
    for order in (names, names[::-1]):
        splits = find_task_splits(order, "corpus")
        assert f"{splits.train} {splits.val} {splits.joined}" == found
        assert splits.test == "test"


@pytest.mark.parametrize("names", [VTAB_NAMES[:3], ("train", "val", "test"), ("train800", "val200", "test"), ()])
def test_corpus_without_task_splits_is_named_with_the_required_splits(names):
    with pytest.raises(ValueError, match=r"corpora/x has splits .*needs train800, val200, train800val200 and test"):
        find_task_splits(names, "corpora/x")


class RayInThisProcess:
    """The part of Ray that the driver uses: a task runs when it is waited for."""

    cloudpickle = pickle

    def __init__(self):
        self.ran, self.cancelled = [], []

    def init(self, **kwargs):
        pass

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": 2.0}, "Labels": {}}]

    def remote(self, **how):
        return self.submitting

    def submitting(self, function):
        def submit(work, argument, key, watch):
            def results():
                self.ran.append(key)
                for result in function(work, argument, key, None):
                    yield [result]  # the reference

            return results()

        return SimpleNamespace(options=lambda **kwargs: SimpleNamespace(remote=submit))

    def wait(self, refs, num_returns, timeout):
        return refs[:1], refs[1:]

    def get(self, reference):
        return reference[0]

    def cancel(self, ref, force):
        self.cancelled.append(ref)


@pytest.fixture
def ray(monkeypatch):
    fake = RayInThisProcess()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(task_driver, "declared_resources", lambda: None)
    monkeypatch.setattr(running, "run_trial", lambda held, trial, _: (fake_result(trial, 0.5), []))
    return fake


@pytest.fixture
def drive(root):
    """drive(spec): runs one attempt of the evaluation; its exit code, state and last progress."""

    def go(spec, stop=False):
        run = open_store(root).child(f"runs/{spec.run_key}")
        run.write_json("config.json", spec.model_dump(mode="json"))
        lease = acquire_lease(run, spec.run_key, job_state=lambda job: "failed", owner="test")
        if stop:
            request_stop(run, "cancelled", by="test", attempt=lease.attempt)
        code = task_driver.drive(run, lease.attempt)
        return code, read_state(run), run.read_json("progress.json")

    return go


def test_gpus_that_an_autoscaler_can_add_are_counted(ray, monkeypatch):
    assert task_driver.cluster_limit() == {"CPU": 2.0}
    monkeypatch.setattr(task_driver, "declared_resources", lambda: {"CPU": 1, "GPU": 4})
    assert task_driver.cluster_limit() == {"CPU": 2.0, "GPU": 4}


def test_evaluation_scores_every_model_and_task_and_a_second_one_runs_nothing(ray, drive, spec_of, model):
    code, state, progress = drive(spec_of((model, None)))
    assert (code, state["state"]) == (0, "finished")
    assert [score["model_digest"] is None for score in state["scores"]] == [False, True]
    assert len(ray.ran) == len(set(ray.ran)) == 8
    assert (progress["step"], progress["total_steps"]) == (8, 8)
    again = drive(spec_of((model, None)))
    assert again[1]["scores"] == state["scores"]
    assert len(ray.ran) == 8
    assert (again[2]["step"], again[2]["remaining_s"]) == (8, None)


def test_stopped_evaluation_resumes_and_runs_no_trial_twice(ray, drive, spec_of):
    code, state, progress = drive(spec_of(), stop=True)
    assert (code, state["state"]) == (143, "cancelled")
    assert len(ray.ran) == 1
    assert len(ray.cancelled) == 2  # those that had not begun
    code, _, progress = drive(spec_of())
    assert code == 0
    assert len(ray.ran) == len(set(ray.ran)) == 4
    assert (progress["step"], progress["total_steps"]) == (4, 4)


def test_repeated_task_is_trained_once_and_scored_twice(ray, drive, spec_of):
    twice = spec_of().model_copy(update={"tasks": spec_of().tasks * 2})
    code, state, _ = drive(twice)
    assert code == 0
    assert state["scores"][0] == state["scores"][1]
    assert len(ray.ran) == 4


def test_task_without_a_setting_left_fails_by_name_and_the_others_are_scored(ray, drive, spec_of, model, monkeypatch):
    def trained(held, trial, place):
        return fake_result(trial, 0.5, diverged=trial.model is None), []

    monkeypatch.setattr(running, "run_trial", trained)
    for _ in range(2):  # at a retry, too
        code, state, progress = drive(spec_of((None, model)))
        assert (code, state["state"]) == (1, "failed")
        assert [score["model"] for score in state["scores"]] == [model]
        assert "digits has no score for the network trained from scratch with seed 0" in state["reason"]
        assert "peak_lr 0.3 with 4 steps: the training diverged" in state["reason"]
        assert (progress["step"], progress["total_steps"]) == (8, 8)
    assert len(ray.ran) == 7


def test_failed_evaluation_has_the_reason_in_its_state(ray, drive, spec_of, monkeypatch):
    def broken(held, trial, place):
        raise torch.OutOfMemoryError("no memory for 3 GiB")

    monkeypatch.setattr(running, "run_trial", broken)
    code, state, _ = drive(spec_of())
    assert (code, state["state"]) == (1, "failed")
    assert state["reason"] == "OutOfMemoryError: no memory for 3 GiB"
