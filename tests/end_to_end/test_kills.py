"""Kills of real processes: a worker, the job driver, everything. A hundred steps equal fifty, a kill, and fifty more.

CPU float32 on two workers: losses are compared bit for bit (docs/design.md, "Training guarantees").
"""

import contextlib
import itertools
import os
import re
import signal
import time

import psutil
import pytest

from flows.stages.engines import Cluster
from flows.stages.stage import run_store
from infra.config import replace
from infra.local.processes import processes_with
from infra.runs.claims import ClaimHeld, take_claim
from infra.runs.journal import read_journal
from infra.runs.run_state import read_state
from infra.settings import Settings
from infra.storage import open_store
from vit.published import load_model
from vit.recipes.emoji import network
from vit.run_spec import make_spec, read_progress
from vit.training.checkpoint import list_checkpoints
from vit.vtab.evaluate import EvaluationSpec, TaskRef
from vit.vtab.protocols import SMALL_IMAGES

pytestmark = pytest.mark.slow
STEPS, KILL_AT = 100, 50


class Session:
    """A cluster and a root, and what a flow does with them, step by step."""

    def __init__(self, root, logs):
        self.root, self.logs, self.tokens = root, logs, []
        self.restart()

    def restart(self):
        """A new cluster that knows nothing of earlier jobs."""
        before = set(psutil.Process().children())
        self.cluster = Cluster(Settings(root=self.root), self.logs)
        self.jobs = self.cluster.jobs
        self.processes = set(psutil.Process().children()) - before
        self.tokens.append(self.cluster.local.env["RAY_AUTH_TOKEN_PATH"])

    def kill(self):
        """Everything of this cluster with -9, and nothing of the stack that other tests may have started."""
        for parent in self.processes:
            for process in [*reversed(parent.children(recursive=True)), parent]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def submit(self, config):
        return self.start(make_spec(config, self.root), "vit.ray_train")

    def start(self, spec, module):
        """The next attempt of a run, as a job."""
        run = run_store(self.root, spec.run_key)
        claim = self.claim(run, spec.run_key)
        run.write_json("config.json", spec.model_dump(mode="json"))
        command = ["python", "-m", module, "--run", run.uri, "--attempt", str(claim.attempt)]
        self.jobs.submit(claim.job_id, command, env={"RAY_JOB_STOP_WAIT_TIME_S": "11"}, metadata={})
        return run, claim

    def claim(self, run, key):
        """Once the attempt before is dead: a killed one's heartbeat has to grow old."""
        while True:
            with contextlib.suppress(ClaimHeld):
                return take_claim(run, key, job_state=self.job_state, owner="test", claim_timeout_s=15)
            time.sleep(0.5)

    def job_state(self, job_id):
        job = self.jobs.find(job_id)
        return job and job.state

    def follow(self, claim):
        return self.jobs.follow(claim.job_id, lambda job: None, poll_s=0.2)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    session = Session(str(tmp_path_factory.mktemp("store")), tmp_path_factory.mktemp("logs"))
    yield session
    session.cluster.__exit__()


@pytest.fixture(scope="module")
def undisturbed():
    """Losses and model digest of the first whole run; every other run must equal it."""
    return {}


@pytest.fixture
def slow_config(train_config):
    """Two workers, a hundred steps of some 50 ms, a checkpoint every ten."""

    def make(name):
        config = train_config(name, workers=2, steps=STEPS, save_every_steps=10, grace_s=10.0)
        recipe = config.recipe.model_dump()
        recipe["model"] |= {
            "embed_dim": 128,
            "depth": 6,
            "num_heads": 4,
            "mlp_dim": 512,
            "image_size_px": 32,
            "patch_size_px": 4,
        }
        recipe["input"]["augment"]["image_size_px"] = 32
        return type(config).model_validate(config.model_dump() | {"recipe": recipe})

    return make


def result(run):
    losses = {r.step: r.value for r in read_journal(run) if r.key == "train/loss"}
    return losses, load_model(read_state(run)["model"]).digest


