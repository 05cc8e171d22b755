"""The state of a run in the store.

The attempt that holds the lease writes `state.json`. Flows and operators write `stop.json`. `reconciled.json` is the
reconciled state of an attempt that ended without writing how.
"""

import contextlib
import json
import time
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack, get_args

from vitline.infra.plain_text import plain
from vitline.infra.records import UnreadableRecord, reading
from vitline.infra.redact import cleaned
from vitline.infra.runs.lease import LeaseLost, read_lease
from vitline.infra.storage import PreconditionFailed, Store, json_bytes

RunState = Literal[
    "running", "finished", "paused", "diverged", "preempted", "suspended", "cancelled", "failed", "out_of_time"
]
StopReason = Literal["preempted", "suspended", "out_of_time", "cancelled"]
"""From weak to strong: a request is never weakened."""
WAITING = "waiting"
"""In lists, on pages and in MLflow: an attempt that was submitted and has not begun, or whose workers wait for room."""


class Outcome(NamedTuple):
    """The names of a run state in Prefect and MLflow, and the exit code of its driver."""

    prefect_type: str
    prefect_name: str
    mlflow_status: str
    exit_code: int


MLFLOW_WAITING = "SCHEDULED"
OUTCOMES: dict[RunState, Outcome] = {
    # A driver that exits in this state has failed.
    "running": Outcome("RUNNING", "Running", "RUNNING", 1),
    "finished": Outcome("COMPLETED", "Completed", "FINISHED", 0),
    # A long run that is trained a part a night: a later attempt continues it.
    "paused": Outcome("COMPLETED", "Paused", "SCHEDULED", 0),
    "diverged": Outcome("FAILED", "Diverged", "FAILED", 3),
    # 75 is EX_TEMPFAIL, the only exit code by itself after which a flow starts another attempt.
    "preempted": Outcome("CRASHED", "Preempted", "KILLED", 75),
    # Resuming the suspended flow run continues from the checkpoint.
    "suspended": Outcome("PAUSED", "Suspended", "SCHEDULED", 75),
    "cancelled": Outcome("CANCELLED", "Cancelled", "KILLED", 143),
    "failed": Outcome("FAILED", "Failed", "FAILED", 1),
    "out_of_time": Outcome("FAILED", "OutOfTime", "KILLED", 1),
}


# Exit code of a driver whose attempt has lost the lease. It does not change the state.
LEASE_LOST_EXIT_CODE = 3


class StateDetail(TypedDict, total=False):
    """What the stages add to their state."""

    reason: str
    """Why the attempt ended in another state than finished."""
    no_room: bool
    """Whether the cluster could not place the workers."""
    from_step: int
    """The step that a running training started from."""
    step: int
    images_seen: int
    """Images that the network was trained on, counting repeats."""
    spikes: list[int]
    """The steps at which the spike guard of a training found a spike."""
    peak_memory_bytes: int
    """On GPUs: most bytes of tensors that a worker has had."""
    planned_memory_bytes: int
    """Beside it: what a plan says of a worker with that micro-batch."""
    val_top1: float
    val_mean_average_precision: float
    val_examples: int
    val_majority_fraction: float
    model: str
    """URI of the published model."""
    inspection: list[str]
    """Keys of the figures, below the run."""
    corpora: dict[str, dict[str, str]]
    """`version` and `digest` of the corpora of a preparation, by name."""
    scores: list[dict[str, Any]]
    """The scores of an evaluation, each a `vitline.vit.evaluation.evaluate.Score` as JSON."""
    predicted: dict[str, int]
    """The `vitline.vit.features.predict.Counts` of a batch prediction."""


class RunStateRecord(StateDetail):
    """The state of a run, as in `state.json`. A record of another version may have more fields."""

    schema_version: int
    state: RunState
    attempt: int
    updated_at: float
    """Unix seconds."""


NO_STATE: Final[RunStateRecord] = {"schema_version": 1, "state": "running", "attempt": 0, "updated_at": 0.0}
"""Stands in for the state of an attempt that has written none yet."""


class StopRequest(TypedDict):
    """`stop.json`: the request to stop an attempt."""

    schema_version: int
    reason: StopReason
    by: str
    attempt: int
    requested_at: float
    """Unix seconds."""


def write_state(run: Store, state: RunState, attempt: int, **detail: Unpack[StateDetail]) -> RunState:
    """Writes `state.json` and returns the state that counts: an attempt that has ended keeps its first end state.

    Only the attempt that holds the lease may call this. Raises LeaseLost where a later attempt holds it: an attempt that was
    suspended after it had checked its lease does not overwrite the state of its successor.

    Secrets and colours are removed from `reason`, because error messages may quote them.
    """
    if state not in OUTCOMES:
        raise ValueError(f"{state!r} is not a run state. infra/runs/run_state.py lists {', '.join(OUTCOMES)}.")
    return _put(run, "state.json", state, attempt, detail)


