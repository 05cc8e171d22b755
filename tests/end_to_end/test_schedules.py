"""Schedules that a user activates on the deployment's page, and the runs that they start."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from vitline.flows.catalog.lists import list_pipelines
from vitline.flows.nights.night_record import read_champion
from vitline.flows.nights.show import chosen_night
from vitline.flows.reports.compare_runs import compare_newest
from vitline.infra.runs.lease import read_lease

from ..servers.stack import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("quiet_logs")]
LEAD_S = 150
"""The whole minute before is 90 s away at least: Prefect's scheduler comes once a minute, and plans no run of the past."""


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
    due = (datetime.now(UTC) + timedelta(seconds=LEAD_S)).replace(second=0)
    deployment = page.schedule("pretrain-then-transfer/nightly", f"{due:%M} {due:%H} * * *")
    check_reconcile(work, page)
    run = work.flows.completes(started_by_itself(work, deployment)["id"])
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
    work.flows.completes(started_by_itself(work, deployment)["id"])
    page.edit("reconcile/default", paused=True)


@pytest.fixture
def two_series(flows, tmp_path):
    """two_series(due): a deployments file with two series whose schedules start at this minute; its deployments are deleted afterwards."""
    names = ("series-a", "series-b")

    def write(due: datetime) -> str:
        entries = [
            {
                "name": name,
                "flow": "pretrain-then-transfer",
                "schedules": [{"cron": f"{due:%M} {due:%H} * * *"}],
                "request": {**TINY, "name": name, "seed": seed, "max_late_hours": 1.0},
            }
            for seed, name in enumerate(names)
        ]
        path = tmp_path / "deployments.yaml"
        path.write_text(json.dumps({"defaults": {"pool": "vitline"}, "deployments": entries}))
        return str(path)

    yield write
    for name in names:
        found = flows.api.get(f"/deployments/name/pretrain-then-transfer/{name}")
        if found.status_code == 200:
            flows.api.delete(f"/deployments/{found.json()['id']}").raise_for_status()


@pytest.mark.long
def test_two_series_of_a_file_run_side_by_side_with_nights_and_champions_of_their_own(work, two_series, in_stack):
    from vitline.flows.on_prefect.deploy.deployments_file import read_deployments
    from vitline.flows.on_prefect.deploy.registration import register

    due = (datetime.now(UTC) + timedelta(seconds=LEAD_S)).replace(second=0, microsecond=0)
    deployments = read_deployments(two_series(due), in_stack)
    register(in_stack, deployments)
    names = [deployment.full_name for deployment in deployments]
    ids = [work.flows.api.get(f"/deployments/name/{name}").raise_for_status().json()["id"] for name in names]
    begun = [started_by_itself(work, deployment) for deployment in ids]
    runs = [work.flows.wait(run["id"]) for run in begun]
    assert [run["state_name"] for run in runs] == ["Completed", "Completed"], [run["state"] for run in runs]
    assert [datetime.fromisoformat(run["expected_start_time"]) for run in runs] == [due, due]
    assert max(run["start_time"] for run in runs) < min(run["end_time"] for run in runs), "they ran side by side"
    for name, deployment, run in zip(("series-a", "series-b"), names, runs, strict=True):
        night = chosen_night(work.root, f"{due:%Y-%m-%dT%H:%M}", name)
        assert (night.outcome, night.origin.deployment) == ("finished", deployment)
        assert night.origin.flow_run_id == run["id"]
        champion = read_champion(work.root, name)
        assert champion is not None, night.gate
        assert champion.pipeline == night.pipeline, "each is the first night of its series"
        assert read_lease(work.root.child(f"leases/{deployment.replace('/', '-')}")) is not None
        assert night.pipeline in work.flows.artifacts(run["id"])["links"]["data"]
    with pytest.raises(ValueError, match=r"of series-.*of series-.*, and --name"):
        chosen_night(work.root, f"{due:%Y-%m-%dT%H:%M}", None)
