"""One attempt at a time may write a run (infra/runs/lease.py)."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

from vitline.infra.runs.lease import LeaseHeld, LeaseHolder, LeaseLost, acquire_lease, job_id_of, read_lease
from vitline.infra.runs.liveness import Watch
from vitline.infra.storage import PreconditionFailed, open_store
from vitline.infra.stores.file_store import FileStore


@pytest.fixture
def run(tmp_path):
    return open_store(tmp_path / "run")


def take(run, states=None, owner="flow", **options):
    return acquire_lease(run, "vit-abc", job_state=(states or {}).get, owner=owner, **options)


def job(run, attempt=1):
    return job_id_of(run, "vit-abc", attempt)


def test_the_first_lease_is_attempt_1_and_its_job_id_belongs_to_this_root(run, tmp_path):
    lease = take(run)
    assert (lease.attempt, lease.job_id, lease.owner, lease.counter) == (1, job(run), "flow", 0)
    assert read_lease(run) == lease
    assert re.fullmatch(r"vit-abc-[0-9a-f]{8}-a1", lease.job_id)
    assert take(open_store(tmp_path / "another")).job_id != lease.job_id


@pytest.mark.parametrize("state", ["pending", "running"])
def test_running_job_keeps_its_lease_however_old_the_heartbeat(run, state):
    first = take(run)
    with pytest.raises(LeaseHeld, match=f"job {job(run)} is {state}") as held:
        take(run, {job(run): state}, lease_timeout_s=-1)
    assert held.value.lease == first


@pytest.mark.parametrize("state", ["succeeded", "failed", "stopped"])
def test_lease_of_an_ended_job_can_be_taken_at_once(run, state):
    take(run)
    lease = take(run, {job(run): state})
    assert (lease.attempt, lease.job_id, lease.counter) == (2, job(run, 2), 1)


def test_lease_without_a_job_can_be_taken_once_its_counter_has_stood_still_for_the_timeout(run):
    take(run)
    with pytest.raises(
        LeaseHeld, match=f"Ray does not know job {job(run)}, and its heartbeat has been unchanged for 0 s"
    ):
        take(run, lease_timeout_s=60)
    watch, began = Watch(), time.monotonic()
    while read_lease(run).attempt == 1:
        with contextlib.suppress(LeaseHeld):
            take(run, lease_timeout_s=0.3, watch=watch)
    assert time.monotonic() - began >= 0.3


def test_fields_of_a_newer_version_are_kept_by_heartbeats(run):
    lease = take(run)
    run.write_json("lease.json", {**lease.model_dump(), "lease_s": 5})
    LeaseHolder(run, 1).beat()
    assert run.read_json("lease.json")["lease_s"] == 5


def test_lease_that_was_released_can_be_taken_at_once(run):
    take(run)
    LeaseHolder(run, 1).release()
    assert take(run, lease_timeout_s=60).attempt == 2


def test_heartbeat_keeps_the_lease_of_a_job_unknown_to_ray(run):
    take(run)
    seconds = iter(range(0, 1000, 4))
    watch = Watch(lambda: next(seconds))
    for _ in range(14):  # 52 s
        with pytest.raises(LeaseHeld):
            take(run, lease_timeout_s=60, watch=watch)
    LeaseHolder(run, 1).beat()
    for _ in range(16):  # 60 s
        with pytest.raises(LeaseHeld):
            take(run, lease_timeout_s=60, watch=watch)
    assert take(run, lease_timeout_s=60, watch=watch).attempt == 2


CONTENDER = """
import sys, time
real, ahead_s = time.time, float(sys.argv[2])
time.time = lambda: real() + ahead_s
from vitline.infra.runs.lease import LeaseHeld, read_lease, acquire_lease
from vitline.infra.runs.liveness import Watch
from vitline.infra.runs.liveness import Watch
from vitline.infra.storage import open_store
run, watch, counters = open_store(sys.argv[1]), Watch(), set()
while len(counters) < 20:
    try:
        acquire_lease(run, "vit-abc", job_state=lambda job: None, owner="contender", lease_timeout_s=20, watch=watch)
        sys.exit("it took the lease of a living attempt")
    except LeaseHeld as held:
        counters.add(held.lease.counter)
