"""Flow runs on a Ray of several nodes, with what people set in the form *Custom run* of Prefect: a training of higher priority takes
the room of another one, and a job variable keeps a pipeline on nodes with a label."""

import contextlib
from pathlib import Path

import httpx
import pytest

from vitline.infra.children import child_environment
from vitline.infra.runs.run_state import read_state
from vitline.infra.settings import Settings

from ..servers.ray_nodes import three_nodes
from ..servers.stack import environment_of
from .check_server_logs import unexplained_tracebacks

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.usefixtures("quiet_logs")]
POOL = "on-nodes"
DEPLOYMENTS = ("pretrain/default", "pretrain-then-transfer/tiny")
STEPS = 60
NO_WORK = ("JobSupervisor", "TrainController", "SynchronizationActor", "_AutoscalingCoordinatorActor", "_StatsActor")
"""Actors that no setting places: they use no CPU, and run beside the driver."""


@pytest.fixture(scope="module")
def cluster(stack, flows, tmp_path_factory):
    """The Ray; a Prefect worker whose flows use it serves the pool of DEPLOYMENTS until the module ends."""
    logs = tmp_path_factory.mktemp("logs")
    with contextlib.ExitStack() as services:
        services.enter_context(environment_of(stack))
        cluster = services.enter_context(three_nodes(Settings(), logs))
        env = child_environment(stack.env | cluster.ray.env)
        services.enter_context(flows.pool(POOL, env, logs / "worker.log"))
        for deployment in DEPLOYMENTS:
            found = flows.api.get(f"/deployments/name/{deployment}").json()
            address, before = f"/deployments/{found['id']}", {"work_pool_name": found["work_pool_name"]}
            flows.api.patch(address, json={"work_pool_name": POOL}).raise_for_status()
            services.callback(flows.api.patch, address, json=before)
        yield cluster
        assert unexplained_tracebacks(logs) == []


@pytest.fixture
def work(work, cluster, monkeypatch):
    """It looks at the Ray of several nodes."""
    for name, value in cluster.ray.env.items():
        monkeypatch.setenv(name, value)
    work.jobs = cluster.jobs
    return work


def test_a_training_of_higher_priority_takes_the_room_and_the_other_goes_on(work):
    low = work.pretrain("low", STEPS, num_workers=2)
    key = work.key(low)
    work.reach(key, 5)
    with work.frozen_training():
        high = work.pretrain("high", 20, num_workers=2, priority=1)
        asked = f"{key} (priority 0) was asked to make room for {work.key(high)} (priority 1)"
        work.eventually(lambda: any(line.startswith(asked) for line in work.flows.lines(high)))
    work.flows.completes(high)
    assert work.flows.find(low)["state_name"] == "Running"
    work.flows.completes(low)
    why = f"to make room for {work.key(high)}, whose priority is 1, not 0"
    assert f"attempt 1 of {key} has ended early ({why}); the next one resumes it" in work.flows.lines(low)
    state = read_state(work.run(key))
    assert (state["state"], state["attempt"]) == ("finished", 2)
    _, again = work.run(key).list("starts/")
    assert again.startswith("starts/a2-from-step-")
    for run, steps in ((key, STEPS), (work.key(high), 20)):
        work.eventually(lambda run=run: work.mlflow_status(run) == "FINISHED")
        assert [step for step, _ in work.mlflow_curve(run, "train/loss")] == list(range(1, steps + 1))


def test_a_job_variable_keeps_a_pipeline_on_nodes_with_its_label(work, cluster):
    others = set(placed(cluster))
    form = {"request": {"name": "on-birds"}}
    labels = {"env": {"VITLINE_NODE_LABELS": "pool=birds"}}
    run = work.flows.post("pretrain-then-transfer/tiny", form, job_variables=labels).raise_for_status().json()["id"]
    work.started.append(run)
    training = work.eventually(lambda: work.flows.parts(run)[1:])[0]["id"]
    waits = "has pool=birds (VITLINE_NODE_LABELS) now; the job waits for one"
    work.eventually(lambda: any(waits in line for line in work.flows.lines(training)))
    cluster.add_node(labels="pool=birds")
    work.flows.completes(run)
    found = [where for what, where in placed(cluster).items() if what not in others]
    assert {pool for _, pool in found} == {"birds"}
    for kind in (
        "RayTrainWorker",
        "checkpoints/",
        "digits-5-to-9-",
    ):  # the training, a probe of its checkpoint, the trials
        assert any(name.startswith(kind) for name, _ in found), found


def placed(cluster) -> dict[str, tuple[str, str | None]]:
    """The tasks and actors that have begun, by id: the name of each, and the label `pool` of its node."""
    token = Path(cluster.ray.env["RAY_AUTH_TOKEN_PATH"]).read_text().strip()

    def listed(what):
        url = f"{cluster.ray.address}/api/v0/{what}?limit=10000&detail=1"
        reply = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=60).raise_for_status()
        return reply.json()["data"]["result"]["result"]

    pools = {node["node_id"]: node["labels"].get("pool") for node in listed("nodes")}
    actors = [(actor["actor_id"], actor["class_name"], actor["node_id"]) for actor in listed("actors")]
    tasks = [(t["task_id"], t["name"], t["node_id"]) for t in listed("tasks") if t["type"] == "NORMAL_TASK"]
    return {i: (name, pools[node]) for i, name, node in actors + tasks if node and name not in NO_WORK}
