"""Asks the attempt that is at work on a run to make room: it writes a checkpoint and leaves (DESIGN 4)."""

import getpass
import socket
import time

from flows.catalog import Row, find_run
from flows.ops.reconcile import LIFE_S
from infra.runs.claims import read_claim
from infra.runs.run_state import read_state, request_stop


def preempt(root: str, key: str) -> Row:
    """What was asked of whom. Raises ValueError for a run that is not at work, RuntimeError for one without a sign of life."""
    run = find_run(root, key)
    claim, state = read_claim(run), read_state(run) or {"state": "running", "attempt": 0}
    if claim is None:
        raise ValueError(f"No attempt was ever made on {run.uri}; there is nothing to preempt.")
    if state["state"] != "running" and state["attempt"] >= claim.attempt:
        raise ValueError(f"{claim.run_key} is {state['state']}; `vitline runs ls` shows what runs.")
    silent_s = time.time() - claim.heartbeat
    if silent_s > LIFE_S:
        raise RuntimeError(
            f"attempt {claim.attempt} of {claim.run_key} has shown no life for {silent_s:.0f} s; "
            "`vitline ops reconcile` says how it ended."
        )
    by = f"preempted by {getpass.getuser()}@{socket.gethostname()}"
    request_stop(run, "preempted", by=by, attempt=claim.attempt)
    return {"run": claim.run_key, "attempt": claim.attempt, "job": claim.job_id, "asked": "preempted"}