def wait_for_step(run, step, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while (read_progress(run) or {"step": 0})["step"] < step:
        assert time.monotonic() < deadline, f"{run.uri} did not reach step {step}"
        time.sleep(0.05)


def training_workers(session):
    """Training processes of the clusters there were; Ray names them by class, and the driver is none of them."""
    found = []
    for token in session.tokens:
        for process in processes_with("RAY_AUTH_TOKEN_PATH", token):
            with contextlib.suppress(psutil.Error):
                if "TrainWorker" in " ".join(process.cmdline()):
                    found.append(process)
    return found


def driver_of(run):
    found = [
        p
        for p in psutil.process_iter(["cmdline"])
        if run.uri in (p.info["cmdline"] or ()) and "vit.ray_train" in p.info["cmdline"]
    ]
    assert len(found) == 1, found
    return found[0]


@pytest.fixture
def expected(session, slow_config, undisturbed):
    if not undisturbed:
        run, claim = session.submit(slow_config("undisturbed"))
        assert session.follow(claim).exit_code == 0
        undisturbed["result"] = result(run)
        assert sorted(undisturbed["result"][0]) == list(range(1, STEPS + 1))
    return undisturbed["result"]


def test_a_killed_worker_costs_nothing_but_time(session, slow_config, expected):
    run, claim = session.submit(slow_config("worker-killed"))
    wait_for_step(run, KILL_AT)
    workers = training_workers(session)
    assert len(workers) == 2
    workers[0].kill()
    assert session.follow(claim).exit_code == 0
    assert len(run.list("starts/")) == 2
    assert result(run) == expected


def test_a_killed_driver_is_followed_by_another_attempt(session, slow_config, expected):
    config = slow_config("driver-killed")
    run, claim = session.submit(config)
    wait_for_step(run, KILL_AT)
    driver_of(run).kill()
    assert session.follow(claim).state == "failed"
    run, claim = session.submit(config)
    assert claim.attempt == 2
    assert session.follow(claim).exit_code == 0
    assert result(run) == expected


def test_sigterm_gives_a_checkpoint_and_exit_75(session, slow_config, expected):
    config = slow_config("preempted")
    run, claim = session.submit(config)
    wait_for_step(run, KILL_AT)
    os.kill(driver_of(run).pid, signal.SIGTERM)
    assert session.follow(claim).exit_code == 75
    state = read_state(run)
    assert state["state"] == "preempted"
    assert list_checkpoints(run)[0].startswith(f"checkpoints/step-{state['step']:09d}-a1")
    run, claim = session.submit(config)
    assert session.follow(claim).exit_code == 0
    assert result(run) == expected


def test_everything_killed_at_once_goes_on_in_a_new_cluster(session, slow_config, expected):
    config = slow_config("all-killed")
    run, claim = session.submit(config)
    wait_for_step(run, KILL_AT)
    session.kill()
    session.cluster.__exit__()
    session.restart()
    run, claim = session.submit(config)  # waits until the heartbeat of the lost attempt counts as dead
    assert claim.attempt == 2
    assert session.follow(claim).exit_code == 0
    assert result(run) == expected


def test_a_sweep_whose_cluster_dies_repeats_no_finished_trial(session, digits):
    rates = tuple(0.01 * (i + 1) for i in range(6))
    protocol = replace(SMALL_IMAGES, learning_rates=rates, total_steps=30, warmup_steps=3)
    spec = EvaluationSpec(
        run_key="sweep-000000000000", tasks=(TaskRef(name="digits", corpus=digits.uri),), models=(None,),
        architecture=network(), protocol=protocol, root=session.root,
    )  # fmt: skip
    trials = open_store(session.root).child("trials")

    def results():
        return [key for key in trials.list() if key.endswith(".json")]

    session.start(spec, "vit.ray_workers")
    deadline = time.monotonic() + 600
    while len(results()) < 3:
        assert time.monotonic() < deadline, "the sweep finished nothing"
        time.sleep(0.1)
    session.kill()
    session.cluster.__exit__()
    finished = results()  # what ended while it was killed counts too
    session.restart()
    run, claim = session.start(spec, "vit.ray_workers")
    assert claim.attempt == 2
    assert session.follow(claim).exit_code == 0
    ran = re.findall(r"trial=(\S+) top1=", session.jobs.logs(claim.job_id))
    assert len(ran) == len(set(ran)) == len(rates) + 1 - len(finished)
    assert {f"{key}.json" for key in ran}.isdisjoint(finished)
    (score,) = read_state(run)["scores"]
    assert len(score["trials"]) == len(rates) + 1


def test_no_training_process_is_left(session):
    for _ in itertools.repeat(None, 50):
        if not training_workers(session):
            return
        time.sleep(0.2)
    pytest.fail(f"left behind: {training_workers(session)}")
