"""A preparation of which something hangs is killed with the stacks on record, and resumes."""

import signal
import subprocess
import sys

import pytest

from vitline.data_prep.config import CorpusConfig, Digits
from vitline.data_prep.prepare.job import PrepareSpec, drive
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REQUEST = CorpusConfig(name="digits", source=Digits(digits=(0, 1), num_train=160, num_val=40))
SMALL = """
import sys, threading
from vitline.data_prep.prepare import job
from vitline.infra.runs.task_watch import TaskWatch
from vitline.infra.storage import open_store

def hangs(*args):
    threading.Event().wait()

spec = job.PrepareSpec.model_validate(open_store(sys.argv[1]).read_json("config.json"))
job.prepare(spec.requests, "memory://before")  # what it imports must not take the time of the limit
if sys.argv[2] == "main thread":
    job._publish = hangs
else:
    job.examine_chunk = hangs
job.TaskWatch = lambda run, attempt: TaskWatch(run, attempt, 10.0)
job.drive(open_store(sys.argv[1]), 1)
"""
ON_RAY = """
import pickle, sys, threading
from vitline.data_prep.examine.examine import ChunkTask
from vitline.data_prep.executors import _ray_task
from vitline.infra.runs.ray_work import _results
from vitline.infra.runs.task_watch import TaskWatch

def hangs(task):
    threading.Event().wait()

task = ChunkTask(corpus="file:///root/corpora/digits/1", root="file:///root", chunk=7)
((_, error),) = _results(pickle.dumps(hangs), pickle.dumps(task), _ray_task(hangs, task).key, TaskWatch(sys.argv[1], 1, 2.0))
print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def run(tmp_path):
    run = open_store(tmp_path / "runs/prepare")
    acquire_lease(run, "prepare", job_state=lambda job: "failed", owner="test")
    return run


def ended(run, program, *arguments):
    return subprocess.run([sys.executable, "-c", program, run.uri, *arguments], capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("where", ["main thread", "task"])
def test_a_small_preparation_that_hangs_is_killed_and_the_next_attempt_finishes_it(run, tmp_path, where):
    spec = PrepareSpec(run_key="prepare", root=str(tmp_path), requests=(REQUEST,), small=True)
    run.write_json("config.json", spec.model_dump(mode="json"))
    done = ended(run, SMALL, where)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (error,) = [run.read_json(key) for key in run.list("errors/")]
    assert error["error"].startswith("no progress for 10 s: it is in ")
    assert "in hangs" in run.read(error["stacks"]).decode()
    assert read_state(run)["state"] == "running"
    attempt = acquire_lease(run, "prepare", job_state=lambda job: "failed", owner="test").attempt
    assert drive(run, attempt) == 0


def test_a_task_on_ray_that_hangs_is_killed_and_after_the_third_time_its_preparation_fails(run):
    for number in range(2):
        run.write_json(f"errors/a1-{number}-examine-digits-7.json", {"error": "it hung"})
    done = ended(run, ON_RAY)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, ""), done.stderr
    assert len(run.list("errors/")) == 3
    done = ended(run, ON_RAY)
    assert done.returncode == 0, done.stderr
    assert (
        "RuntimeError: examine-digits-7 was tried 3 times, and its process ended each time; the last error: no progress for 2 s: it is in"
        in done.stdout
    )
    assert "hangs" in done.stdout
