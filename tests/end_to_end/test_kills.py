"""Kills of real processes: a worker, the job driver, a whole cluster. One training survives them all, one after the other.

CPU float32 on two workers: losses are compared bit for bit (docs/design.md, "Training guarantees").
"""

import contextlib
import itertools
import os
import re
import signal
import time
from typing import NamedTuple

import psutil
import pytest

from flows.stages.engines import Cluster
from flows.stages.stage import run_store
from infra.config import replace
from infra.local.processes import processes_with
from infra.runs.claims import ClaimHeld, read_claim, take_claim
from infra.runs.journal import read_journal
from infra.runs.run_state import read_state
from infra.settings import Settings
from infra.storage import open_store
from vit.published import load_model
from vit.recipes.emoji import network
from vit.run_spec import make_spec
from vit.training.checkpoint import list_checkpoints
from vit.vtab.evaluate import EvaluationSpec, TaskRef
from vit.vtab.protocols import SMALL_IMAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, SAVE_EVERY = 100, 10
STEPS_PER_START = 5  # every start of the worker group makes so many steps at least before the next kill
CLAIM_TIMEOUT_S = 15


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

    def kill_cluster(self):
        """Everything of this cluster at once with -9, and nothing of the stack that other tests may have started."""
        for parent in self.processes:
            for process in [*reversed(parent.children(recursive=True)), parent]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.cluster.__exit__()

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
                return take_claim(run, key, job_state=self.job_state, owner="test", claim_timeout_s=CLAIM_TIMEOUT_S)
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


@pytest.fixture
def slow_config(train_config):
    """Two workers, a hundred steps of some 50 ms or more, a checkpoint every ten."""

    def make(name):
        config = train_config(name, workers=2, steps=STEPS, save_every_steps=SAVE_EVERY, grace_s=10.0)
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


class Result(NamedTuple):
    """What must not depend on kills."""

    losses: dict[int, float]
    digest: str


def losses_of(run):
    """The losses of a run by step, as far as they are sealed in its journal."""
    return {r.step: r.value for r in read_journal(run) if r.key == "train/loss"}


def result_of(run):
    return Result(losses_of(run), load_model(read_state(run)["model"]).digest)


def newest_step(run):
    """The step of the newest checkpoint; 0 without one."""
    return max((int(re.search(r"step-(\d+)", prefix)[1]) for prefix in list_checkpoints(run)), default=0)


def wait_until(condition, what, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
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
def undisturbed(session, slow_config):
    """The result of a run that nothing disturbs."""
    run, claim = session.submit(slow_config("undisturbed"))
    assert session.follow(claim).exit_code == 0
    result = result_of(run)
    assert sorted(result.losses) == list(range(1, STEPS + 1))
    return result


class KilledTraining:
    """One run whose processes are killed again and again. It must have the losses of the undisturbed run, after each kill."""

    def __init__(self, session, config, expected_losses):
        self.session, self.config, self.expected_losses = session, config, expected_losses
        self.starts = 0

    def start_attempt(self, number):
        self.run, self.claim = self.session.submit(self.config)
        assert self.claim.attempt == number

    def wait_for_checkpoint(self, after):
        """Waits for the next start of the worker group and a checkpoint of its own. `after`: what was killed before."""
        self.starts += 1
        wait_until(lambda: len(self.run.list("starts/")) == self.starts, f"a start after {after}")
        resumed = newest_step(self.run)
        wait_until(lambda: newest_step(self.run) >= resumed + STEPS_PER_START, f"a checkpoint after {after}")
        assert newest_step(self.run) < STEPS, f"after {after}: the run was over before the next kill"
        self.check_losses(after)

    def check_losses(self, after):
        saved, found = newest_step(self.run), losses_of(self.run)
        assert len(found) >= saved
        expected = {step: self.expected_losses[step] for step in range(1, len(found) + 1)}
        assert found == expected, f"after {after}: other losses than in the undisturbed run"

    def kill_worker(self):
        """The same attempt goes on with a new worker group."""
        workers = training_workers(self.session)
        assert len(workers) == 2
        workers[0].kill()
        self.wait_for_checkpoint(after="the kill of a worker")
        assert len(self.run.list(f"starts/a{self.claim.attempt}-")) == 2

    def terminate_driver(self):
        """SIGTERM: the attempt saves the step that it has reached and ends as preempted."""
        os.kill(driver_of(self.run).pid, signal.SIGTERM)
        assert self.session.follow(self.claim).exit_code == 75
        state = read_state(self.run)
        assert state["state"] == "preempted"
        assert list_checkpoints(self.run)[0].startswith(f"checkpoints/step-{state['step']:09d}-a{self.claim.attempt}")
        self.start_attempt(self.claim.attempt + 1)
        self.wait_for_checkpoint(after="SIGTERM to the driver")

    def kill_driver(self):
        driver_of(self.run).kill()
        assert self.session.follow(self.claim).state == "failed"
        self.start_attempt(self.claim.attempt + 1)
        self.wait_for_checkpoint(after="the kill of the driver")

    def kill_cluster(self):
        """No cluster knows the job afterwards: the next attempt starts once the heartbeat of this one is too old."""
        self.session.kill_cluster()
        last_heartbeat = read_claim(self.run).heartbeat
        self.session.restart()
        self.start_attempt(self.claim.attempt + 1)
        assert self.claim.heartbeat - last_heartbeat > CLAIM_TIMEOUT_S

    def finish(self):
        assert self.session.follow(self.claim).exit_code == 0
        self.check_losses(after="the kill of the cluster")
        return result_of(self.run)


def test_killed_training_equals_undisturbed_training(session, slow_config, undisturbed):
    training = KilledTraining(session, slow_config("killed"), undisturbed.losses)
    training.start_attempt(1)
    training.wait_for_checkpoint(after="nothing")
    training.kill_worker()
    training.terminate_driver()
    training.kill_driver()
    training.kill_cluster()
    assert training.finish() == undisturbed
    assert training.claim.attempt == 4
    assert len(training.run.list("starts/")) == 5


def test_new_cluster_repeats_no_finished_trial(session, digits):
    """The sweep begins in the cluster that the test before has left, and is finished in the next one."""
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
    wait_until(lambda: len(results()) >= 3, "three finished trials", timeout_s=600)
    session.kill_cluster()
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


def test_kills_leave_no_training_process(session):
    for _ in itertools.repeat(None, 50):
        if not training_workers(session):
            return
        time.sleep(0.2)
    pytest.fail(f"left behind: {training_workers(session)}")
