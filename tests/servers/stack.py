"""The servers that tests start once, and Prefect's API as its pages use it."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from vitline.flows.catalog.records import PipelineRecord, list_pipeline_keys, list_run_keys
from vitline.infra.local.processes import free_ports
from vitline.infra.settings import secret_values
from vitline.infra.storage import open_store


class RunningStack(NamedTuple):
    """The servers of this test run: where they keep their things, and what a process needs to use them."""

    directory: Path
    log_dir: Path
    env: dict[str, str]

    @property
    def mlflow_login(self) -> tuple[str, str]:
        return self.env["MLFLOW_TRACKING_USERNAME"], self.env["MLFLOW_TRACKING_PASSWORD"]


def own_ports() -> dict[str, int]:
    """Ports for a stack of a test: not the well-known ones, which another stack on this machine may take before this one listens."""
    return dict(zip(("s3", "mlflow", "prefect", "ray"), free_ports(4, twin=10_000), strict=True))


def use_s3(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The store of a stack, which this process and its children then can reach; skips the test where it is no SeaweedFS."""
    if not env["VITLINE_ROOT"].startswith("s3://"):
        pytest.skip("SeaweedFS is not installed (its wheel is for Linux on x86-64)")
    for name, value in env.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    return env["VITLINE_ROOT"]


def send_everything(root: str, uri: str) -> dict[str, str]:
    """Sends all runs and pipelines of a root to an MLflow server, in this process: what became of each, by key."""
    from vitline.flows.to_mlflow.send_run import Sender
    from vitline.infra.mlflow.tracking import Tracking

    store = open_store(root)
    sender = Sender(store, Tracking(uri, secret_values()))
    found: dict[str, str] = {key: sender.send_run(key) for key in list_run_keys(store)}
    return found | {key: sender.send_pipeline(key) for key in list_pipeline_keys(store)}


class FlowRuns:
    """Prefect's API as its UI uses it, with the flows registered; flow runs by their ids."""

    def __init__(self, env: dict[str, str]):
        auth = tuple(env["PREFECT_API_AUTH_STRING"].split(":"))
        self.api = httpx.Client(base_url=env["PREFECT_API_URL"], auth=auth, timeout=300)

    def post(self, deployment: str, parameters: dict, **run) -> httpx.Response:
        """The answer to `create_flow_run`; `run` holds fields of the run itself, such as its name."""
        found = self.api.get(f"/deployments/name/{deployment}").raise_for_status().json()
        return self.api.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": parameters, **run})

    def start(self, deployment: str, **request) -> str:
        return self.post(deployment, {"request": request}).raise_for_status().json()["id"]

    def find(self, run: str) -> dict:
        return self.api.get(f"/flow_runs/{run}").raise_for_status().json()

    def wait(self, run: str, until=lambda found: found["state_type"] in FINAL, timeout_s: float = 600) -> dict:
        """The flow run once it has ended, or once `until` is true of it."""
        deadline = time.monotonic() + timeout_s
        while not until(found := self.find(run)):
            assert time.monotonic() < deadline, f"{found['name']} is {found['state_name']}: {self.lines(run)}"
            time.sleep(0.5)
        return found

    def completes(self, run: str, timeout_s: float = 900) -> dict:
        """The flow run once it has ended. Fails the test unless it has completed."""
        ended = self.wait(run, timeout_s=timeout_s)
        assert ended["state_name"] == "Completed", f"{ended['state']}: {self.lines(run)}"
        return ended

    @contextlib.contextmanager
    def pool(self, name: str, env: dict[str, str], log: Path) -> Iterator[None]:
        """Meanwhile there is a work pool, served by a worker whose flows have the environment `env`."""
        self.api.post("/work_pools/", json={"name": name, "type": "process"}).raise_for_status()
        command = [sys.executable, "-P", "-m", "vitline.flows.on_prefect.worker", "--pool", name, "--name", name]
        env = env | {"PREFECT_WORKER_QUERY_SECONDS": "2"}
        with open(log, "wb") as output, subprocess.Popen(command, env=env, stdout=output, stderr=output) as worker:
            try:
                yield
            finally:
                worker.terminate()
        self.api.delete(f"/work_pools/{name}").raise_for_status()

    def cancel(self, run: str) -> None:
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.api.post(f"/flow_runs/{run}/set_state", json={"state": state}).raise_for_status()

    def parts(self, run: str) -> list[dict]:
        """Its subflows, as they began."""
        wanted = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "sort": "START_TIME_ASC"}
        return self.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()

    def lines(self, run: str) -> list[str]:
        wanted = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"}
        return [line["message"] for line in self.api.post("/logs/filter", json=wanted).raise_for_status().json()]

    def artifacts(self, run: str) -> dict[str, dict]:
        """By key; the data of tables and links as text."""
        wanted = {"artifacts": {"flow_run_id": {"any_": [run]}}}
        found = self.api.post("/artifacts/filter", json=wanted).raise_for_status().json()
        return {artifact["key"]: artifact for artifact in found}


FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
# A whole pipeline of a few steps, on digits, in the store of the stack.
TINY = {
    "name": "tiny",
    "corpus": "digits-0-to-4",
    "recipe": "digits",
    "tasks": ["digits-5-to-9"],
    "overrides": {
        "execution.num_workers": 1,
        "recipe.total_steps": 6,
        "recipe.optim.warmup_steps": 1,
        "execution.save_every_steps": 3,
        "execution.log_every_steps": 1,
        "execution.probes.every_steps": 6,
        "execution.probes.corpora": ["digits-5-to-9"],
        "execution.probes.images": 50,
        "protocol.total_steps": 3,
        "protocol.warmup_steps": 1,
        "protocol.learning_rates": [0.1],
    },
}


@contextlib.contextmanager
def environment_of(stack):
    """The stack's environment, also for a Prefect that was imported before."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stack.env.items():
            patch.setenv(name, value)
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        yield
    refresh_global_settings_context()


class Pipelines(NamedTuple):
    """Flow runs of the tiny pipeline: two that were started at once, one of them Skipped, and the record of the other."""

    worked: str
    skipped: str
    record: PipelineRecord