"""


@pytest.mark.parametrize("ahead_s", [61, 86_400, -86_400])
def test_wrong_clock_does_not_take_the_lease_of_a_living_attempt(run, ahead_s):
    take(run)
    with LeaseHolder(run, 1, every_s=0.02) as holder:
        done = subprocess.run([sys.executable, "-c", CONTENDER, run.uri, str(ahead_s)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert holder.check().attempt == 1


def test_lease_is_not_taken_if_the_job_server_is_unreachable(run):
    take(run)

    def away(job_id):
        raise ConnectionError("job server away")

    with pytest.raises(ConnectionError):
        acquire_lease(run, "vit-abc", job_state=away, owner="flow", lease_timeout_s=-1)
    assert read_lease(run).attempt == 1


@pytest.mark.parametrize("before", [None, "failed"])
def test_exactly_one_of_concurrent_leases_succeeds(run, before):
    states = {}
    if before:
        states[take(run).job_id] = before
    barrier = threading.Barrier(6)

    def race(n):
        barrier.wait()
        try:
            return take(run, states, owner=f"flow {n}")
        except LeaseHeld as held:
            return held.lease.owner

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(race, range(6)))
    winners = [result for result in results if not isinstance(result, str)]
    assert winners == [read_lease(run)]
    assert {result for result in results if isinstance(result, str)} == {winners[0].owner}


@pytest.mark.s3
@pytest.mark.slow
def test_exactly_one_of_concurrent_leases_succeeds_on_s3(s3_uri):
    test_exactly_one_of_concurrent_leases_succeeds(open_store(s3_uri), None)


def test_a_store_that_creates_an_object_twice_is_noticed(run):
    together = threading.Barrier(6)

    def plain_create(store, key, data):
        together.wait()  # all have seen that there is no lease
        store.write(key, data)
        return store.read_tagged(key)[1]

    with patch.object(FileStore, "create", plain_create), pytest.raises(AssertionError):
        test_exactly_one_of_concurrent_leases_succeeds(run, None)


def test_attempt_that_lost_its_lease_fails_to_check_and_to_send_heartbeats(run):
    first = take(run)
    holder = LeaseHolder(run, 1)
    assert holder.check() == first
    second = take(run, {first.job_id: "failed"})
    for forbidden in (holder.check, holder.beat, holder.__enter__):
        with pytest.raises(LeaseLost, match=r"attempt 1 lost .*lease\.json: attempt 2 of flow holds it"):
            forbidden()
    assert holder.lost
    assert read_lease(run) == second == LeaseHolder(run, 2).check()
    with pytest.raises(LeaseLost, match="nobody holds it"):
        LeaseHolder(open_store(f"{run.uri}/other"), 1).check()


def test_takeover_between_read_and_write_of_a_heartbeat_wins(run, overtake):
    first = take(run)
    overtake(run, "compare_and_swap", lambda: take(run, {first.job_id: "stopped"}))
    with pytest.raises(LeaseLost):
        LeaseHolder(run, 1).beat()
    assert read_lease(run).attempt == 2


@pytest.mark.parametrize("operation", ["create", "compare_and_swap"])
def test_lease_succeeds_if_its_own_write_was_stored_but_reported_as_refused(run, monkeypatch, operation):
    states = {}
    if operation == "compare_and_swap":
        states[take(run).job_id] = "failed"
    write = getattr(run, operation)

    def lose_the_reply(*arguments):
        write(*arguments)
        raise PreconditionFailed("the retry found its own object")

    monkeypatch.setattr(run, operation, lose_the_reply)
    lease = take(run, states, owner="the other flow")
    assert lease == read_lease(run)
    assert lease.owner == "the other flow"


def test_holder_sends_heartbeats_until_it_exits_and_detects_a_takeover(run):
    first = take(run)
    with LeaseHolder(run, 1, every_s=0.01):
        while read_lease(run).counter < 3:
            time.sleep(0.01)
    after_exit = read_lease(run)
    assert after_exit.heartbeat > first.heartbeat
    with LeaseHolder(run, 1, every_s=0.01) as holder:
        while take_over(run) is None:
            pass
        while not holder.lost:
            time.sleep(0.01)
    assert read_lease(run).attempt == 2


def take_over(run):
    return take(run, {job(run): "failed"})


def test_heartbeats_continue_after_an_outage_of_the_store(run, monkeypatch):
    take(run)
    compare_and_swap, failures = run.compare_and_swap, iter([OSError("away"), OSError("away")])

    def flaky(*arguments):
        for failure in failures:
            raise failure
        return compare_and_swap(*arguments)

    with LeaseHolder(run, 1, every_s=0.01) as holder:
        monkeypatch.setattr(run, "compare_and_swap", flaky)
        before = read_lease(run).counter
        while read_lease(run).counter == before:
            time.sleep(0.01)
        assert not holder.lost
