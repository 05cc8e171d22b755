"""The networks of final trials as published models: what they score, what they were made from, and what a kill leaves."""

import subprocess
import sys

import pytest

from vitline.data_prep.shard_format import load_class_names
from vitline.infra.config import digest_of, replace
from vitline.infra.storage import open_store
from vitline.vit.convert.timm import write_timm
from vitline.vit.evaluation.evaluate import (
    EvaluationSpec,
    TaskRef,
    kept_model,
    next_trials,
    plan_task_sweeps,
    without_weights,
)
from vitline.vit.evaluation.protocols import Protocol
from vitline.vit.evaluation.run_trial import ensure_trial, run_trial
from vitline.vit.evaluation.trials import kept_name
from vitline.vit.published.models import load_model, publish, verify_model

from ..unleased import Unleased
from .conftest import ARCHITECTURE, VIEW

PROTOCOL = Protocol(
    name="tiny",
    image_size_px=None,
    learning_rates=(0.1,),
    total_steps=20,
    warmup_steps=1,
    global_batch_size=64,
    num_lanes=4,
    augment=VIEW,
)


@pytest.fixture
def sweep(root, digits, models):
    """sweep(**changes): the task sweep of the digits that keeps its network, from the trained model unless stated otherwise."""

    def make(**changes):
        spec = EvaluationSpec(
            run_key="tiny-000000000000", tasks=(TaskRef(name="digits", corpus=digits.uri),), models=(models.trained,),
            architecture=ARCHITECTURE, protocol=PROTOCOL, root=root, keep_models=True,
        )  # fmt: skip
        (task_sweep,) = plan_task_sweeps(replace(spec, **changes))
        return task_sweep

    return make


def run(task_sweep, root):
    """Its score, not recorded, after its final trial has run in this process."""
    trials = open_store(root).child("trials")
    ((trial,), _) = next_trials(task_sweep, trials)
    ensure_trial(Unleased(trials, 1), trials, trial)
    return next_trials(task_sweep, trials)[1]


def test_a_kept_network_scores_with_its_own_head_what_its_record_says(root, sweep, probe_spec, score, models, tmp_path):
    task_sweep = sweep()
    recorded = run(task_sweep, root)
    uri = kept_model(open_store(root), recorded)
    assert uri == open_store(root).uri_of(f"models/trained-digits/{recorded.trials[-1][-12:]}")
    (headed,) = score(probe_spec("head", uri))
    assert (headed.value, headed.num_examples) == (recorded.value, 797)
    assert 0.3 < recorded.value < 1
    kept = load_model(uri)
    assert kept.provenance == {
        "trial": recorded.trials[-1],
        "score": task_sweep.score_key,
        "protocol": "tiny",
        "precision": "float32",
        "config_digest": digest_of(task_sweep.settings[0]),
        "corpus_digest": task_sweep.corpus_digest,
        "steps": 20,
        "images_seen": 1280,
        "init_model": models.trained,
        "init_model_digest": load_model(models.trained).digest,
    }
    assert verify_model(uri)["digest"] == kept.digest
    write_timm(kept.network, tmp_path / "timm", kept.classes)


def test_keeping_a_network_changes_no_key_and_no_result(root, sweep, tmp_path):
    kept, thrown_away = sweep(), sweep(keep_models=False)
    ((trial,), _), ((other,), _) = (next_trials(each, open_store(root).child("trials")) for each in (kept, thrown_away))
    assert (trial.key, kept.score_key) == (other.key, thrown_away.score_key)
    runs = [Unleased(open_store(tmp_path / name), 1) for name in ("kept", "thrown-away")]
    timed = {"wall_s", "cpu_s"}
    first, second = (
        run_trial(held, each)[0].model_dump(exclude=timed) for held, each in zip(runs, (trial, other), strict=True)
    )
    assert first == second


