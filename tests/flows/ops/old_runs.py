"""Runs that ended long ago, and a clock that is ahead, for collections of garbage."""

import time

from vitline.flows.ops import collect_garbage as collecting
from vitline.flows.ops.collect_garbage import DAY_S
from vitline.infra.config import replace
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store

WEEKS, MONTHS, YEAR = 14 * DAY_S, 100 * DAY_S, 365 * DAY_S
REAL_TIME = time.time


def moved(monkeypatch, days):
    """The clock of collections from now on."""
    now = REAL_TIME() + days * DAY_S
    monkeypatch.setattr(collecting.time, "time", lambda: now)


def actions(findings):
    return {finding.subject: finding.action.partition(",")[0].partition(" after")[0] for finding in findings}


def checkpointed(root, key, state="finished", ago=WEEKS, attempts=1):
    """A run with four checkpoints and an interrupted save, whose last heartbeat was `ago` seconds ago."""
    run = open_store(root).child(f"runs/{key}")
    for attempt in range(attempts):
        lease = acquire_lease(run, key, job_state=lambda job: "failed", owner="someone")
        if attempt == 0:
            write_state(run, state, 1, step=30)
    run.write_json("lease.json", replace(lease, heartbeat=time.time() - ago).model_dump())
    run.write_json("state.json", {**run.read_json("state.json"), "updated_at": time.time() - ago})
    for name in ("step-000000010-a1", "step-000000020-a1", "step-000000020-a10", "step-000000020-a2"):
        run.write_json(f"checkpoints/{name}/manifest.json", {})
        run.write(f"checkpoints/{name}/rank-00000-of-00001.safetensors", b"weights")
    run.write("checkpoints/step-000000030-a10/rank-00000-of-00001.safetensors", b"interrupted")
    return run
