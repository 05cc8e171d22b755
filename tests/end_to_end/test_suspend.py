"""Suspend and Resume, as the buttons in Prefect send them: the job writes a checkpoint and stops, and a later attempt resumes it."""

from datetime import UTC, datetime, timedelta

import pytest

from vitline.flows.cli.housekeeping import reconcile_now
from vitline.infra.runs.lease import read_lease
from vitline.infra.runs.run_state import read_state
from vitline.vit.checkpoints.names import list_checkpoints

from ..servers.stack import TINY

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.usefixtures("quiet_logs")]
STEPS = 300


def suspend(work, run, limit_s=300):
    """What the dialog *Pause* sends, in which 300 s are filled in."""
    until = (datetime.now(UTC) + timedelta(seconds=limit_s)).isoformat()
    details = {"pause_timeout": until, "pause_reschedule": True}
    state = {"type": "PAUSED", "name": "Suspended", "state_details": details}
    request = {"state": state, "force": True}
    answer = work.flows.api.post(f"/flow_runs/{run}/set_state", json=request).raise_for_status().json()
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
    suspend(work, work.flows.parts(run)[-1]["id"])  # the page of the training has the same button
    work.eventually(lambda: not work.processes_of_flow(run))
    assert work.jobs.find(read_lease(work.run(key)).job_id).terminal
    assert not work.of_run(key)
    assert not work.workers() - before
    found = work.flows.find(run)
    assert (found["state_type"], found["state_name"]) == ("PAUSED", "Suspended"), work.flows.lines(run)
    assert [part["state_name"] for part in work.flows.parts(run)] == ["Completed", "Suspended"]
    state = read_state(work.run(key))
    assert (state["state"], state["attempt"]) == ("suspended", 1)
    assert [f"-{state['step']:09d}-a1" in checkpoint for checkpoint in list_checkpoints(work.run(key))] == [True]

    resume(work, run)
    work.eventually(lambda: work.progress(key) > state["step"])
    assert work.flows.find(run)["name"] == found["name"]
    assert read_state(work.run(key))["from_step"] == state["step"]
    # Without Resume it goes on after the limit; Prefect's server would fail it, unless the flow process has seen it before.
    suspend(work, run, limit_s=30)
    work.eventually(lambda: not work.processes_of_flow(run))
    found = work.flows.find(run)
    assert (found["state_name"], "resumes by itself" in found["state"]["message"]) == ("Suspended", True), found[
        "state"
    ]

    def actions():
        findings = reconcile_now(work.settings, {"quiet_minutes": 5})
        return [finding.action for finding in findings if found["name"] in finding.subject]

    assert work.eventually(actions) == ["resumed"]
    step = work.progress(key)
    work.eventually(lambda: work.progress(key) > step)
    # Resumed at once, while the earlier process is still stopping.
    suspend(work, run)
    resume(work, run)
    work.flows.completes(run)
    assert [part["state_name"] for part in work.flows.parts(run)] == ["Completed"] * 3
    state = read_state(work.run(key))
    assert (state["state"], state["attempt"], state["step"]) == ("finished", 4, STEPS)
    assert not any("Crash" in line or "Traceback" in line for line in work.flows.lines(run))
