"""Old flow runs are deleted from a real Prefect server: those of vitline's deployments, and no others."""

import time
import uuid

import pytest

from vitline.flows.on_prefect import old_flow_runs
from vitline.flows.on_prefect.old_flow_runs import delete_old_flow_runs
from vitline.infra.settings import DEFAULT_PROJECT

pytestmark = pytest.mark.servers
DAY_S = 86_400
DONE, FAILED = {"type": "COMPLETED", "name": "Completed"}, {"type": "FAILED", "name": "Failed"}
IDLE = {**DONE, "message": "no inconsistencies"}


@pytest.fixture
def run(prefect):
    """run(deployment, state): the id of a new flow run in that state."""

    def make(deployment, state, **more):
        return prefect.post(deployment, {}, state=state, **more).raise_for_status().json()["id"]

    return make


@pytest.fixture
def left(prefect):
    """left(): names of all flow runs."""
    return lambda: {found["name"] for found in prefect.api.post("/flow_runs/filter", json={}).raise_for_status().json()}


@pytest.fixture(autouse=True)
def no_flow_runs(prefect):
    yield
    while found := prefect.api.post("/flow_runs/filter", json={}).raise_for_status().json():
        for each in found:
            prefect.api.delete(f"/flow_runs/{each['id']}")


def collect(days, idle_days=None, dry_run=False):
    """What a collection does `days` from now, for everything that has ended by then, or has ended without work."""
    ended, idle = (time.time() + DAY_S * at for at in (days, days if idle_days is None else idle_days))
    found = delete_old_flow_runs(DEFAULT_PROJECT, ended, idle, dry_run)
    return {finding.subject: finding.action for finding in found}


def subflow_of(prefect, parent, **run):
    parent_task = {"flow_run_id": parent, "task_key": "evaluate", "dynamic_key": uuid.uuid4().hex}
    task = prefect.api.post("/task_runs/", json=parent_task).raise_for_status().json()["id"]
    flow = prefect.api.post("/flows/", json={"name": "evaluate"}).raise_for_status().json()["id"]
    body = {"flow_id": flow, "parent_task_run_id": task, **run}
    return prefect.api.post("/flow_runs/", json=body).raise_for_status().json()["id"]


def test_flow_runs_of_long_ago_are_deleted_with_their_parts_and_no_others(prefect, run, left, monkeypatch):
    monkeypatch.setattr(old_flow_runs, "_PAGE", 2)
    old = [run("pretrain-then-transfer/nightly", DONE, name=f"night {number}") for number in range(5)]
    run("pretrain/default", FAILED, name="failed")
    for state in ("RUNNING", "PAUSED", "SCHEDULED", "CANCELLING"):
        run("pretrain/default", {"type": state, "name": state.title()}, name=state)
    for number in range(3):
        part = subflow_of(prefect, old[0], name=f"part {number}", state=DONE)
        artifact = {"key": "scores", "type": "markdown", "data": "41 %", "flow_run_id": part}
        prefect.api.post("/artifacts/", json=artifact).raise_for_status()
    theirs = {
        "flow_id": prefect.api.post("/flows/", json={"name": "evaluate"}).json()["id"],
        "entrypoint": "theirs.py:evaluate",
    }
    prefect.api.post("/deployments/", json={"name": "theirs", **theirs}).raise_for_status()
    run("evaluate/theirs", DONE, name="theirs")
    prefect.api.post(
        "/flow_runs/", json={"flow_id": theirs["flow_id"], "name": "by hand", "state": DONE}
    ).raise_for_status()
    everything = left()
    assert collect(-90) == {}
    assert left() == everything
    expected = {
        "deployment pretrain-then-transfer/nightly": "deleted, 5 flow runs",
        "deployment pretrain/default": "deleted, 1 flow runs",
    }
    assert collect(1, dry_run=True) == {name: f"would be: {action}" for name, action in expected.items()}
    assert left() == everything
    assert collect(1) == expected
    assert left() == {"RUNNING", "PAUSED", "SCHEDULED", "CANCELLING", "theirs", "by hand"}
    assert prefect.api.post("/artifacts/filter", json={}).json() == []
    assert collect(1) == {}


def test_flow_runs_that_had_nothing_to_do_go_first(prefect, run, left, monkeypatch):
    monkeypatch.setattr(old_flow_runs, "_PAGE", 2)
    for number in range(7):
        run("reconcile/default", IDLE if number % 2 else {**DONE, "message": "1 finding"}, name=f"{number}")
    run("reconcile/default", {"type": "CANCELLED", "name": "Cancelled"}, name="came while another was at work")
    run("reconcile/default", FAILED, name="failed")
    run("pretrain/default", {**DONE, "message": "no inconsistencies"}, name="pretrain")
    assert collect(-90, idle_days=1) == {"deployment reconcile/default": "deleted, 4 flow runs"}
    assert left() == {"0", "2", "4", "6", "failed", "pretrain"}


def test_a_collection_that_meets_very_many_flow_runs_comes_to_an_end(prefect, run, left, monkeypatch):
    monkeypatch.setattr(old_flow_runs, "_PAGE", 2)
    monkeypatch.setattr(old_flow_runs, "MOST", 4)
    for _ in range(5):
        run("evaluate/default", DONE)
    subject = "deployment evaluate/default"
    assert collect(1) == {subject: "deleted, 4 flow runs; the next collection deletes more"}
    assert collect(1) == {subject: "deleted, 1 flow runs"}
    assert left() == set()


def test_a_server_that_is_busy_is_named_and_the_next_collection_goes_on(prefect, run, monkeypatch):
    for _ in range(2):
        run("evaluate/default", DONE)
    run("pretrain/default", DONE)
    real = old_flow_runs.delete_with_parts

    def busy(api, ids):
        monkeypatch.setattr(old_flow_runs, "delete_with_parts", real)
        api.request("GET", "/no-such-page")

    monkeypatch.setattr(old_flow_runs, "delete_with_parts", busy)
    found = collect(1)
    assert found["deployment evaluate/default"].startswith("not all deleted: Client error '404 Not Found' for url")
    assert found["deployment pretrain/default"] == "deleted, 1 flow runs"
    assert collect(1) == {"deployment evaluate/default": "deleted, 2 flow runs"}