def test_select_trials_keep_nothing_and_each_seed_and_repetition_has_a_version(root, sweep):
    two = sweep(protocol=replace(PROTOCOL, learning_rates=(0.1, 0.2)))
    assert [trial.keep for trial in two.select_trials()] == [None, None]
    finals = [sweep(**changes).final_trial([]) for changes in ({}, {"seed": 1}, {"repetition": 1}, {"models": (None,)})]
    names = [trial.kept_name for trial in finals]
    assert [name.partition("/")[0] for name in names] == ["trained-digits"] * 3 + ["scratch-digits"]
    assert len(set(names)) == 4
    assert (
        kept_name("s3://lab/models/birds/1", "vtab-dtd", "vtab-dtd-final-0123456789ab") == "birds-vtab-dtd/0123456789ab"
    )


def test_what_an_earlier_process_has_published_is_what_is_scored(root, sweep, digits, models, probe_spec, score):
    """As on GPUs, where a training that is repeated after a kill may end with other weights."""
    task_sweep, store = sweep(), open_store(root)
    trial = task_sweep.final_trial([])
    name, version = trial.kept_name.split("/")
    earlier = load_model(models.trained)
    uri = publish(store.child("models"), name, version, earlier.network, earlier.contract, load_class_names(digits), {})
    recorded = run(task_sweep, root)
    assert store.list("models/") == [
        key for key in store.list("models/") if key.startswith(f"models/{trial.kept_name}/")
    ]
    assert load_model(uri).digest == earlier.digest
    assert recorded.value == score(probe_spec("head", uri))[0].value
    assert recorded.value == score(probe_spec("head", models.trained))[0].value


KILLED_BEFORE_ITS_RESULT = """
import os, signal, sys
from vitline.infra.storage import open_store
from vitline.vit.evaluation import run_trial as running
from vitline.vit.evaluation.trials import Trial
from tests.vit.unleased import Unleased

trials, trial = open_store(sys.argv[1]), Trial.model_validate_json(sys.argv[2])
running.write_trial_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
running.ensure_trial(Unleased(trials, 1), trials, trial)
"""


@pytest.mark.slow
def test_a_kill_between_publication_and_result_ends_with_both_once(root, sweep):
    task_sweep, store = sweep(), open_store(root)
    trial, trials = task_sweep.final_trial([]), store.child("trials")
    killed = [sys.executable, "-c", KILLED_BEFORE_ITS_RESULT, trials.uri, trial.model_dump_json()]
    assert subprocess.run(killed).returncode == -9
    published = {key: store.read(key) for key in store.list("models/")}
    assert f"models/{trial.kept_name}/config.json" in published
    assert not trials.exists(f"{trial.key}.json")
    assert without_weights(store, [task_sweep]) == []
    assert kept_model(store, run(task_sweep, root)) == store.uri_of(f"models/{trial.kept_name}")
    assert {key: store.read(key) for key in store.list("models/")} == published


@pytest.mark.parametrize(("steps", "rate"), [(4, 1e38), (8, 1e30)])
def test_a_failed_setting_publishes_nothing(root, sweep, steps, rate):
    failing = sweep(protocol=replace(PROTOCOL, learning_rates=(rate,), total_steps=steps), models=(None,))
    trials = open_store(root).child("trials")
    assert ensure_trial(Unleased(trials, 1), trials, failing.final_trial([])).failure
    assert open_store(root).list("models/") == []


def test_a_score_without_a_published_network_is_found_recorded_or_not(root, sweep):
    thrown_away, task_sweep, store = sweep(keep_models=False), sweep(), open_store(root)
    assert without_weights(store, [task_sweep]) == []
    score = run(thrown_away, root)
    for _ in range(2):
        assert without_weights(store, [task_sweep]) == [task_sweep]
        score.stored_first(store, task_sweep.score_key)
    assert without_weights(store, [thrown_away]) == []
    again = sweep(repetition=1)
    assert without_weights(store, [again]) == []
    run(again, root)
    assert without_weights(store, [again]) == []
