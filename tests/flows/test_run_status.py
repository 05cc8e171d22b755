"""`vitline runs ls` and `runs show` report the progress of active runs, dates, and field names that `--set` takes."""

import json
import re
import time

import pytest

from vitline.data_prep.progress import StageProgress
from vitline.flows.catalog.lists import list_runs_and_pipelines
from vitline.flows.catalog.records import AttemptRecord, Origin, PipelineRecord, write_pipeline
from vitline.flows.to_mlflow.stage_snapshots import stage_snapshot
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store
from vitline.vit.run.resolved import resolve

PROGRESS = {"step": 120, "total_steps": 600, "loss": 2.3, "images_per_s": 640.4, "remaining_s": 70.2}
AT = 1_795_000_000.0


@pytest.fixture
def submitted(root, train_config):
    """submitted(attempt): a training whose job was submitted for a night; its store."""
    spec = resolve(train_config("birds", steps=600), root).spec()
    run = open_store(root).child(f"runs/{spec.run_key}")
    run.write_json("config.json", spec.model_dump(mode="json"))

    def submit(attempt=1):
        record = AttemptRecord(
            run_key=spec.run_key,
            attempt=attempt,
            job_id=f"{spec.run_key}-a{attempt}",
            ray_address="http://127.0.0.1:8265",
            owner="ann@host:1",
            started_at=AT,
            origin=Origin(trigger="schedule", pipeline="nightly-0a"),
        )
        run.write_json(f"attempts/a{attempt}.json", record.model_dump(mode="json"))
        return run

    return submit


@pytest.fixture
def listed(vitline, root):
    """listed(): rows of `runs ls` as printed, one line each."""

    def ls():
        code, out, _ = vitline("runs", "ls", "--root", root)
        assert code == 0
        lines = [re.sub(r"\s+", " ", line).strip() for line in out.splitlines()]
        return [line for line in lines if re.match(r"(birds|nightly|prepare)-", line)]

    return ls


def test_an_active_night_shows_its_step_rate_and_remaining_time(submitted, listed, root):
    run = submitted()
    record = PipelineRecord(key="nightly-0a", name="nightly", request={}, started_at=AT, updated_at=AT)
    write_pipeline(open_store(root), record)
    (birds,) = [line for line in listed() if line.startswith("birds")]
    assert " pretrain waiting " in birds
    write_state(run, "running", 1)
    run.write_json("progress.json", PROGRESS)
    lines = listed()
    assert len(lines) == 2
    assert any(line.startswith("birds-") and " pretrain running " in line for line in lines)
    assert any(line.startswith("nightly-0a pipeline running pretrain: 120 ") for line in lines)
    assert all("120 of 600 steps, 640 images/s, 1:10 left" in line for line in lines), lines


def test_one_word_for_a_state_in_lists_and_in_mlflow(submitted, root):
    """A training that waits, before its first step or for room after the loss of a node, is not a running one."""

    def words():
        (row,) = list_runs_and_pipelines(root)
        snapshot = stage_snapshot(open_store(root), row["run"])
        assert snapshot.tags["vitline.state"] == row["state"]
        return row["state"], snapshot.status, snapshot.end_ms is not None

    run = submitted()
    assert words() == ("waiting", "SCHEDULED", False)
    write_state(run, "running", 1)
    assert words() == ("running", "RUNNING", False)
    run.write_json("progress.json", PROGRESS | {"waiting_for": "2 GPUs"})
    assert words() == ("waiting", "SCHEDULED", False)
    run.write_json("progress.json", PROGRESS)
    for state, status in {"suspended": "SCHEDULED", "preempted": "KILLED", "cancelled": "KILLED"}.items():
        run.delete("state.json")
        write_state(run, state, 1)
        assert words() == (state, status, True)


def test_an_attempt_after_a_preempted_one_is_not_shown_as_ended(submitted, listed):
    run = submitted()
    write_state(run, "preempted", 1, reason="SIGTERM")
    assert " preempted " in listed()[0]
    submitted(2)
    assert " waiting " in listed()[0]
    assert "2026-11-1" in listed()[0]  # the start of the attempt


def test_active_runs_come_first_and_ended_ones_have_their_date(submitted, listed, root, train_config):
    submitted()
    later = resolve(train_config("birds", steps=20), root).spec()
    run = open_store(root).child(f"runs/{later.run_key}")
    run.write_json("config.json", later.model_dump(mode="json"))
    write_state(run, "finished", 1, step=20, val_top1=0.5)
    first, second = listed()
    assert " waiting " in first
    assert re.search(r" finished 20 steps 50\.0 % \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", second), second


def test_an_active_preparation_shows_its_stage(root, listed):
    run = open_store(root).child("runs/prepare-flowers-0a")
    run.write_json("config.json", {"run_key": "prepare-flowers-0a", "requests": [{"name": "flowers"}]})
    write_state(run, "running", 1)
    old, new = (open_store(root).child(f"corpora/flowers/{version}") for version in ("old", "new"))
    StageProgress("publish", [old]).begin(old.uri, 1, "corpora", done=1)
    time.sleep(0.01)
    StageProgress("examine", [new]).begin(new.uri, 40, "parts", done=4)
    assert "4 of 40 parts (examine)" in listed()[0]


def test_a_run_is_shown_with_dates_and_the_field_names_of_set(vitline, submitted, root):
    run = submitted()
    write_state(run, "running", 1)
    run.write_json("progress.json", PROGRESS)
    _, out, _ = vitline("runs", "show", "birds", "--root", root)
    assert "120 of 600 steps, 640 images/s, 1:10 left" in out
    assert re.search(r"updated_at +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", out)
    assert re.search(r"\n *recipe\.optim\.warmup_steps +2 ", out)
    assert "e+09" not in out
    assert "config.config" not in out
    shown = json.loads(vitline("runs", "show", "birds", "--root", root, "--json")[1])
    assert shown.items() >= PROGRESS.items()
    assert shown["config"]["config"]["recipe"]["total_steps"] == 600


def test_a_pipeline_is_found_by_the_first_characters_of_its_key(vitline, refused, root):
    record = PipelineRecord(key="nightly-0a", name="nightly", request={"seed": 3}, started_at=AT, updated_at=AT)
    write_pipeline(open_store(root), record)
    _, out, _ = vitline("runs", "show", "nightly", "--root", root)
    assert re.search(r"run +nightly-0a ", out)
    assert re.search(r"request\.seed +3 ", out)
    assert "2026-11-1" in out
    assert "There is no run 'daily'" in refused("runs", "show", "daily", "--root", root)
