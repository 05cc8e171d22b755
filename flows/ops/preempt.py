"""Preempts the active attempt of a run: it writes a checkpoint and stops."""

import time
from functools import partial

from vitline.flows.catalog.lists import find_run
from vitline.flows.ops import reconcile
from vitline.infra.runs.claims import life_of, read_claim
from vitline.infra.runs.run_state import NO_STATE, has_ended, read_state, request_stop
from vitline.infra.runs.watching import moving
from vitline.infra.settings import user_at_host


def preempt(root: str, key: str) -> dict[str, str | int]:
    """Requests the stop and returns it. Raises ValueError for a run that is not active, RuntimeError if it has no heartbeat."""
    run = find_run(root, key)
    claim, state = read_claim(run), read_state(run) or NO_STATE
    if claim is None:
        raise ValueError(f"{run.uri} has had no attempt, so there is nothing to preempt; `vitline runs ls` lists runs.")
    if has_ended(state, claim.attempt):
        raise ValueError(f"{claim.run_key} is {state['state']}, not running; `vitline runs ls` shows the active runs.")
    silent_s = time.time() - claim.heartbeat
    # A heartbeat that is old, or ahead, by the clock of this machine may move all the same.
    if not 0 <= silent_s <= reconcile.LIFE_S and not moving(
        {key: partial(life_of, run)}, reconcile.WATCH_S, lambda: time.sleep(reconcile.WATCH_S / 15)
    ):
        how_long = f"for {silent_s:.0f} s" if silent_s > 0 else f"while it was watched for {reconcile.WATCH_S:g} s"
        raise RuntimeError(
            f"attempt {claim.attempt} of {claim.run_key} has had no heartbeat {how_long}; "
            "`vitline ops reconcile` brings it to an end state."
        )
    by = f"preempted by {user_at_host()}"
    request_stop(run, "preempted", by=by, attempt=claim.attempt)
    return {"run": claim.run_key, "attempt": claim.attempt, "job": claim.job_id, "asked": "preempted"}
