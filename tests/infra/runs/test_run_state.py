from typing import get_args

import pytest

from vitline.infra.records import UnreadableRecord
from vitline.infra.runs.lease import LeaseLost, acquire_lease
from vitline.infra.runs.run_state import (
    OUTCOMES,
    RunState,
    read_state,
    read_stop,
    request_stop,
    write_reconciled_state,
    write_state,
)
from vitline.infra.storage import PreconditionFailed, open_store


@pytest.fixture
def run(tmp_path):
    return open_store(tmp_path / "run")


def test_every_run_state_has_an_outcome_known_to_prefect_and_mlflow():
    prefect = {"RUNNING", "COMPLETED", "FAILED", "CANCELLED", "CRASHED", "PAUSED"}
    assert set(OUTCOMES) == set(get_args(RunState))
    assert {outcome.prefect_type for outcome in OUTCOMES.values()} == prefect
    mlflow = {"RUNNING", "FINISHED", "FAILED", "KILLED", "SCHEDULED"}
    assert {outcome.mlflow_status for outcome in OUTCOMES.values()} == mlflow
    assert [state for state, outcome in OUTCOMES.items() if outcome.exit_code == 75] == ["preempted", "suspended"]
    assert [state for state, outcome in OUTCOMES.items() if outcome.exit_code == 0] == ["finished", "paused"]


def test_read_state_returns_the_state_written_last(run):
    assert read_state(run) is None
    write_state(run, "running", 1, step=0)
    write_state(run, "finished", 2, step=20, model="s3://m")
    state = read_state(run)
    assert {name: state[name] for name in ("state", "attempt", "step", "model")} == {
        "state": "finished",
        "attempt": 2,
        "step": 20,
        "model": "s3://m",
    }
    with pytest.raises(ValueError, match="'done' is not a run state"):
        write_state(run, "done", 1)


def test_state_of_a_later_attempt_is_not_overwritten_by_one_that_wakes(run, overtake):
    def take():
        return acquire_lease(run, "owls-0a", job_state=lambda job: "failed", owner="test").attempt

    write_state(run, "running", take())
    # Attempt 1 has read the state and the lease; its successor writes first.
    overtake(run, "compare_and_swap", lambda: write_state(run, "running", take()))
    with pytest.raises(LeaseLost, match="attempt 2 holds it"):
        write_state(run, "finished", 1)
    assert read_state(run)["attempt"] == 2

    write_reconciled_state(run, "cancelled", 2, "by a person")
    write_reconciled_state(run, "failed", 1, "silent")
    assert read_state(run)["state"] == "cancelled"


@pytest.mark.parametrize("first", sorted(set(OUTCOMES) - {"running"}))
def test_the_first_end_state_of_an_attempt_counts(run, first):
    assert write_state(run, "running", 1) == "running"
    assert write_state(run, first, 1, step=20) == first
    before = run.read("state.json")
    assert {write_state(run, later, 1, reason="too late") for later in OUTCOMES} == {first}
    assert run.read("state.json") == before
    write_reconciled_state(run, "preempted", 2, "silent")
    write_reconciled_state(run, "failed", 2, "silent as well")
    assert read_state(run)["reason"] == "silent"
    assert write_state(run, "running", 3) == "running"


def test_end_state_that_another_process_writes_in_between_counts(run, overtake):
    """The driver ends a job at its deadline in the moment in which a worker finishes it."""
    write_state(run, "running", 1)
    overtake(run, "compare_and_swap", lambda: write_state(run, "finished", 1, step=20))
    assert write_state(run, "out_of_time", 1, reason="the deadline has passed") == "finished"
    assert (read_state(run)["state"], read_state(run)["step"]) == ("finished", 20)


@pytest.mark.parametrize("odd", [b"{", b"[]", b"{}", b"[" * 100_000])
def test_state_or_stop_request_that_cannot_be_read_is_named_and_replaced(run, odd):
    run.write("state.json", odd)
    run.write("stop.json", odd)
    for read in (read_state, read_stop):
        with pytest.raises(UnreadableRecord, match=r"run/st(ate|op)\.json is not a record that this version"):
            read(run)
    assert write_state(run, "finished", 1) == "finished"
    request_stop(run, "preempted", "someone", 1)
    assert (read_state(run)["state"], read_stop(run)["by"]) == ("finished", "someone")


@pytest.mark.parametrize(
    ("first", "second", "standing"),
    [
        (("preempted", 1), ("cancelled", 1), ("cancelled", 1)),
        (("cancelled", 1), ("preempted", 1), ("cancelled", 1)),
        (("cancelled", 1), ("preempted", 2), ("preempted", 2)),
        (("preempted", 2), ("cancelled", 1), ("preempted", 2)),
    ],
)
def test_strongest_stop_request_to_the_newest_attempt_is_kept(run, first, second, standing):
    assert read_stop(run) is None
    for reason, attempt in (first, second):
        request_stop(run, reason, "someone", attempt)
    stop = read_stop(run)
    assert (stop["reason"], stop["attempt"], stop["by"]) == (*standing, "someone")


def test_stop_request_that_loses_a_race_keeps_the_stronger_request(run, overtake):
    overtake(run, "create", lambda: request_stop(run, "cancelled", "a person", 1))
    request_stop(run, "preempted", "the flow", 1)
    assert read_stop(run)["by"] == "a person"
    with pytest.raises(PreconditionFailed):
        run.create("stop.json", b"")
