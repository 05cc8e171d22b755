"""What tests of whole flow runs look at: Prefect, Ray, the store, MLflow, and the processes of this machine."""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable

import httpx
import psutil
import pytest

from vitline.infra.children import processes_with
from vitline.infra.ray_jobs import RayJobs
from vitline.infra.runs.lease import read_lease
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import Store, open_store
from vitline.vit.run.run_spec import read_progress

from ..servers.stack import TINY
from .check_server_logs import unexplained_tracebacks


@pytest.fixture(scope="module")
def quiet_logs(stack):
    """No server logs a traceback while the tests of the module run."""
    before = tracebacks(stack)
    yield
    new = [text for text, times in tracebacks(stack).items() if times > before.get(text, 0)]
    assert not new, "logged while the tests of the module ran:\n" + "\n".join(new)


def tracebacks(stack) -> dict[str, int]:
    """How often each stands in the logs, by log and text."""
    found: dict[str, int] = {}
    for line in unexplained_tracebacks(stack.log_dir):
        log, times, text = re.fullmatch(r"(\S+): (\d+) x (.*)", line, re.DOTALL).groups()
        found[f"{log}: {text}"] = int(times)
    return found


@pytest.fixture(scope="session")
def prepared(flows):
    """The corpora of the tiny pipeline, prepared by flow runs: the name of the one to pre-train on."""
    names = (TINY["corpus"], *TINY["tasks"])
    for run in [flows.start("prepare-corpus/default", preset=name) for name in names]:
        flows.completes(run)
    return names[0]


@pytest.fixture
def work(flows, in_stack, prepared):
    """Flow runs, whose corpora are prepared; whatever a test leaves at work is ended."""
    work = Work(flows, in_stack, prepared)
    yield work
    for run in work.started:
        if flows.find(run)["state_type"] not in ("COMPLETED", "FAILED", "CANCELLED", "CRASHED"):
            flows.cancel(run)
    for job in work.jobs.list():
        if not job.terminal:
            work.jobs.stop(job.id, wait_s=60)


class Work:
    """Flow runs that were started here, and what they do everywhere else."""

    def __init__(self, flows, settings, corpus):
        self.flows, self.settings, self.corpus = flows, settings, corpus
        self.root, self.jobs = open_store(settings.root), RayJobs(settings.ray_address)
        self.mlflow = httpx.Client(
            base_url=f"{settings.mlflow_tracking_uri}/api/2.0/mlflow", headers=settings.mlflow_headers(), timeout=60
        )
        self.started: list[str] = []

    def start(self, deployment: str, **request) -> str:
        self.started.append(self.flows.start(deployment, **request))
        return self.started[-1]

    def pretrain(self, name: str, steps: int, deployment: str = "pretrain/default", **execution) -> str:
        """A training on one worker unless stated otherwise: each keeps a CPU busy that servers need, too."""
        overrides = {
            "execution.num_workers": 1,
            "recipe.total_steps": steps,
            "recipe.optim.warmup_steps": 1,
            "execution.save_every_steps": 20,
            "execution.log_every_steps": 1,
            **{f"execution.{field}": value for field, value in execution.items()},
        }
        return self.start(deployment, corpus=self.corpus, recipe="digits", name=name, overrides=overrides)

    def eventually(self, what: Callable, timeout_s: float = 900):
        """The first true answer of `what()`."""
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            assert time.monotonic() < deadline, f"it did not happen: {self.flows.lines(self.started[-1])}"
            time.sleep(0.5)
        return found

    def keys(self, flow_run: str) -> list[str]:
        """The runs of the jobs that a flow run has submitted, in order."""
        jobs = sorted(self.jobs.list({"flow_run_id": flow_run}), key=lambda job: job.started_at or math.inf)
        return [job.metadata["run_key"] for job in jobs]

    def key(self, flow_run: str) -> str:
        """The run of the job that a flow run has submitted first."""
        return self.eventually(lambda: self.keys(flow_run))[0]

    def run(self, key: str) -> Store:
        return self.root.child(f"runs/{key}")

    def progress(self, key: str) -> int:
        """The step that people see."""
        return (read_progress(self.run(key)) or {"step": 0})["step"]

    def reach(self, key: str, step: int) -> None:
        self.eventually(lambda: self.progress(key) >= step)

    @contextlib.contextmanager
    def frozen_training(self):
        """The workers of the training stand still: it takes no CPU from what is waited for, and is not over before that."""
        workers = [worker for worker in map(psutil.Process, self.workers()) if "RayTrainWorker" in worker.cmdline()[0]]
        for worker in workers:
            worker.suspend()
        try:
            yield
        finally:
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.resume()

    def of_run(self, key: str) -> list[psutil.Process]:
        """The driver of a run and every process below it."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(f"/runs/{key}" in word for word in process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.Error):
                    found += [process, *process.children(recursive=True)]
        return found

    def assert_cancelled(self, flow_run: str, key: str, before: set[int]) -> None:
        """Everywhere, and nothing left: `before` are the workers of other jobs."""
        ended = self.flows.wait(flow_run, timeout_s=900)
        assert (ended["state_type"], ended["state_name"]) == ("CANCELLED", "Cancelled"), (
            f"{ended['state']}: {self.flows.lines(flow_run)[-6:]}"
        )
        job = read_lease(self.run(key)).job_id
        self.eventually(lambda: self.jobs.find(job).terminal)
        self.eventually(lambda: not self.workers() - before)
        self.eventually(lambda: not self.of_run(key))
        assert read_state(self.run(key))["state"] == "cancelled"
        self.eventually(lambda: self.mlflow_status(key) == "KILLED")

    def mlflow_run(self, key: str) -> dict | None:
        experiments = self.mlflow.post("/experiments/search", json={"max_results": 100}).json()["experiments"]
        wanted = {"experiment_ids": [e["experiment_id"] for e in experiments]}
        found = self.mlflow.post("/runs/search", json=wanted | {"filter": f"tags.`vitline.run_key` = '{key}'"}).json()
        return found["runs"][0] if found.get("runs") else None

    def mlflow_status(self, key: str) -> str | None:
        """None before MLflow knows of the run."""
        found = self.mlflow_run(key)
        return found["info"]["status"] if found else None

    def mlflow_curve(self, key: str, metric: str) -> list[tuple[int, float]]:
        wanted = {"run_id": self.mlflow_run(key)["info"]["run_id"], "metric_key": metric, "max_results": 25_000}
        found = self.mlflow.get("/metrics/get-history", params=wanted).raise_for_status().json()["metrics"]
        return sorted((int(point["step"]), point["value"]) for point in found)

    @staticmethod
    def workers(named: str = "ray::") -> set[int]:
        """Processes that do the work of the stack's jobs: they go by the name of what they run, idle ones are none, and
        neither are the actors that Ray Data starts once and keeps."""
        idle = (
            "ray::IDLE",
            "ray::DashboardAgent",
            "ray::RuntimeEnv",
            "ray::_AutoscalingCoordinatorActor",
            "ray::_StatsActor",
        )
        found = set()
        for process in processes_with("RAY_AUTH_TOKEN_PATH", os.environ["RAY_AUTH_TOKEN_PATH"]):
            with contextlib.suppress(psutil.Error):
                name = " ".join(process.cmdline())
                if name.startswith(named) and not name.startswith(idle):
                    found.add(process.pid)
        return found

    @staticmethod
    def processes_of_flow(flow_run: str) -> list[psutil.Process]:
        """The process that runs a flow run: Prefect tells it by an environment variable."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PREFECT__FLOW_RUN_ID") in (flow_run, flow_run.replace("-", "")):
                    found.append(process)
        return found
