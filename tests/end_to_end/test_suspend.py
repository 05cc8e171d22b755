"""Suspend and Resume, as the buttons in Prefect send them: the job writes a checkpoint and stops, and a later attempt resumes it."""

from datetime import UTC, datetime, timedelta

import pytest

from vitline.infra.runs.claims import read_claim
from vitline.infra.runs.run_state import read_state
from vitline.vit.training.checkpoints.names import list_checkpoints

from ..servers import TINY

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.usefixtures("quiet_logs")]
STEPS = 200


def suspend(work, run):
    """What the dialog sends, with an hour until the run is given up."""
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    details = {"pause_timeout": until, "pause_reschedule": True}
    state = {"type": "PAUSED", "name": "Suspended", "state_details": details}
    answer = work.flows.api.post(f"/flow_runs/{run}/set_state", json={"state": state}).raise_for_status().json()
    assert answer["status"] == "ACCEPT", answer


def resume(work, run):
    answer = work.flows.api.post(f"/flow_runs/{run}/resume", json={}).raise_for_status().json()
    assert answer["status"] == "ACCEPT", answer


def test_a_pipeline_is_suspended_while_it_trains_and_resumed(work):
    before = work.workers()
    overrides = TINY["overrides"] | {
        "recipe.total_steps": STEPS,
        "execution.save_every_steps": STEPS,
    }
    run = work.start("pretrain-then-transfer/tiny", name="suspended", overrides=overrides)
    key = work.key(run)
    work.reach(key, 5)
    suspend(work, run)
    work.eventually(lambda: not work.processes_of_flow(run))
    assert work.jobs.find(read_claim(work.run(key)).job_id).terminal
    assert not work.of_run(key)
    assert not work.workers() - before
    found = work.flows.find(run)
    assert (found["state_type"], found["state_name"]) == ("PAUSED", "Suspended"), work.flows.lines(run)
    assert [part["state_name"] for part in work.flows.parts(run)] == ["Completed", "Suspended"]
    state = read_state(work.run(key))
    assert (state["state"], state["attempt"]) == ("preempted", 1)
    assert [f"-{state['step']:09d}-a1" in checkpoint for checkpoint in list_checkpoints(work.run(key))] == [True]

    resume(work, run)
    work.eventually(lambda: work.progress(key) > state["step"])
    assert read_state(work.run(key))["from_step"] == state["step"]
    # Resumed at once, while the earlier process is still stopping.
    suspend(work, run)
    resume(work, run)
    ended = work.flows.wait(run, timeout_s=900)
    assert ended["state_name"] == "Completed", f"{ended['state']}: {work.flows.lines(run)}"
    assert [part["state_name"] for part in work.flows.parts(run)] == ["Completed"] * 3
    state = read_state(work.run(key))
    assert (state["state"], state["attempt"], state["step"]) == ("finished", 3, STEPS)
    assert not any("Crash" in line or "Traceback" in line for line in work.flows.lines(run))
