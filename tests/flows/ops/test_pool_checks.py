"""Small flow runs in the work pool of a real Prefect: what they see, and what is left of them."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest

from vitline.flows.ops import flow_run_checks
from vitline.flows.ops.flow_run_checks import check_pools
from vitline.infra.settings import Settings

from ...eventually import eventually

NAME = "evaluate/default"
SLEEPS = "sleep 4321"


@pytest.fixture
def checked(flows, stack, monkeypatch):
    """checked(job_variables): the checks while one of the deployments has these."""
    found = flows.api.get(f"/deployments/name/{NAME}").raise_for_status().json()
    page = f"/deployments/{found['id']}"
    for name, value in stack.env.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)

    def check(job_variables=None):
        flows.api.patch(page, json={"job_variables": job_variables or {}}).raise_for_status()
        return check_pools(Settings(**stack.env))

    yield check
    flows.api.patch(page, json={"job_variables": found["job_variables"]}).raise_for_status()


def left(flows, what):
    wanted = {"flows": {"name": {"any_": [flow_run_checks.FLOW]}}}
    return flows.api.post(f"/{what}/filter", json=wanted).raise_for_status().json()


def test_a_flow_run_tells_what_it_sees_and_leaves_nothing(flows, checked, stack):
    (check,) = checked()
    assert (check.name, check.mark) == ("pools", "ok"), check
    for fact in ("vitline (process): a small flow run on", "store: the same", "ray: http", "mlflow: http", "pyarrow"):
        assert fact in check.found
    assert left(flows, "flow_runs") == left(flows, "deployments") == []
    log = stack.log_dir / "prefect-worker.log"
    eventually(lambda: "Finished in state Completed" in log.read_text(), awaited="the end of the flow run in the log")
    assert "Traceback" not in log.read_text()


def test_a_deployment_with_another_environment_has_a_run_of_its_own(flows, checked, tmp_path):
    ours, other = checked({"env": {"VITLINE_ROOT": str(tmp_path), "VITLINE_PROJECT": "birds", "RAY_ADDRESS": ""}})
    if ours.ok is False:
        ours, other = other, ours
    assert (ours.ok, other.ok) == (True, False)
    assert f"{tmp_path} does not hold what the doctor has written elsewhere" in other.found
    assert "VITLINE_PROJECT is birds, where the doctor runs vitline" in other.found
    assert "RAY_ADDRESS is not set, as it is where the doctor runs" in other.found
    (run,) = left(flows, "flow_runs")
    assert run["id"] in other.advice
    assert left(flows, "deployments") == []
    flows.api.delete(f"/flow_runs/{run['id']}").raise_for_status()


def test_a_run_that_is_not_taken_is_a_failure_with_its_page(flows, checked, monkeypatch):
    flows.api.patch("/work_pools/vitline", json={"concurrency_limit": 0}).raise_for_status()
    monkeypatch.setattr(flow_run_checks, "RUN_S", 2.0)
    (check,) = checked()
    flows.api.patch("/work_pools/vitline", json={"concurrency_limit": None}).raise_for_status()
    (run,) = left(flows, "flow_runs")
    assert not check.ok
    assert "a small flow run is Scheduled after" in check.found
    assert run["id"] in check.found
    assert run["state_type"] == "CANCELLED"
    assert left(flows, "deployments") == []
    flows.api.delete(f"/flow_runs/{run['id']}").raise_for_status()


def sleeping():
    """The processes of runs that hang."""
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == SLEEPS.split()]


def test_a_run_that_hangs_is_cancelled_with_its_process_and_goes_with_a_later_doctor(flows, checked, monkeypatch):
    monkeypatch.setattr(flow_run_checks, "RUN_S", 20.0)
    with ThreadPoolExecutor(1) as thread:
        doctor = thread.submit(checked, {"command": SLEEPS})
        eventually(sleeping, awaited="the process of the run")
        assert sorted(check.ok for check in doctor.result()) == [False, True]
    (run,) = left(flows, "flow_runs")
    assert run["state_name"] == "Cancelling"
    assert len(left(flows, "deployments")) == 1, "by which the worker ends the process"
    eventually(lambda: left(flows, "flow_runs")[0]["state_type"] == "CANCELLED", awaited="the end of the run")
    eventually(lambda: not sleeping(), awaited="the end of its process")

    monkeypatch.setattr(flow_run_checks, "RUN_S", 120.0)
    monkeypatch.setattr(flow_run_checks, "_KEPT", timedelta())
    (check,) = checked()
    assert check.mark == "ok"
    assert left(flows, "flow_runs") == left(flows, "deployments") == []
