"""Real flow processes are killed, cancelled and preempted on real servers; reconcile ends what they leave."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from flows.stages.heartbeat import BEAT_S, beats, forget
from flows.stages.stage import run_store
from infra.mlflow.tracking_ids import RUN, TrackingIds
from infra.ray_jobs import RayJobs
from infra.runs.claims import read_claim
from infra.runs.run_state import read_state
from infra.storage import open_store
from vit.run_spec import read_progress
from vit.training.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow
TINY = {
    "recipe.model.image_size_px": 16,
    "recipe.model.patch_size_px": 8,
    "recipe.model.embed_dim": 32,
    "recipe.model.depth": 1,
    "recipe.model.num_heads": 2,
    "recipe.model.mlp_dim": 64,
    "recipe.input.augment.image_size_px": 16,
    "recipe.input.global_batch_size": 16,
    "recipe.input.num_lanes": 4,
    "recipe.optim.warmup_steps": 2,
    "recipe.total_steps": 10_000_000,
    "execution.num_workers": 1,
    "execution.micro_batch_size": 16,
    "execution.save_every_steps": 100_000,
}


def eventually(what, deadline_s=120):
    """The first true answer of `what()`."""
    deadline = time.monotonic() + deadline_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.25)
    return found


class Servers:
    """The stack, used through its shell commands and HTTP APIs."""

    def __init__(self, stack, corpus, http, monkeypatch):
        self.env, self.corpus, self.http = {**os.environ, **stack.env}, corpus, http
        for name, value in stack.env.items():  # the store and Ray, for this process
            if name.startswith(("AWS_", "RAY_")):
                monkeypatch.setenv(name, value)
        self.jobs, self.processes = RayJobs(stack.env["RAY_ADDRESS"]), []
        self.root = open_store(stack.env["VITLINE_ROOT"])

    def ask(self, path, body=None, method=None, at="PREFECT_API_URL"):
        method = method or ("GET" if body is None else "POST")
        reply = self.http.request(method, self.env[at] + path, json=body).raise_for_status()
        return json.loads(reply.content or b"null")

    def vitline(self, *arguments):
        command = [sys.executable, "-m", "flows.cli", *arguments, "--json"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def train(self, name, deployment="pretrain/default", **more):
        """A flow run that trains, in a process of this test, started as a worker would start it."""
        deployment = self.ask(f"/deployments/name/{deployment}")
        request = {"name": name, "corpus": self.corpus, "recipe": "digits", "overrides": TINY, **more}
        flow_run = self.ask(
            f"/deployments/{deployment['id']}/create_flow_run",
            {"parameters": {"request": request}, "state": {"type": "PENDING", "name": "Pending"}},
        )
        env = {**self.env, "PREFECT__FLOW_RUN_ID": flow_run["id"]}
        process = subprocess.Popen([sys.executable, "-m", "prefect.engine"], env=env, stdout=subprocess.DEVNULL)
        self.processes.append(process)
        job = eventually(lambda: self.jobs.list({"flow_run_id": flow_run["id"]}))[0]
        run = run_store(self.root.uri, job.metadata["run_key"])
        eventually(lambda: read_progress(run))
        return process, flow_run["id"], run, job.id

    def state(self, flow_run_id):
        return self.ask(f"/flow_runs/{flow_run_id}")["state"]

    def mlflow_status(self, run):
        """Status of the MLflow run; None before there is one."""
        server = self.env["MLFLOW_TRACKING_URI"]
        found = TrackingIds(run, server).read()
        if RUN not in found:
            return None
        path = f"/api/2.0/mlflow/runs/get?run_id={found[RUN]}"
        return self.ask(path, at="MLFLOW_TRACKING_URI")["run"]["info"]["status"]

    def kill(self, process, flow_run_id):
        """Kills with SIGKILL and sets the heartbeat back by an hour, as if that had happened an hour ago."""
        process.send_signal(signal.SIGKILL)
        process.wait()
        beat = f"flow-runs/{flow_run_id}.json"
        self.root.write_json(beat, {**self.root.read_json(beat), "heartbeat": time.time() - 3600})

    def no_flow_process(self):
        """Whether no flow process is alive; deletes the heartbeats of those that earlier tests killed."""
        for flow_run_id, heartbeat in beats(self.root).items():
            if time.time() - heartbeat > 6 * BEAT_S:
                forget(self.root, flow_run_id)
        return not beats(self.root)

    def reconcile(self, *arguments):
        """Findings by the first word of their subject."""
        found = self.vitline("ops", "reconcile", "--quiet-minutes", "0", *arguments)["findings"]
        return {finding["subject"].split()[0]: finding for finding in found}


@pytest.fixture
def servers(stack, digits, http, monkeypatch):
    found = Servers(stack, digits.uri, http, monkeypatch)
    found.vitline("flows", "deploy")
    deployment = found.ask("/deployments/name/reconcile/default")
    for schedule in deployment["schedules"]:  # a scheduled run would take the work from the tests
        found.ask(f"/deployments/{deployment['id']}/schedules/{schedule['id']}", {"active": False}, "PATCH")
    eventually(found.no_flow_process)
    yield found
    for process in found.processes:
        process.kill()
        process.wait()
    for job in found.jobs.list():
        if not job.terminal:
            found.jobs.stop(job.id, wait_s=60)


def test_a_training_survives_its_flow_process_and_the_flow_run_ends_in_its_state(servers):
    process, flow_run, run, job_id = servers.train("orphan")
    assert "flow" not in servers.reconcile()
    servers.kill(process, flow_run)
    step = read_progress(run)["step"]
    found = servers.reconcile()
    assert "active without a flow" in found["job"]["problem"]
    assert servers.state(flow_run)["type"] == "RUNNING"
    eventually(lambda: read_progress(run)["step"] > step)

    assert servers.vitline("ops", "preempt", read_claim(run).run_key)["job"] == job_id
    eventually(lambda: servers.jobs.find(job_id).terminal)
    assert servers.jobs.find(job_id).exit_code == 75
    assert list_checkpoints(run) != []
    servers.reconcile()
    ended = servers.state(flow_run)
    assert (ended["type"], ended["name"]) == ("CRASHED", "Preempted")
    assert servers.mlflow_status(run) == "KILLED"
    assert servers.reconcile() == {}


def test_a_cancelled_flow_run_without_worker_and_process_is_ended_with_its_job(servers):
    process, flow_run, run, job_id = servers.train("left")
    servers.kill(process, flow_run)
    servers.ask(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    assert servers.vitline("ops", "reconcile", "--dry-run")["findings"] != []
    assert servers.state(flow_run)["type"] == "CANCELLING"
    found = servers.reconcile()
    assert found["job"]["action"] == "stopped"
    assert servers.jobs.find(job_id).terminal
    assert read_state(run)["state"] == "cancelled"
    assert servers.state(flow_run)["type"] == "CANCELLED"
    assert servers.mlflow_status(run) == "KILLED"
    assert list_checkpoints(run) != []
    assert servers.reconcile() == {}


def test_a_running_subflow_of_an_ended_flow_run_is_ended(servers):
    """As after the servers went down during a run: no process could report to Prefect how the subflows ended."""
    process, flow_run, _, job_id = servers.train("downed", "pretrain-then-transfer/default", tasks=[servers.corpus])
    servers.kill(process, flow_run)
    servers.jobs.stop(job_id, wait_s=60)
    gone = {"type": "FAILED", "name": "Failed", "message": "the servers went down"}
    servers.ask(f"/flow_runs/{flow_run}/set_state", {"state": gone, "force": True})
    wanted = {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run]}}, "sort": "START_TIME_ASC"}
    assert [part["state_type"] for part in servers.ask("/flow_runs/filter", wanted)] == ["COMPLETED", "RUNNING"]
    servers.reconcile()
    assert [part["state_type"] for part in servers.ask("/flow_runs/filter", wanted)] == ["COMPLETED", "CRASHED"]
    assert servers.state(flow_run)["type"] == "FAILED"
    assert servers.reconcile() == {}


def test_the_next_attempt_resumes_a_preempted_one(servers):
    process, flow_run, run, job_id = servers.train("yielding")
    servers.vitline("ops", "preempt", read_claim(run).run_key)
    second = eventually(lambda: servers.jobs.find(job_id.removesuffix("1") + "2"))
    assert servers.jobs.find(job_id).exit_code == 75
    eventually(lambda: read_state(run)["attempt"] == 2 and read_state(run).get("from_step", 0) > 0)
    servers.ask(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    eventually(lambda: servers.state(flow_run)["type"] == "CANCELLED")
    assert servers.jobs.find(second.id).terminal
    assert process.wait() is not None
    assert not servers.root.exists(f"flow-runs/{flow_run}.json")


def test_reconcile_and_collect_garbage_run_as_deployments(servers):
    for name in ("reconcile", "collect-garbage"):
        assert servers.vitline("flows", "trigger", f"{name}/default", "--wait")["state"] == "Completed"
    assert servers.root.list("flow-runs/") == []
