"""Preempts the active attempt of a run: it writes a checkpoint and stops."""

import time
from functools import partial

from vitline.flows.catalog.lists import find_run
from vitline.infra.runs import liveness
from vitline.infra.runs.lease import lease_version, read_lease
from vitline.infra.runs.liveness import Silence, watch_until_moved
from vitline.infra.runs.run_state import NO_STATE, has_ended, read_state, request_stop
from vitline.infra.settings import user_at_host


def preempt(root: str, key: str) -> dict[str, str | int]:
    """Requests the stop and returns it. Raises ValueError for a run that is not active, RuntimeError if it has no heartbeat."""
    run = find_run(root, key)
    lease, state = read_lease(run), read_state(run) or NO_STATE
    if lease is None:
        raise ValueError(f"{run.uri} has had no attempt, so there is nothing to preempt; `vitline runs ls` lists runs.")
    if has_ended(state, lease.attempt):
        raise ValueError(f"{lease.run_key} is {state['state']}, not running; `vitline runs ls` shows the active runs.")
    silent_s, watch_s = time.time() - lease.heartbeat, liveness.WATCH_S
    look = {key: partial(lease_version, run)}
    if Silence(time.time(), liveness.LIFE_S).heartbeat_is_old(lease.heartbeat) and not watch_until_moved(
        look, watch_s, lambda: time.sleep(watch_s / 15)
    ):
        how_long = f"for {silent_s:.0f} s" if silent_s > 0 else f"while it was watched for {watch_s:g} s"
        raise RuntimeError(
            f"attempt {lease.attempt} of {lease.run_key} has had no heartbeat {how_long}; "
            "`vitline ops reconcile` brings it to an end state."
        )
    by = f"preempted by {user_at_host()}"
    request_stop(run, "preempted", by=by, attempt=lease.attempt)
    return {"run": lease.run_key, "attempt": lease.attempt, "job": lease.job_id, "asked": "preempted"}
