"""How a run stands, in the store: `state.json` by the attempt that holds the claim, `stop.json` by flow or operator,
`verdict.json` by whoever found that no attempt lives and none had said how it ended (DESIGN 3.4)."""

import contextlib
import json
import time
from typing import Any, Literal, NamedTuple, get_args

from infra.redact import cleaned
from infra.storage import PreconditionFailed, Store, json_bytes

RunState = Literal["running", "finished", "diverged", "preempted", "cancelled", "failed", "out_of_time"]
StopReason = Literal["preempted", "out_of_time", "cancelled"]


class Outcome(NamedTuple):
    """What a state is called elsewhere."""

    prefect_type: str
    prefect_name: str
    mlflow_status: str
    exit_code: int


OUTCOMES: dict[RunState, Outcome] = {
    # A driver that leaves while its run says so has failed.
    "running": Outcome("RUNNING", "Running", "RUNNING", 1),
    "finished": Outcome("COMPLETED", "Completed", "FINISHED", 0),
    "diverged": Outcome("FAILED", "Diverged", "FAILED", 3),
    # 75 is EX_TEMPFAIL: the only exit that the flow answers with another attempt.
    "preempted": Outcome("CRASHED", "Preempted", "KILLED", 75),
    "cancelled": Outcome("CANCELLED", "Cancelled", "KILLED", 143),
    "failed": Outcome("FAILED", "Failed", "FAILED", 1),
    "out_of_time": Outcome("FAILED", "OutOfTime", "KILLED", 1),
}


# Of a driver that found its run in another attempt's hands: refused by a guard. It leaves the state alone.
CLAIM_LOST_EXIT_CODE = 3


def write_state(run: Store, state: RunState, attempt: int, **detail: Any) -> None:
    """Write `state.json`. Only the attempt that holds the claim may call this; `detail` is JSON.

    An error's text may quote what nobody should read; the reason is written without secrets.
    """
    if state not in OUTCOMES:
        raise ValueError(f"{state!r} is no run state; infra/runs/run_state.py lists {', '.join(OUTCOMES)}.")
    if "reason" in detail:
        detail["reason"] = cleaned(detail["reason"])
    run.write_json(
        "state.json", detail | {"schema_version": 1, "state": state, "attempt": attempt, "updated_at": time.time()}
    )


def read_state(run: Store) -> dict[str, Any] | None:
    """How the run stands: state, attempt, updated_at (unix s) and the detail; None before the first.

    What `write_state` wrote last, unless the attempt that it speaks of has ended without a word and has its verdict.
    """
    state, verdict = _read(run, "state.json"), _read(run, "verdict.json")
    if verdict is None or (state is not None and state["attempt"] > verdict["attempt"]):
        return state
    spoke = state is not None and state["attempt"] == verdict["attempt"] and state["state"] != "running"
    return state if spoke else {**(state or {}), **verdict}


def write_reconciled_state(run: Store, state: RunState, attempt: int, reason: str) -> None:
    """Says how an attempt ended that cannot say so any more. For use only once its job is terminal or unknown to Ray."""
    verdict = {
        "schema_version": 1,
        "state": state,
        "attempt": attempt,
        "reason": cleaned(reason),
        "updated_at": time.time(),
    }
    run.write_json("verdict.json", verdict)


def request_stop(run: Store, reason: StopReason, by: str, attempt: int) -> None:
    """Ask an attempt to stop; `by` says in words who asked, and becomes the reason that people read.

    A request is never weakened (cancelled > out_of_time > preempted), and one to an older attempt never replaces one
    to a newer.
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
            pass  # someone else asked in this moment: look at what they asked


def read_stop(run: Store) -> dict[str, Any] | None:
    """The request to stop: reason, by, attempt, requested_at (unix s); None if nobody asked.

    A request to an earlier attempt is over: compare `attempt` with your own.
    """
    return _read(run, "stop.json")


def _read(run: Store, key: str) -> dict[str, Any] | None:
    try:
        return run.read_json(key)
    except FileNotFoundError:
        return None