def read_state(run: Store) -> RunStateRecord | None:
    """The current state of a run; None if there is none yet.

    The reconciled state counts if it is for the same or a later attempt than `state.json`, unless that attempt itself has
    written how it ended. Raises UnreadableRecord.
    """
    state, reconciled = _read_record(run, "state.json"), _read_record(run, "reconciled.json")
    if reconciled is None or (state is not None and state["attempt"] > reconciled["attempt"]):
        return state
    ended_itself = state is not None and state["attempt"] == reconciled["attempt"] and state["state"] != "running"
    if state is None:
        return reconciled
    return state if ended_itself else {**state, **reconciled}


def has_ended(state: RunStateRecord | None, attempt: int) -> bool:
    """Whether an attempt has written how it ended, or a later one has."""
    return state is not None and state["state"] != "running" and state["attempt"] >= attempt


def _read_record(run: Store, key: str) -> RunStateRecord | None:
    with reading(run.uri_of(key)):
        found: RunStateRecord | None = run.read_json_or_none(key)
        return found if found is None else _checked_state(found)


def _checked_state(found: RunStateRecord) -> RunStateRecord:
    _require(found["state"] in OUTCOMES, f"state is {found['state']!r}")
    _require(isinstance(found["attempt"], int), f"attempt is {found['attempt']!r}")
    _require(isinstance(found["updated_at"], int | float), f"updated_at is {found['updated_at']!r}")
    return found


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def state_of(run: Store, attempt: int) -> RunState | None:
    """The current state of a run if it is that of `attempt`, else None."""
    state = read_state(run)
    return state["state"] if state is not None and state["attempt"] == attempt else None


def write_reconciled_state(run: Store, state: RunState, attempt: int, reason: str) -> None:
    """Writes the end state of an attempt that cannot write it itself. Its job must have ended or be unknown to Ray.

    Nothing is written where a later attempt holds the lease, or where this attempt has a reconciled state already.
    """
    with contextlib.suppress(LeaseLost):
        _put(run, "reconciled.json", state, attempt, {"reason": reason})


def _put(run: Store, key: str, state: RunState, attempt: int, detail: StateDetail) -> RunState:
    """Creates or swaps a state and returns it, or returns the end state that this attempt has already.

    Raises LeaseLost if a later attempt holds the lease. The lease is read after the state, so the swap fails if another attempt
    acquires the lease and writes a state in between.
    """
    if "reason" in detail:
        detail["reason"] = cleaned(plain(detail["reason"]))
    record: RunStateRecord = {
        **detail,
        "schema_version": 1,
        "state": state,
        "attempt": attempt,
        "updated_at": time.time(),
    }
    while True:
        ended, tag = _ended(run, key, attempt)
        lease = read_lease(run)
        if lease is not None and lease.attempt > attempt:
            raise LeaseLost(
                f"attempt {attempt} lost the lease of {run.uri}: attempt {lease.attempt} holds it and writes the state."
            )
        if ended is not None:
            return ended
        with contextlib.suppress(PreconditionFailed):  # another process wrote meanwhile: read state and lease again
            run.create_or_swap(key, json_bytes(record), tag)
            return state


def _ended(run: Store, key: str, attempt: int) -> tuple[RunState | None, str | None]:
    """The end state of an attempt in a record, and the tag of the record. One that cannot be read is to be replaced."""
    data, tag = run.read_tagged_or_none(key)
    if data is None:
        return None, None
    with contextlib.suppress(UnreadableRecord), reading(run.uri_of(key)):
        found = _checked_state(json.loads(data))
        if found["attempt"] == attempt and found["state"] != "running":
            return found["state"], tag
    return None, tag


def request_stop(run: Store, reason: StopReason, by: str, attempt: int) -> None:
    """Asks an attempt to stop. `by` says who asked and is shown as the reason.

    A request is never weakened (cancelled > out_of_time > suspended > preempted), and a request to an older attempt never replaces
    one to a newer attempt. A request that this version cannot read is replaced.
    """
    rank = get_args(StopReason).index
    request: StopRequest = {
        "schema_version": 1,
        "reason": reason,
        "by": by,
        "attempt": attempt,
        "requested_at": time.time(),
    }
    while True:
        data, tag = run.read_tagged_or_none("stop.json")
        with contextlib.suppress(UnreadableRecord), reading(run.uri_of("stop.json")):
            found = _checked_stop(json.loads(data)) if data is not None else None
            if found and (found["attempt"], rank(found["reason"])) >= (attempt, rank(reason)):
                return
        with contextlib.suppress(PreconditionFailed):  # another process wrote one at the same time: compare again
            run.create_or_swap("stop.json", json_bytes(request), tag)
            return


def read_stop(run: Store) -> StopRequest | None:
    """The stop request; None if there is none.

    A request to an earlier attempt has no effect: the caller must compare `attempt`. Raises UnreadableRecord.
    """
    with reading(run.uri_of("stop.json")):
        found = run.read_json_or_none("stop.json")
        return found if found is None else _checked_stop(found)


def _checked_stop(found: StopRequest) -> StopRequest:
    _require(found["reason"] in get_args(StopReason), f"reason is {found['reason']!r}")
    _require(isinstance(found["attempt"], int), f"attempt is {found['attempt']!r}")
    _require(isinstance(found["by"], str), f"by is {found['by']!r}")
    return found
