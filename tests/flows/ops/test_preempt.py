"""Which attempt `vitline ops preempt` asks to stop, and when it refuses."""

import time

import pytest

from vitline.flows.ops.preempt import preempt
from vitline.infra.config import replace
from vitline.infra.runs import liveness
from vitline.infra.runs.lease import LeaseHolder, acquire_lease, job_id_of, read_lease
from vitline.infra.runs.run_state import read_stop, write_state
from vitline.infra.storage import open_store

KEY = "birds-0123456789ab"


@pytest.fixture
def run(root):
    store = open_store(root).child(f"runs/{KEY}")
    store.write_json("config.json", {"run_key": KEY})
    return store


def lease(run, silent_s=0.0):
    held = acquire_lease(run, KEY, job_state=lambda job: "failed", owner="someone")
    run.write_json("lease.json", replace(held, heartbeat=time.time() - silent_s).model_dump())


def test_a_run_that_is_not_active_is_refused(run, root):
    with pytest.raises(ValueError, match="nope"):
        preempt(root, "nope")
    with pytest.raises(ValueError, match="has had no attempt"):
        preempt(root, KEY)
    lease(run)
    write_state(run, "finished", 1)
    with pytest.raises(ValueError, match="is finished"):
        preempt(root, KEY)
    assert read_stop(run) is None


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(liveness, "WATCH_S", 0.3)


def test_an_attempt_without_a_heartbeat_is_left_to_reconcile(run, root):
    lease(run, silent_s=3600)
    write_state(run, "running", 1)
    with pytest.raises(RuntimeError, match=r"no heartbeat for 360\d s; `vitline ops reconcile`"):
        preempt(root, KEY)
    run.write_json("lease.json", {**read_lease(run).model_dump(), "heartbeat": time.time() + 3600})
    with pytest.raises(RuntimeError, match=r"no heartbeat while it was watched for 0.3 s; `vitline ops reconcile`"):
        preempt(root, KEY)
    assert read_stop(run) is None


@pytest.mark.slow
def test_an_attempt_whose_heartbeat_is_old_by_the_clock_but_moves_is_asked_to_stop(run, root, monkeypatch):
    """The clock of its machine is an hour behind."""
    lease(run, silent_s=3600)
    write_state(run, "running", 1)
    monkeypatch.setattr(liveness, "WATCH_S", 60.0)
    with LeaseHolder(run, 1, every_s=0.05):
        lease_file = {**read_lease(run).model_dump(), "heartbeat": time.time() - 3600}
        run.write_json("lease.json", lease_file)
        assert preempt(root, KEY)["attempt"] == 1


def test_the_active_attempt_is_asked_to_stop(run, root):
    lease(run)
    write_state(run, "preempted", 1)
    lease(run)  # the next attempt, which has not written its state yet
    assert preempt(root, "birds") == {"run": KEY, "attempt": 2, "job": job_id_of(run, KEY, 2), "asked": "preempted"}
    assert (read_stop(run)["reason"], read_stop(run)["attempt"]) == ("preempted", 2)
