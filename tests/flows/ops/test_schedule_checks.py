"""Active schedules that start nothing, at a real Prefect server, edited through its API as its page does."""

from datetime import UTC, datetime, timedelta

import pytest

from vitline.flows.ops import flow_run_checks
from vitline.flows.ops.doctor import check_logs
from vitline.flows.ops.flow_run_checks import check_schedules, schedule_problems
from vitline.infra.local.stack import find_stack
from vitline.infra.settings import Settings

from ...eventually import eventually

NAME = "evaluate/default"


@pytest.fixture
def scheduled(flows):
    """A deployment with a schedule that a user has just added; removed afterwards."""
    found = flows.api.get(f"/deployments/name/{NAME}").raise_for_status().json()
    added = flows.api.post(
        f"/deployments/{found['id']}/schedules",
        json=[{"schedule": {"cron": "0 5 * * *", "timezone": "UTC"}, "active": True}],
    )
    (schedule,) = added.raise_for_status().json()
    yield found["id"]
    flows.api.delete(f"/deployments/{found['id']}/schedules/{schedule['id']}").raise_for_status()


def upcoming(flows, deployment: str) -> list[str]:
    wanted = {"flow_runs": {"deployment_id": {"any_": [deployment]}, "state": {"type": {"any_": ["SCHEDULED"]}}}}
    return [run["id"] for run in flows.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()]


def test_an_active_schedule_without_upcoming_runs_is_named_with_its_page(flows, scheduled, stack, monkeypatch):
    settings = Settings(**stack.env)
    eventually(lambda: upcoming(flows, scheduled), awaited="a run, by the scheduler once a minute")
    assert schedule_problems(settings) == []
    for run in upcoming(flows, scheduled):
        flows.api.delete(f"/flow_runs/{run}").raise_for_status()
    later = datetime.now(UTC) + timedelta(minutes=3)  # at present, the scheduler may not have run yet
    (problem,) = schedule_problems(settings, later)
    assert "deployment 'evaluate/default' has an active schedule and no upcoming run" in problem
    assert f"/deployments/deployment/{scheduled}" in problem
    found = check_schedules(settings, later)
    assert (found.ok, found.found) == (False, problem)
    assert "Ask those who run the Prefect server" in found.advice
    monkeypatch.setattr(flow_run_checks, "is_of_stack", lambda *_: True)
    assert "`vitline stack restart prefect`" in check_schedules(settings, later).advice


def test_runs_that_no_worker_takes_are_counted(flows, scheduled, stack):
    eventually(lambda: upcoming(flows, scheduled), awaited="a run, by the scheduler once a minute")
    overdue = datetime.now(UTC) + timedelta(days=1, minutes=6)
    (problem,) = [found for found in schedule_problems(Settings(**stack.env), overdue) if scheduled in found]
    assert "not started 5 minutes after the due time; no worker takes" in problem
    assert "from work pool 'vitline'" in problem


def test_the_logs_of_the_running_stack_hold_no_repeating_error(stack, tmp_path):
    state = find_stack(stack.directory)
    broken = tmp_path / "prefect.log"
    broken.write_text(4 * 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no\n')
    prefect = next(s for s in state.services if s.name == "prefect").model_copy(update={"log": str(broken)})
    found = check_logs(state.model_copy(update={"services": (prefect,)}))
    assert not found.ok
    assert found.found == f"{broken} holds the same error 4 times: ValueError: no"
