"""Cancels and kills of real flow runs: how Prefect, Ray, the store and MLflow agree afterwards, and what is left running."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from vitline.flows.catalog.records import read_pipeline
from vitline.infra.children import child_environment
from vitline.infra.runs.run_state import read_state
from vitline.vit.checkpoints.names import list_checkpoints

from ..servers.stack import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LONG = 100_000  # steps: hours


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
    made = flows.api.post("/deployments/", json=copied | {"name": "elsewhere", "work_pool_name": pool})
    yield worker
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    worker.wait()
    flows.api.delete(f"/deployments/{made.raise_for_status().json()['id']}").raise_for_status()
    flows.api.delete(f"/work_pools/{pool}").raise_for_status()


def test_cancelled_while_training_and_submitted_again(work, other_worker):
    """The second attempt resumes at the step of the cancel. Its worker is killed, so that only the flow process itself can
    learn of its cancel; it discards its steps, as requested."""
    before = work.workers()
    run = work.pretrain("cancel-training", LONG, save_every_steps=LONG, num_workers=2)
    key = work.key(run)
    work.reach(key, 5)
    assert work.workers() - before
    work.flows.cancel(run)
    work.assert_cancelled(run, key, before)
    reached = read_state(work.run(key))["step"]
    checkpoints = list_checkpoints(work.run(key))
    assert [f"-{reached:09d}-a1" in checkpoint for checkpoint in checkpoints] == [True]

    second = work.pretrain("cancel-training", LONG, "pretrain/elsewhere", save_every_steps=LONG, on_cancel="discard")
    work.eventually(lambda: logged_steps(work.flows.lines(second)))
    assert read_state(work.run(key))["from_step"] == reached
    os.kill(other_worker.pid, signal.SIGKILL)
    work.reach(key, work.progress(key) + 5)
    assert work.flows.find(second)["state_name"] == "Running"
    work.flows.cancel(second)
    work.assert_cancelled(second, key, before)
    assert work.flows.find(second)["state"]["message"] == "cancelled in Prefect"
    work.eventually(lambda: not work.processes_of_flow(second))
    assert not work.root.exists(f"flow-runs/{second}.json")
    assert min(logged_steps(work.flows.lines(second))) > reached
    assert list_checkpoints(work.run(key)) == checkpoints
    for line in work.flows.lines(run) + work.flows.lines(second):
        assert "Finished in state Running" not in line
        assert "TerminationSignal" not in line


def logged_steps(lines):
    """The steps in the progress lines of a log."""
    return [int(found[1].replace(",", "")) for line in lines if (found := re.search(r": ([\d,]+)/[\d,]+ steps", line))]


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


@pytest.mark.long
def test_cancelled_while_fine_tuning_and_so_is_the_pipeline(work):
    """Subflows, the pipeline's record and MLflow's parent end as the flow does."""
    before = work.workers()
    overrides = TINY["overrides"] | {"protocol.total_steps": LONG}
    run = work.start("pretrain-then-transfer/tiny", name="twice", overrides=overrides)
    key = work.eventually(lambda: work.keys(run)[1:])[0]
    work.eventually(lambda: work.workers("ray::digits-5-to-9-final"))
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


@pytest.mark.long
def test_a_run_that_reaches_its_deadline_keeps_a_checkpoint_and_ends_as_out_of_time(work):
    """No earlier run of such a network says that it does not fit."""
    overrides = TINY["overrides"] | {
        "recipe.model.depth": 3,
        "recipe.total_steps": LONG,
        "execution.save_every_steps": LONG,
    }
    start = partial(work.start, "pretrain-then-transfer/tiny", overrides=overrides)
    began, without_deadline = time.monotonic(), start(name="in-time")
    work.reach(work.key(without_deadline), 2)
    enough_s = 2 * (time.monotonic() - began)  # to train for a while, on a busy machine too
    work.flows.cancel(without_deadline)
    work.flows.wait(without_deadline)
    run = start(name="out-of-time", deadline_hours=enough_s / 3600)
    key = work.key(run)
    ended = work.flows.wait(run, timeout_s=enough_s + 240)
    assert (ended["state_type"], ended["state_name"]) == ("FAILED", "OutOfTime"), ended["state"]
    assert "deadline" in ended["state"]["message"]
    state = read_state(work.run(key))
    assert state["state"] == "out_of_time"
    assert list_checkpoints(work.run(key)) != []
    work.eventually(lambda: work.mlflow_status(key) == "KILLED")
