"""How long a training waits for room and how often its workers may fail to start, by rule and on a real Ray."""

import pickle
import sys
import uuid
from functools import partial

import pytest

from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import read_state, request_stop
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.names import checkpoint_prefix, newest_step
from vitline.vit.ray_jobs.start_policy import (
    NoRoom,
    StartPolicy,
    StartsFailed,
    clear_waiting,
    report_waiting,
    waits,
)
from vitline.vit.run.run_spec import read_progress, read_starts

from ..trainings import begin


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def run():
    """The folder of a run that attempt 1 holds."""
    run = open_store(f"memory://{uuid.uuid4().hex}")
    acquire_lease(run, "owls-0a", job_state=lambda job: None, owner="test")
    return run


RULES = {"queue_s": 60, "most_failures": 3, "have_room": partial(bool, 1)}


def starts_of(run, **options):
    return StartPolicy(run.uri, 1, 100, "2 workers", **{**RULES, "clock": Clock(), **options})


def save_checkpoint(run, step):
    run.write_json(f"{checkpoint_prefix(step, 1)}/manifest.json", {})


def wait_for_room(starts, seconds):
    """The group is to be placed, and the cluster has no room for so long."""
    starts.begin()
    for _ in range(seconds // 30):
        starts.clock.now += 30
        starts.begin()  # as Ray Train's controller does before each try
        starts.unplaced()


def test_waits_in_weeks_of_training_do_not_add_up(run):
    starts = starts_of(run)
    for _ in range(9):
        wait_for_room(starts, 30)
        starts.placed()
        starts.clock.now += 500_000
    with pytest.raises(NoRoom, match="no room for 2 workers within 60 s"):
        wait_for_room(starts, 60)


@pytest.mark.slow
def test_a_run_with_a_checkpoint_waits_until_there_is_room(run):
    save_checkpoint(run, 50)
    starts = starts_of(run)
    wait_for_room(starts, 90_000)
    waiting = {"step": 0, "total_steps": 100, "waiting_for": "room for 2 workers"}
    assert read_progress(run) == waiting | {"no_room": 1}
    assert waits(run)
    starts.placed()
    assert read_progress(run) == {"step": 0, "total_steps": 100}
    starts.have_room = partial(bool, 0)  # a node is gone: others cannot make room
    wait_for_room(starts, 90_000)
    assert read_progress(run) == waiting


def test_what_an_earlier_attempt_waited_for_is_not_taken_for_a_wait_of_this_one(run):
    report_waiting(run, 1, 100, "room for 2 workers")
    starts = starts_of(run)
    starts.begin()
    starts.placed()
    assert read_progress(run) == {"step": 0, "total_steps": 100}


def test_an_attempt_that_wakes_leaves_the_progress_of_its_successor(run, caplog):
    """Ray's controller of attempt 1 was suspended while its group waited for room, or had got it."""
    first = starts_of(run)
    first.begin()
    first.placed()
    save_checkpoint(run, 50)
    assert acquire_lease(run, "owls-0a", job_state=lambda job: "failed", owner="test").attempt == 2
    theirs = {"step": 60, "total_steps": 100, "waiting_for": "room for 1 workers"}
    run.write_json("progress.json", theirs)
    wait_for_room(first, 600)
    first.placed()
    assert read_progress(run) == theirs
    assert "attempt 1 lost the lease" in caplog.text
    assert "Traceback" not in caplog.text


def test_only_failed_starts_without_a_new_checkpoint_count(run):
    starts = starts_of(run)
    for step in range(10, 60, 10):
        for _ in range(3):
            starts.failed(OSError("a node died"))
        save_checkpoint(run, step)
    for _ in range(3):
        starts.failed(OSError("a node died"))
        wait_for_room(starts, 90)  # a wait counts neither way
    with pytest.raises(
        StartsFailed, match=r"3 restarts .* without a new checkpoint; the last error: no module named x"
    ):
        starts.failed(OSError("no module named x"))


def test_a_store_that_is_away_ends_no_training(run, monkeypatch):
    def away(*_):
        raise OSError("connection refused")

    starts = starts_of(run)
    starts.begin()
    starts.placed()
    for name in ("list", "read", "read_tagged", "write"):
        monkeypatch.setattr(type(run), name, away)
    wait_for_room(starts, 600)
    starts.failed(OSError("a node died"))
    starts.placed()
    monkeypatch.undo()
    clear_waiting(run, 1)
    assert pickle.loads(pickle.dumps(starts)).run_uri == run.uri  # goes to Ray Train's controller


OCCUPANT = """
import time, ray
ray.init()

@ray.remote(num_cpus=1)
class Occupant:
    def ping(self): return 1

one = Occupant.remote()
print("asked", flush=True)
ray.get(one.ping.remote())
print("occupied", flush=True)
time.sleep(3600)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_training_that_lost_its_place_waits_is_stopped_or_goes_on(ray_jobs, until, processes, train_config, root):
    """Another job takes the CPU of a killed worker. The wait takes far more than the queue timeout and more than the four tries
    that ended a run before; then the CPU is free again."""
    config = train_config("displaced", steps=1_000_000, queue_timeout_s=15)
    run, lease = begin(config, root)
    occupants = [f"occupant-{n}-{uuid.uuid4().hex[:6]}" for n in range(2)]
    occupy = lambda job: ray_jobs.submit(job, [sys.executable, "-c", OCCUPANT], {}, {})  # noqa: E731
    training = lease.job_id
    try:
        occupy(occupants[0])
        until(lambda: "occupied" in ray_jobs.logs(occupants[0]), occupants[0])
        # A worker's process starts within the first tries, as the cluster has none in advance.
        env = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "2"}
        command = [sys.executable, "-m", "vitline.vit.ray_jobs.train_driver", "--run", run.uri, "--attempt", "1"]
        ray_jobs.submit(training, command, env, {})
        until(lambda: newest_step(run) and read_progress(run), training)
        occupy(occupants[1])
        until(lambda: "asked" in ray_jobs.logs(occupants[1]), training)
        killed_at = [0]

        def displaced():
            """Kills the worker after each new checkpoint, until the second occupant has been faster than the restart."""
            if (newest := newest_step(run)) > killed_at[-1]:
                killed_at.append(newest)
                for worker in processes("ray::RayTrainWorker"):
                    worker.kill()
            return waits(run)

        until(displaced, training)
        until(lambda: ray_jobs.logs(training).count("no room for 1 workers") > 10, training)
        before = read_progress(run)["step"]
        ray_jobs.stop(occupants[1], wait_s=60)
        until(lambda: not waits(run) and read_progress(run)["step"] > before, training)
        assert len(read_starts(run)) >= 2
        request_stop(run, "preempted", by="test", attempt=1)
        assert ray_jobs.follow(training, lambda _: None).exit_code == 75, ray_jobs.logs(training)
        assert read_state(run)["state"] == "preempted"
    finally:
        for job in (*occupants, training):
            if (found := ray_jobs.find(job)) is not None and not found.terminal:
                ray_jobs.stop(job, wait_s=60)
