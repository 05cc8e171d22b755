"""Kills of real processes: a worker, the job driver, a whole cluster. One training survives them all, one after the other.

CPU float32 on two workers: losses are compared bit for bit (vit/README.md, "What is equal, and how nearly").
"""

import contextlib
import re
import time
from functools import partial

import psutil
import pytest

from vitline.flows.runs.services import Cluster
from vitline.flows.runs.stage import run_store
from vitline.infra.children import processes_with
from vitline.infra.config import replace
from vitline.infra.runs.lease import LeaseHeld, acquire_lease, read_lease
from vitline.infra.runs.liveness import Watch
from vitline.infra.settings import Settings
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.run.resolved import resolve

from ..eventually import eventually
from ..trainings import losses_of, outcome_of
from .undisturbed import train_undisturbed

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
STEPS, SAVE_EVERY = 100, 10
STEPS_PER_START = 5  # every start of the worker group makes so many steps at least before the next kill
LEASE_TIMEOUT_S = 15
soon = partial(eventually, timeout_s=300, every_s=0.05)


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
        """The next attempt of a training, as a job."""
        spec = resolve(config, self.root).spec()
        run = run_store(self.root, spec.run_key)
        lease = self.lease(run, spec.run_key)
        run.write_json("config.json", spec.model_dump(mode="json"))
        command = [
            "python",
            "-m",
            "vitline.vit.ray_jobs.train_driver",
            "--run",
            run.uri,
            "--attempt",
            str(lease.attempt),
        ]
        self.jobs.submit(lease.job_id, command, env={"RAY_JOB_STOP_WAIT_TIME_S": "11"}, metadata={})
        return run, lease

    def lease(self, run, key):
        """Once the attempt before is dead: a killed one's heartbeat has to grow old."""
        watch = Watch()
        while True:
            with contextlib.suppress(LeaseHeld):
                return acquire_lease(
                    run, key, job_state=self.job_state, owner="test", lease_timeout_s=LEASE_TIMEOUT_S, watch=watch
                )
            time.sleep(0.5)

    def job_state(self, job_id):
        job = self.jobs.find(job_id)
        return job and job.state

    def follow(self, lease):
        return self.jobs.follow(lease.job_id, lambda job: None, poll_s=0.2)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    session = Session(str(tmp_path_factory.mktemp("store")), tmp_path_factory.mktemp("logs"))
    yield session
    session.cluster.__exit__()


@pytest.fixture
def slow_config(train_config):
    """Two workers, a hundred steps of some 50 ms or more, a checkpoint every ten."""
    config = train_config("killed", workers=2, steps=STEPS, save_every_steps=SAVE_EVERY, grace_s=10.0)
    size = {"embed_dim": 128, "depth": 6, "num_heads": 4, "mlp_dim": 512, "image_size_px": 32, "patch_size_px": 4}
    return replace(
        config, **{"recipe.input.augment.image_size_px": 32, **{f"recipe.model.{k}": v for k, v in size.items()}}
    )


def newest_step(run):
    """The step of the newest checkpoint; 0 without one."""
    return max((int(re.search(r"step-(\d+)", prefix)[1]) for prefix in list_checkpoints(run)), default=0)


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
        if run.uri in (p.info["cmdline"] or ()) and "vitline.vit.ray_jobs.train_driver" in p.info["cmdline"]
    ]
    assert len(found) == 1, found
    return found[0]


@pytest.fixture
def undisturbed(slow_config, tmp_path):
    """The result of the same training without Ray and without kills."""
    result = outcome_of(train_undisturbed(resolve(slow_config, str(tmp_path)).spec(), str(tmp_path)))
    assert sorted(result.losses) == list(range(1, STEPS + 1))
    return result


class KilledTraining:
    """One run whose processes are killed again and again. It must have the losses of the undisturbed run, after each kill."""

    def __init__(self, session, config, expected_losses):
        self.session, self.config, self.expected_losses = session, config, expected_losses
        self.starts = 0

    def start_attempt(self, number):
        self.run, self.lease = self.session.submit(self.config)
        assert self.lease.attempt == number

    def wait_for_checkpoint(self, after):
        """Waits for the next start of the worker group and a checkpoint of its own. `after`: what was killed before."""
        self.starts += 1
        soon(lambda: len(self.run.list("starts/")) == self.starts, awaited=f"a start after {after}")
        resumed = newest_step(self.run)
        soon(lambda: newest_step(self.run) >= resumed + STEPS_PER_START, awaited=f"a checkpoint after {after}")
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
        assert len(self.run.list(f"starts/a{self.lease.attempt}-")) == 2

    def kill_driver(self):
        driver_of(self.run).kill()
        assert self.session.follow(self.lease).state == "failed"
        self.start_attempt(self.lease.attempt + 1)
        self.wait_for_checkpoint(after="the kill of the driver")

    def kill_cluster(self):
        """No cluster knows the job afterwards: the next attempt starts once the heartbeat of this one is too old."""
        self.session.kill_cluster()
        last_heartbeat = read_lease(self.run).heartbeat
        self.session.restart()
        self.start_attempt(self.lease.attempt + 1)
        assert self.lease.heartbeat - last_heartbeat > LEASE_TIMEOUT_S

    def finish(self):
        assert self.session.follow(self.lease).exit_code == 0
        self.check_losses(after="the kill of the cluster")
        return outcome_of(self.run)


def test_killed_training_equals_undisturbed_training(session, slow_config, undisturbed):
    training = KilledTraining(session, slow_config, undisturbed.losses)
    training.start_attempt(1)
    training.wait_for_checkpoint(after="nothing")
    training.kill_worker()
    training.kill_driver()
    training.kill_cluster()
    assert training.finish() == undisturbed
    assert training.lease.attempt == 3
    assert len(training.run.list("starts/")) == 4


def test_kills_leave_no_training_process(session):
    soon(lambda: not training_workers(session), awaited="the end of every training process")
