"""Cancels and kills of real flow runs: how Prefect, Ray, the store and MLflow agree afterwards, and what is left running."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys

import pytest

from flows.records import read_pipeline
from infra.local.processes import child_environment
from infra.runs.run_state import read_state
from vit.training.checkpoint import list_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LONG = 100_000  # steps: hours


def test_cancelled_while_training_and_submitted_again(work):
    """The second attempt goes on from the step of the cancel, and its log tells of its own steps only. Cancelled in turn,
    it discards what it did: that is how it was asked for."""
    before = work.workers()
    run = work.pretrain("cancel-training", LONG, save_every_steps=LONG)
    key = work.key(run)
    work.reach(key, 5)
    assert work.workers() - before
    work.flows.cancel(run)
    work.assert_cancelled(run, key, before)
    reached = read_state(work.run(key))["step"]
    checkpoints = list_checkpoints(work.run(key))
    assert [f"-{reached:09d}-a1" in checkpoint for checkpoint in checkpoints] == [True]
    second = work.pretrain("cancel-training", LONG, save_every_steps=LONG, on_cancel="discard")
    work.eventually(lambda: steps_told(work.flows.lines(second)))
    assert read_state(work.run(key))["from_step"] == reached
    work.flows.cancel(second)
    work.assert_cancelled(second, key, before)
    assert min(steps_told(work.flows.lines(second))) > reached
    assert list_checkpoints(work.run(key)) == checkpoints
    for line in work.flows.lines(run) + work.flows.lines(second):
        assert "Finished in state Running" not in line
        assert "TerminationSignal" not in line


def steps_told(lines):
    """The steps in the progress lines of a log."""
    return [int(found[1].replace(",", "")) for line in lines if (found := re.search(r": ([\d,]+)/[\d,]+ steps", line))]


def test_cancelled_while_waiting_for_resources(work):
    """Another job holds every CPU of the cluster."""
    task = "ray.remote(num_cpus=2)(lambda: (print('holds', flush=True), time.sleep(3600)))"
    hold = f"import ray, time; ray.init(); ray.get({task}.remote())"
    work.jobs.submit("holds-all", [sys.executable, "-c", hold], env={}, metadata={})
    work.eventually(lambda: "holds\n" in work.jobs.logs("holds-all"))
    before = work.workers()
    run = work.pretrain("cancel-queued", LONG)
    key = work.key(run)
    work.eventually(lambda: any("other running jobs: holds-all" in line for line in work.flows.lines(run)))
    work.flows.cancel(run)
    work.assert_cancelled(run, key, before)
    assert not work.jobs.find("holds-all").terminal


def test_cancelled_while_preparing(work, tmp_path):
    """Large pictures, which take a while to decode."""
    from PIL import Image

    data = io.BytesIO()
    Image.frombytes("RGB", (64, 64), os.urandom(3 * 64 * 64)).resize((5000, 5000)).save(data, "JPEG")
    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        for n in range(60):
            (tmp_path / kind / f"{n}.jpg").write_bytes(data.getvalue() + bytes([n]))
    before = work.workers()
    request = {"source": str(tmp_path), "name": "cancel-preparing"}
    run = work.start("prepare-corpus/default", **request)
    key = work.key(run)
    work.flows.wait(run, lambda found: bool(work.workers() - before))
    work.flows.cancel(run)
    work.assert_cancelled(run, key, before)
    assert not [k for k in work.root.list("corpora/cancel-preparing/") if k.endswith("manifest.json")]


def test_cancelled_while_fine_tuning_and_so_is_the_pipeline(work, pipelines):
    """Subflows, the pipeline's record and MLflow's parent end as the flow does."""
    before = work.workers()
    overrides = pipelines.record.request["overrides"] | {"protocol.total_steps": LONG}
    run = work.start("pretrain-then-transfer/tiny", name="twice", overrides=overrides)
    key = work.key(run)
    work.eventually(lambda: work.workers() - before)
    work.flows.cancel(run)
    work.assert_cancelled(run, key, before)
    assert [part["state_name"] for part in work.flows.parts(run)] == ["Completed", "Completed", "Cancelled"]
    (pipeline,) = [
        read_pipeline(work.root, name.removeprefix("pipelines/").removesuffix(".json"))
        for name in work.root.list("pipelines/")
        if work.root.read_json(name)["origin"]["flow_run_id"] == run
    ]
    assert pipeline.state == "cancelled"
    work.eventually(lambda: work.mlflow_status(pipeline.key) == "KILLED")


def test_a_killed_flow_process_leaves_the_job_and_a_second_run_finds_it_again(work):
    steps = 250
    first = work.pretrain("flow-killed", steps)
    key = work.key(first)
    work.reach(key, 5)
    for process in work.processes_of_flow(first):
        process.kill()
    assert work.flows.wait(first, timeout_s=240)["state_type"] == "CRASHED"
    at = work.progress(key)
    work.reach(key, at + 5)
    assert work.jobs.find(f"{key}-a1").state == "running"
    second = work.pretrain("flow-killed", steps)
    assert work.flows.wait(second)["state_name"] == "Completed"
    assert any("following it from here" in line for line in work.flows.lines(second))
    state = read_state(work.run(key))
    assert (state["state"], state["attempt"], state["step"]) == ("finished", 1, steps)


@pytest.fixture
def other_worker(stack, flows):
    """A work pool with a worker of its own, whose process a test may kill, and `pretrain/elsewhere` in it."""
    pool = f"elsewhere-{os.getpid()}"
    flows.api.post("/work_pools/", json={"name": pool, "type": "process"}).raise_for_status()
    command = [sys.executable, "-P", "-m", "prefect", "worker", "start", "--pool", pool, "--type=process"]
    command += ["--name", pool, "--install-policy=never"]
    with open(stack.log_dir / "other-worker.log", "ab") as log:
        env = child_environment(stack.env | {"PREFECT_WORKER_QUERY_SECONDS": "2"})
        worker = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    found = flows.api.get("/deployments/name/pretrain/default").json()
    copied = {
        k: found[k] for k in ("flow_id", "entrypoint", "parameters", "parameter_openapi_schema", "path", "pull_steps")
    }
    flows.api.post("/deployments/", json=copied | {"name": "elsewhere", "work_pool_name": pool}).raise_for_status()
    yield worker
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    worker.wait()
    flows.api.delete(f"/work_pools/{pool}").raise_for_status()


def test_a_killed_worker_leaves_the_flow_which_can_still_be_cancelled(work, other_worker):
    """Nobody tells the flow process then: it reads its own state."""
    before = work.workers()
    run = work.pretrain("worker-killed", LONG, "pretrain/elsewhere")
    key = work.key(run)
    work.reach(key, 5)
    os.kill(other_worker.pid, signal.SIGKILL)
    at = work.progress(key)
    work.reach(key, at + 5)
    assert work.flows.find(run)["state_name"] == "Running"
    work.flows.cancel(run)
    work.assert_cancelled(run, key, before)
    assert work.flows.find(run)["state"]["message"] == "cancelled in Prefect"
    work.eventually(lambda: not work.processes_of_flow(run))


def test_a_run_that_reaches_its_deadline_keeps_a_checkpoint_and_ends_as_out_of_time(work, pipelines):
    """No earlier run of such a network says that it does not fit."""
    overrides = pipelines.record.request["overrides"] | {
        "recipe.model.depth": 3,
        "recipe.total_steps": LONG,
        "execution.save_every_steps": LONG,
    }
    run = work.start("pretrain-then-transfer/tiny", name="out-of-time", overrides=overrides, deadline_hours=40 / 3600)
    key = work.key(run)
    ended = work.flows.wait(run, timeout_s=240)
    assert (ended["state_type"], ended["state_name"]) == ("FAILED", "OutOfTime"), ended["state"]
    assert "deadline" in ended["state"]["message"]
    state = read_state(work.run(key))
    assert state["state"] == "out_of_time"
    assert list_checkpoints(work.run(key)) != []
    work.eventually(lambda: work.mlflow_status(key) == "KILLED")
