"""The state of a run in the store (docs/design.md, "Run states").

The attempt that holds the claim writes `state.json`. Flows and operators write `stop.json`. `verdict.json` is the
reconciled state of an attempt that ended without writing how.
"""

import contextlib
import json
import time
from typing import Any, Literal, NamedTuple, get_args

from infra.redact import cleaned
from infra.storage import PreconditionFailed, Store, json_bytes

RunState = Literal["running", "finished", "diverged", "preempted", "cancelled", "failed", "out_of_time"]
StopReason = Literal["preempted", "out_of_time", "cancelled"]


class Outcome(NamedTuple):
    """The names of a run state in Prefect and MLflow, and the exit code of its driver."""

    prefect_type: str
    prefect_name: str
    mlflow_status: str
    exit_code: int


OUTCOMES: dict[RunState, Outcome] = {
    # A driver that exits in this state has failed.
    "running": Outcome("RUNNING", "Running", "RUNNING", 1),
    "finished": Outcome("COMPLETED", "Completed", "FINISHED", 0),
    "diverged": Outcome("FAILED", "Diverged", "FAILED", 3),
    # 75 is EX_TEMPFAIL, the only exit code after which the flow starts another attempt.
    "preempted": Outcome("CRASHED", "Preempted", "KILLED", 75),
    "cancelled": Outcome("CANCELLED", "Cancelled", "KILLED", 143),
    "failed": Outcome("FAILED", "Failed", "FAILED", 1),
    "out_of_time": Outcome("FAILED", "OutOfTime", "KILLED", 1),
}


# Exit code of a driver whose attempt has lost the claim. It does not change the state.
CLAIM_LOST_EXIT_CODE = 3


def write_state(run: Store, state: RunState, attempt: int, **detail: Any) -> None:
    """Writes `state.json`. Only the attempt that holds the claim may call this. `detail` must be JSON.

    Secrets are removed from `reason`, because error messages may quote them.
    """
    if state not in OUTCOMES:
        raise ValueError(f"{state!r} is no run state. infra/runs/run_state.py lists {', '.join(OUTCOMES)}.")
    if "reason" in detail:
        detail["reason"] = cleaned(detail["reason"])
    run.write_json(
        "state.json", detail | {"schema_version": 1, "state": state, "attempt": attempt, "updated_at": time.time()}
    )


def read_state(run: Store) -> dict[str, Any] | None:
    """The current state of a run: state, attempt, updated_at (Unix seconds) and the detail; None if there is none yet.

    The reconciled state counts if it is for the same or a later attempt than `state.json`, unless that attempt itself has
    written how it ended.
    """
    state: dict[str, Any] | None = run.read_json_or_none("state.json")
    reconciled: dict[str, Any] | None = run.read_json_or_none("verdict.json")
    if reconciled is None or (state is not None and state["attempt"] > reconciled["attempt"]):
        return state
    ended_itself = state is not None and state["attempt"] == reconciled["attempt"] and state["state"] != "running"
    return state if ended_itself else {**(state or {}), **reconciled}


def state_of(run: Store, attempt: int) -> RunState | None:
    """The current state of a run if it is that of `attempt`, else None."""
    state = read_state(run)
    return state["state"] if state is not None and state["attempt"] == attempt else None


def write_reconciled_state(run: Store, state: RunState, attempt: int, reason: str) -> None:
    """Writes the end state of an attempt that cannot write it itself. Its job must have ended or be unknown to Ray."""
    reconciled = {
        "schema_version": 1,
        "state": state,
        "attempt": attempt,
        "reason": cleaned(reason),
        "updated_at": time.time(),
    }
    run.write_json("verdict.json", reconciled)


def request_stop(run: Store, reason: StopReason, by: str, attempt: int) -> None:
    """Asks an attempt to stop. `by` says who asked and is shown as the reason.

    A request is never weakened (cancelled > out_of_time > preempted), and a request to an older attempt never replaces
    one to a newer attempt.
    """
    rank = get_args(StopReason).index
    request = {"schema_version": 1, "reason": reason, "by": by, "attempt": attempt, "requested_at": time.time()}
    while True:
        try:
            data, tag = run.read_tagged("stop.json")
            found = json.loads(data)
            if (found["attempt"], rank(found["reason"])) >= (attempt, rank(reason)):
                return
            run.compare_and_swap("stop.json", json_bytes(request), tag)
            return
        except FileNotFoundError:
            with contextlib.suppress(PreconditionFailed):
                run.create("stop.json", json_bytes(request))
                return
        except PreconditionFailed:
            pass  # another process wrote a request at the same time: read it and compare again


def read_stop(run: Store) -> dict[str, Any] | None:
    """The stop request: reason, by, attempt, requested_at (Unix seconds); None if there is none.

    A request to an earlier attempt has no effect: the caller must compare `attempt`.
    """
    request: dict[str, Any] | None = run.read_json_or_none("stop.json")
    return request
