"""Trials that collect-garbage deletes, and which ones it keeps."""

import math
import time

from vitline.flows.ops.collect_garbage import DAY_S
from vitline.infra.config import replace
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.storage import open_store
from vitline.vit.evaluation.trials import PROGRESS, TrialProgress

from .old_runs import WEEKS, YEAR, actions, checkpointed


def evaluated(root, key, task, others, final=(), state="finished", ago=WEEKS):
    """An evaluation of one task, with its trials: `others` on validation, and the final one with two files and a stray one."""
    run, store = checkpointed(root, key, state, ago), open_store(root)
    run.write_json("config.json", {"tasks": [{"name": task, "corpus": "a"}]})
    for key in run.list("checkpoints/"):
        run.delete(key)
    for name in others:
        store.write_json(f"trials/{name}.json", {"files": []})
    for name in final:
        files = [f"{name}/0123456789ab/{file}" for file in ("predictions.parquet", "per_class.csv")]
        store.write_json(f"trials/{name}.json", {"files": files})
        for key in (*files, f"{name}/ba9876543210/predictions.parquet"):
            store.write(f"trials/{key}", b"numbers")
    scores = [{"task": task, "trials": [*others, *final]}]
    if state == "finished":
        run.write_json("state.json", {**run.read_json("state.json"), "scores": scores})


def test_trials_on_validation_go_once_their_evaluation_has_long_finished(root, collect):
    store = open_store(root)
    evaluated(root, "evaluate-0123456789ab", "digits", ["digits-select-1", "digits-select-2"], ["digits-final-1"])
    evaluated(root, "evaluate-1123456789ab", "cards", ["cards-select-1"], ["cards-final-1"], ago=DAY_S)
    evaluated(root, "evaluate-2123456789ab", "birds", ["birds-select-1"], state="preempted")
    evaluated(root, "evaluate-3123456789ab", "birds", ["birds-select-1", "birds-select-2"], ["birds-final-1"])
    evaluated(root, "evaluate-4123456789ab", "flowers", ["flowers-select-1"], ["flowers-final-1"])
    begun = store.child("runs/evaluate-5123456789ab")  # its attempt gave its lease back before it had written a state
    lease = acquire_lease(begun, "evaluate-5123456789ab", job_state=lambda job: None, owner="someone")
    begun.write_json("lease.json", replace(lease, heartbeat=0.0).model_dump())
    begun.write_json("config.json", {"tasks": [{"name": "flowers"}]})
    before = {*store.list("trials/")}
    (finding,) = collect()
    assert (finding.subject, finding.action) == ("trials of evaluate-0123456789ab", "deleted, 3 objects")
    gone = {
        *(f"trials/digits-select-{number}.json" for number in (1, 2)),
        "trials/digits-final-1/ba9876543210/predictions.parquet",
    }
    assert (
        before - {*store.list("trials/")} == gone
    )  # what is young, or what an unfinished evaluation of birds may need, stays
    assert collect() == []


def test_checkpoints_of_trials_that_were_given_up_go(root, collect, monkeypatch):
    store = open_store(root)

    def began(trial, ago):
        at = time.time() - ago
        store.write(
            f"trials/{trial}/{PROGRESS}",
            TrialProgress(saved_at=at, train_losses=((1, math.inf),)).model_dump_json().encode(),
        )
        for name in ("rank-00000-of-00001-1.safetensors", "manifest.json"):
            store.write(f"trials/{trial}/checkpoints/step-000000010-a1/{name}", b"{}")

    for trial, ago in (("digits-final-1", YEAR), ("cards-final-1", DAY_S), ("birds-select-1", YEAR)):
        began(trial, ago)
    evaluated(root, "evaluate-0123456789ab", "birds", [], state="running", ago=0)
    deleted, delete = [], type(store).delete
    monkeypatch.setattr(type(store), "delete", lambda store, key: (deleted.append(key), delete(store, key)))
    (finding,) = collect()
    assert (finding.subject, finding.action) == ("trial digits-final-1", "deleted, 3 objects")
    assert [key.rpartition("/")[2] for key in deleted if key.startswith("trials/")][::2] == ["manifest.json", PROGRESS]
    assert len(store.list("trials/")) == 6
    assert collect() == []


def test_no_trial_goes_where_an_unfinished_evaluation_cannot_be_read(root, collect):
    evaluated(root, "evaluate-0123456789ab", "digits", ["digits-select-1"], ["digits-final-1"])
    evaluated(root, "evaluate-1123456789ab", "digits", [], state="running", ago=0)
    open_store(root).write("runs/evaluate-1123456789ab/config.json", b"{")
    assert actions(collect()) == {"run evaluate-1123456789ab": "kept: nothing says that it is garbage"}
