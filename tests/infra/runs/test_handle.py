"""What a process of a job does with its run: nothing is written without the lease, and starts and errors are told apart."""

import uuid

import pytest

from vitline.infra.runs.handle import Run
from vitline.infra.runs.lease import LeaseLost, acquire_lease
from vitline.infra.runs.run_state import read_state, request_stop
from vitline.infra.storage import open_store


def taken(store):
    return acquire_lease(store, "owls-0a", job_state=lambda job: "failed", owner="test").attempt


@pytest.fixture
def held():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    return Run(store, taken(store))


def test_an_attempt_that_has_lost_its_lease_writes_nothing(held):
    assert held.holds()
    held.show({"step": 1, "total_steps": 2})
    journal = held.journal()
    journal.record({"train/loss": 0.5}, 1)
    taken(held.store)
    before = {key: held.store.read(key) for key in held.store.list()}
    assert not held.holds()
    assert held.is_lost
    for write in (lambda: held.show({"step": 2, "total_steps": 2}), lambda: held.end("finished", {}), journal.close):
        with pytest.raises(LeaseLost, match="attempt 1 lost the lease"):
            write()
    assert {key: held.store.read(key) for key in held.store.list()} == before
    with pytest.raises(LeaseLost), Run(held.store, 1, beats=True):
        pytest.fail("it was opened")


def test_one_process_of_a_group_follows_stop_requests(held):
    request_stop(held.store, "preempted", by="a night", attempt=1)
    with held, Run(held.store, 1, follows_stops=False) as other:
        assert (held.stopped(), held.stopped_by) == ("preempted", "a night")
        assert (other.stopped(), other.stopped_by) == (None, "")
    assert held.end("preempted", {"reason": held.stopped_by}) == "preempted"
    assert read_state(held.store)["reason"] == "a night"


def test_starts_are_counted_by_checkpoint_and_the_first_error_since_then_is_their_cause(held):
    assert [held.count_start("none", {"at": at}) for at in (10.0, 20.0)] == [0, 1]
    assert held.count_start("step-000000005-a1", {"at": 30.0}) == 0
    assert held.first_error("none") == held.first_error("step-000000005-a1") == "no worker left an error"
    for at, rank, error in ((15.0, 1, "no room"), (36.0, 0, "peer closed"), (35.0, 3, "ValueError: a bad row")):
        held.store.write_json(f"errors/a1-{at:.0f}-rank{rank}.json", {"at": at, "rank": rank, "error": error})
    assert held.first_error("none") == "the first error, on rank 1: no room"
    assert held.first_error("step-000000005-a1") == "the first error, on rank 3: ValueError: a bad row"
    assert held.store.list("starts/") == [
        "starts/a1-from-none-000.json",
        "starts/a1-from-none-001.json",
        "starts/a1-from-step-000000005-a1-000.json",
    ]
