"""A worker that computes features and hangs is killed with its stacks on record; it keeps the parts that it has stored. So is
a probe trial that hangs; one that goes on says so."""

import signal
import subprocess
import sys

import pytest

from vitline.infra.runs.claims import take_claim
from vitline.infra.storage import open_store
from vitline.vit.ray_jobs.task_driver import crashed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FEATURES = """
import pickle, sys, threading
import pyarrow as pa
from types import SimpleNamespace
from vitline.infra.runs.task_watch import TaskWatch
from vitline.vit.ray_jobs import task_driver

class Part:
    source, key = SimpleNamespace(folder="features/abc"), "train/part-0"

def hangs():
    threading.Event().wait()

def extracted(chunk):
    yield chunk[0]
    hangs()

worker = task_driver.PartWorker()
worker._extractor = SimpleNamespace(ensure=extracted)
chunk = pickle.dumps((None, "root", 1, [Part(), Part()], TaskWatch(sys.argv[1], 1, 2.0)))
for table in worker(pa.table({"chunk": [chunk]})):
    print(pickle.loads(table.column("result")[0].as_py())[1] or "stored", flush=True)
"""
PROBE = """
import sys, threading
from vitline.infra.storage import open_store
from vitline.vit.ray_jobs import task_driver

def hangs(*args):
    threading.Event().wait()

task_driver.score_probe, task_driver.PROGRESS_TIMEOUT_S = hangs, 2.0
task_driver.watched_probe("root", None, task_driver.trial_watchdog(open_store(sys.argv[1]), 1, "birds-linear"))
"""


@pytest.fixture
def run(tmp_path):
    run = open_store(tmp_path)
    take_claim(run, "probe", job_state=lambda job: "failed", owner="test")
    return run


def test_a_probe_trial_that_hangs_is_killed_and_its_error_is_the_reason(run):
    done = subprocess.run([sys.executable, "-c", PROBE, run.uri], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (key,) = run.list("errors/")
    assert "in hangs" in run.read(run.read_json(key)["stacks"]).decode()
    assert "the last error: no progress for 2 s: it is in" in crashed(run, 1, "birds-linear")


def test_a_worker_whose_part_hangs_is_killed(run):
    done = subprocess.run([sys.executable, "-c", FEATURES, run.uri], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "stored\n"), done.stderr
    (key,) = run.list("errors/")
    assert key.endswith("-features-abc-train-part-0.json")
    assert "hangs" in run.read_json(key)["error"]
