"""Schedules that a user activates on the deployment's page, and the runs that they start."""

from datetime import UTC, datetime, timedelta

import pytest

from vitline.flows.catalog.lists import list_pipelines
from vitline.flows.reports.compare_runs import compare_newest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("quiet_logs")]


@pytest.fixture
def page(flows):
    """The edits that a deployment's page makes; all undone afterwards."""
    page = Page(flows)
    yield page
    page.undo()


class Page:
    """Of a deployment, as people edit it."""

    def __init__(self, flows):
        self.flows, self.before = flows, {}

    def edit(self, name: str, **changes) -> dict:
        """Sends `changes` of a deployment, such as its parameters; the deployment as it was."""
        found = self.flows.api.get(f"/deployments/name/{name}").raise_for_status().json()
        self.before.setdefault(found["id"], found)
        if changes:
            self.flows.api.patch(f"/deployments/{found['id']}", json=changes).raise_for_status()
        return found

    def schedule(self, name: str, cron: str) -> str:
        """Switches the schedule of a deployment on, at a time of its own; the deployment's id."""
        found = self.edit(name)
        (schedule,) = found["schedules"]
        edited = {"active": True, "schedule": {"cron": cron, "timezone": "UTC"}}
        path = f"/deployments/{found['id']}/schedules/{schedule['id']}"
        self.flows.api.patch(path, json=edited).raise_for_status()
        return found["id"]

    def undo(self) -> None:
        for deployment, found in self.before.items():
            for schedule in found["schedules"]:
                edited = {"active": schedule["active"], "schedule": schedule["schedule"]}
                self.flows.api.patch(f"/deployments/{deployment}/schedules/{schedule['id']}", json=edited)
            changes = {key: found[key] for key in ("parameters", "paused")}
            self.flows.api.patch(f"/deployments/{deployment}", json=changes).raise_for_status()


def started_by_itself(work, deployment: str) -> dict:
    """The first run that the schedule of a deployment has started."""
    wanted = {
        "flow_runs": {
            "deployment_id": {"any_": [deployment]},
            "state": {"type": {"not_any_": ["SCHEDULED", "PENDING"]}},
            "start_time": {"is_null_": False},
        }
    }

    def first() -> dict | None:
        runs = work.flows.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()
        return next((run for run in runs if run["auto_scheduled"]), None)

    found = work.eventually(first, timeout_s=400)
    work.started.append(found["id"])
    return found


def test_schedules_start_reconcile_and_a_night_which_the_comparison_shows(work, page, in_stack):
    tiny = work.flows.api.get("/deployments/name/pretrain-then-transfer/tiny").json()["parameters"]["request"]
    request = {**tiny, "name": "night", "deadline_hours": 1.0, "max_late_hours": 1.0}
    page.edit("pretrain-then-transfer/nightly", parameters={"request": request})
    due = (datetime.now(UTC) + timedelta(seconds=80)).replace(second=0)  # Prefect needs some seconds to learn of it
    deployment = page.schedule("pretrain-then-transfer/nightly", f"{due:%M} {due:%H} * * *")
    check_reconcile(work, page)
    run = work.flows.wait(started_by_itself(work, deployment)["id"], timeout_s=600)
    assert run["state_name"] == "Completed", run["state"]
    first = "Not compared: there is neither a champion nor an earlier whole night."
    assert run["state"]["message"].startswith(f"{first} (val/top1 "), run["state"]
    assert first in work.flows.artifacts(run["id"])["verdict"]["data"]
    assert datetime.fromisoformat(run["expected_start_time"]) == due.replace(microsecond=0)
    record = next(r for r in list_pipelines(in_stack.root) if r.origin.flow_run_id == run["id"])
    assert (record.origin.trigger, record.night, record.state) == ("schedule", due.replace(microsecond=0), "finished")

    day = work.start("pretrain-then-transfer/tiny", name="day")
    assert work.flows.wait(day)["state"]["message"].startswith("val/top1 "), "only a night has a verdict"
    compared = compare_newest(in_stack.root, [], 2)
    assert record.key in compared["runs"]
    assert "tasks/digits-5-to-9/top1" in compared["metrics"]


def check_reconcile(work, page):
    """Reconcile starts by its schedule, too, and completes."""
    page.edit("reconcile/default", paused=False)
    deployment = page.schedule("reconcile/default", "* * * * *")
    ended = work.flows.wait(started_by_itself(work, deployment)["id"])
    assert ended["state_name"] == "Completed", ended["state"]
    page.edit("reconcile/default", paused=True)
