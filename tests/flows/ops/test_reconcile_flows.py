"""Real flow processes are killed, cancelled and preempted on real servers; reconcile ends what they leave."""

import json
import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from vitline.flows.cli.housekeeping import reconcile_now
from vitline.flows.cli.main import app
from vitline.flows.runs.stage import run_store
from vitline.infra.mlflow.tracking_ids import RUN, TrackingIds
from vitline.infra.ray_jobs import RayJobs
from vitline.infra.runs import liveness
from vitline.infra.runs.lease import read_lease
from vitline.infra.runs.liveness import BEAT_S, delete_heartbeat, read_heartbeats
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.run.run_spec import read_progress

from ...eventually import eventually

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


class Servers:
    """The stack, used through its HTTP APIs, shell commands, and the functions that the commands call."""

    def __init__(self, flows, settings, corpus, http):
        self.flows, self.settings, self.corpus, self.http = flows, settings, corpus, http
        self.root, self.jobs = open_store(settings.root), RayJobs(settings.ray_address)
        self.processes = []

    def vitline(self, *arguments):
        done = CliRunner().invoke(app, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def train(self, name, deployment="pretrain/default", **more):
        """A flow run that trains, in a process of this test, started as a worker would start it."""
        request = {"name": name, "corpus": self.corpus, "recipe": "digits", "overrides": TINY, **more}
        pending = {"type": "PENDING", "name": "Pending"}
        flow_run = self.flows.post(deployment, {"request": request}, state=pending).raise_for_status().json()["id"]
        self.processes.append(FlowProcess(flow_run))
        job = eventually(lambda: self.jobs.list({"flow_run_id": flow_run}))[0]
        run = run_store(self.root.uri, job.metadata["run_key"])
        eventually(lambda: read_progress(run))
        return self.processes[-1], run, job.id

    def state(self, flow_run):
        return self.flows.find(flow_run)["state"]

    def set_state(self, flow_run, kind, message=""):
        """Sets a state that Prefect's rules would not allow."""
        state = {"type": kind, "name": kind.title(), "message": message}
        answer = self.flows.api.post(f"/flow_runs/{flow_run}/set_state", json={"state": state, "force": True})
        assert answer.raise_for_status().json()["status"] == "ACCEPT"

    def states_of_parts(self, flow_run):
        return [part["state_type"] for part in self.flows.parts(flow_run)]

    def mlflow_status(self, run):
        """Status of the MLflow run; None before there is one."""
        server = self.settings.mlflow_tracking_uri
        found = TrackingIds(run, server).read()
        if RUN not in found:
            return None
        url = f"{server}/api/2.0/mlflow/runs/get?run_id={found[RUN]}"
        return (
            self.http.get(url, headers=self.settings.mlflow_headers())
            .raise_for_status()
            .json()["run"]["info"]["status"]
        )

    def kill(self, process):
        """Kills it, and sets the heartbeats that only it wrote back by an hour, as if that had happened an hour ago."""
        process.kill()
        beat = f"flow-runs/{process.flow_run}.json"
        owner = self.root.read_json(beat)["owner"]
        leases = [key for key in self.root.list("leases/") if key.endswith("/lease.json")]
        for key in [beat, *(key for key in leases if self.root.read_json(key)["owner"] == owner)]:
            self.root.write_json(key, {**self.root.read_json(key), "heartbeat": time.time() - 3600})

    def no_flow_process(self):
        """Whether no flow process is alive; deletes the heartbeats of those that earlier tests killed."""
        for flow_run, heartbeat in read_heartbeats(self.root).items():
            if time.time() - heartbeat > 6 * BEAT_S:
                delete_heartbeat(self.root, flow_run)
        return not read_heartbeats(self.root)

    def reconcile(self):
        """Findings by the first word of their subject."""
        found = reconcile_now(self.settings, {"quiet_minutes": 0})
        return {finding.subject.split()[0]: finding for finding in found}


class FlowProcess:
    """The process of a flow run."""

    def __init__(self, flow_run):
        self.flow_run = flow_run
        command, env = [sys.executable, "-m", "prefect.engine"], os.environ | {"PREFECT__FLOW_RUN_ID": flow_run}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def servers(flows, in_stack, digits, http, monkeypatch):
    # What is watched here is dead, so it needs no three heartbeats: tests/flows/ops/test_reconcile.py watches what lives.
    monkeypatch.setattr(liveness, "WATCH_S", 5.0)
    found = Servers(flows, in_stack, digits.uri, http)
    deployment = flows.api.get("/deployments/name/reconcile/default").raise_for_status().json()
    for schedule in deployment["schedules"]:  # a scheduled run would take the work from the tests
        url = f"/deployments/{deployment['id']}/schedules/{schedule['id']}"
        flows.api.patch(url, json={"active": False}).raise_for_status()
    eventually(found.no_flow_process)
    yield found
    for process in found.processes:
        process.kill()
    for job in found.jobs.list():
        if not job.terminal:
            found.jobs.stop(job.id, wait_s=60)


@pytest.mark.long
def test_reconcile_leaves_living_training_and_ends_its_dead_flow_run(servers):
    """A training goes on without its flow process, and is preempted for good."""
    flow, run, job = servers.train("orphan")
    assert "flow" not in servers.reconcile()

    servers.kill(flow)
    step = read_progress(run)["step"]
    found = servers.reconcile()
    assert "active without a flow" in found["job"].problem
    assert servers.state(flow.flow_run)["type"] == "RUNNING"
    eventually(lambda: read_progress(run)["step"] > step)

    assert servers.vitline("ops", "preempt", read_lease(run).run_key)["job"] == job
    eventually(lambda: servers.jobs.find(job).terminal)
    assert servers.jobs.find(job).exit_code == 75
    assert list_checkpoints(run) != []
    servers.reconcile()
    ended = servers.state(flow.flow_run)
    assert (ended["type"], ended["name"]) == ("CRASHED", "Preempted")
    eventually(lambda: servers.mlflow_status(run) == "KILLED", awaited="the end in MLflow")
    assert servers.reconcile() == {}


@pytest.mark.long
def test_reconcile_ends_cancelled_pipeline_without_worker_and_process(servers):
    flow, run, job = servers.train("left", "pretrain-then-transfer/default", tasks=[servers.corpus])
    servers.kill(flow)
    servers.flows.cancel(flow.flow_run)
    assert servers.vitline("ops", "reconcile", "--dry-run", "--quiet-minutes", "0")["findings"] != []
    assert servers.state(flow.flow_run)["type"] == "CANCELLING"
    assert servers.states_of_parts(flow.flow_run) == ["COMPLETED", "RUNNING"]
    assert not servers.jobs.find(job).terminal

    findings = servers.vitline("ops", "reconcile", "--quiet-minutes", "0")["findings"]
    actions = {finding["subject"].split()[0]: finding["action"] for finding in findings}
    assert (actions["job"], actions["pipeline"]) == ("stopped", "is cancelled")
    assert servers.jobs.find(job).terminal
    assert read_state(run)["state"] == "cancelled"
    assert servers.state(flow.flow_run)["type"] == "CANCELLED"
    assert servers.states_of_parts(flow.flow_run) == ["COMPLETED", "CANCELLED"]
    eventually(lambda: servers.mlflow_status(run) == "KILLED", awaited="the end in MLflow")
    assert list_checkpoints(run) != []

    end_without_part(servers, flow.flow_run)
    assert servers.reconcile().keys() == {"flow"}
    assert servers.states_of_parts(flow.flow_run) == ["COMPLETED", "CRASHED"]
    assert servers.state(flow.flow_run)["type"] == "FAILED"
    assert servers.reconcile() == {}


def end_without_part(servers, flow_run):
    """As after the servers went down during a run: no process could report to Prefect how the subflow ended."""
    servers.set_state(flow_run, "FAILED", "the servers went down")
    servers.set_state(servers.flows.parts(flow_run)[-1]["id"], "RUNNING")
    assert servers.states_of_parts(flow_run) == ["COMPLETED", "RUNNING"]


def test_reconcile_and_collect_garbage_run_as_deployments(servers):
    for name in ("reconcile", "collect-garbage"):
        servers.flows.completes(servers.flows.start(f"{name}/default"))
    assert servers.root.list("flow-runs/") == []
