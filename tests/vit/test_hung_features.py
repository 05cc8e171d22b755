"""A task on Ray that hangs is killed with its stacks on record; it keeps the results that it has given. One that goes on says so."""

import signal
import subprocess
import sys

import pytest

from vitline.infra.runs.lease import acquire_lease
from vitline.infra.storage import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HANGS = """
import pickle, sys, threading
from vitline.infra.runs.ray_work import _results
from vitline.infra.runs.task_watch import TaskWatch

def hangs():
    threading.Event().wait()

def extracted(chunk):
    yield chunk[0]
    hangs()

given = pickle.dumps(extracted), pickle.dumps(["stored", "missing"]), "features-abc-part-0", TaskWatch(sys.argv[1], 1, 2.0)
for result, error in _results(*given):
    print(error or result, flush=True)
"""


@pytest.fixture
def run(tmp_path):
    run = open_store(tmp_path)
    acquire_lease(run, "probe", job_state=lambda job: "failed", owner="test")
    return run


def test_a_task_that_hangs_is_killed_and_after_the_third_time_it_is_named(run):
    for number in range(1, 4):
        done = subprocess.run([sys.executable, "-c", HANGS, run.uri], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (-signal.SIGKILL, "stored\n"), done.stderr
        errors = run.list("errors/")
        assert len(errors) == number
    assert errors[0].endswith("-features-abc-part-0.json")
    assert "in hangs" in run.read(run.read_json(errors[0])["stacks"]).decode()
    done = subprocess.run([sys.executable, "-c", HANGS, run.uri], capture_output=True, text=True)
    assert done.stdout.startswith(
        "features-abc-part-0 was tried 3 times, and its process ended each time; the last error: no progress"
    )
