"""A worker that computes features and hangs is killed with its stacks on record; it keeps the parts that it has stored."""

import signal
import subprocess
import sys

import pytest

from infra.runs.claims import take_claim
from infra.storage import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FEATURES = """
import pickle, sys, threading
import pyarrow as pa
from types import SimpleNamespace
from infra.runs.task_watch import TaskWatch
from vit import ray_workers

class Part:
    source, key = SimpleNamespace(folder="features/abc"), "train/part-0"

def hangs():
    threading.Event().wait()

def extracted(chunk):
    yield chunk[0]
    hangs()

worker = ray_workers.FeatureWorker()
worker._extractor = SimpleNamespace(ensure=extracted)
chunk = pickle.dumps(("root", 1, [Part(), Part()], TaskWatch(sys.argv[1], 1, 2.0)))
for table in worker(pa.table({"chunk": [chunk]})):
    print(pickle.loads(table.column("result")[0].as_py())[1] or "stored", flush=True)
"""


def test_a_worker_whose_part_hangs_is_killed(tmp_path):
    run = open_store(tmp_path)
    take_claim(run, "probe", job_state=lambda job: "failed", owner="test")
    done = subprocess.run([sys.executable, "-c", FEATURES, run.uri], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "stored\n"), done.stderr
    (key,) = run.list("errors/")
    assert key.endswith("-features-abc-train-part-0.json")
    assert "hangs" in run.read_json(key)["error"]
