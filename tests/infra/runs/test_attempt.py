"""The frame of every job driver: real leases and states in a folder; what ends a process is tested with real processes."""

import json
import subprocess
import sys
import threading
import time

import pytest

from vitline.infra.runs import attempt as module
from vitline.infra.runs.attempt import guarded, run_attempt
from vitline.infra.runs.handle import Run
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.runs.run_state import LEASE_LOST_EXIT_CODE, read_state, request_stop, write_state
from vitline.infra.runs.stopping import joining_ray
from vitline.infra.storage import open_store

JOB = """
import atexit, functools, os, sys, time
from vitline.infra.runs import attempt as driver, handle
from vitline.infra.runs.run_state import write_state

handle.LeaseHolder = functools.partial(handle.LeaseHolder, every_s={every_s})
atexit.register(os._exit, 9)  # a handler that would change the exit code

def drive(run, attempt):
    def work(held):
        print("working", flush=True)
{work}
    return driver.run_attempt(run, attempt, work{options})

driver.driver_main("A job.", drive)
"""
FOR_EVER = "        time.sleep(1000)"


@pytest.fixture
def run(tmp_path):
    return open_store(tmp_path / "run")


def take(run):
    return acquire_lease(run, "job-abc", job_state=lambda job: "failed", owner="test").attempt


@pytest.fixture
def attempted(run):
    """attempted(work): the exit code and the state of one attempt in this process."""

    def go(work, **options):
        with joining_ray():
            code = run_attempt(run, take(run), work, **options)
        return code, read_state(run)

    return go


@pytest.fixture
def started(run):
    """started(work): a driver process that has begun to work; `at_work`: its workers had written their state before."""
    processes = []

    def start(work=FOR_EVER, options="", every_s=10, at_work=False):
        code, attempt = JOB.format(work=work, options=options, every_s=every_s), take(run)
        if at_work:
            write_state(run, "running", attempt)
        command = [sys.executable, "-c", code, "--run", run.uri, "--attempt", str(attempt)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "working\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_attempt_is_running_and_then_ends_as_its_work_says(run, attempted):
    seen = []

    def work(held):
        seen.append(read_state(run)["state"])
        return "diverged", {"step": 7}

    code, state = attempted(work)
    assert (seen, code) == (["running"], 3)
    assert {key: state[key] for key in ("state", "attempt", "step")} == {"state": "diverged", "attempt": 1, "step": 7}


@pytest.mark.parametrize("expected", [(), (ValueError,)])
def test_an_error_becomes_one_sentence_and_a_traceback_unless_it_is_expected(attempted, caplog, monkeypatch, expected):
    monkeypatch.setenv("VITLINE_S3_SECRET_KEY", "my-own-secret")

    def work(held):
        raise ValueError("two\n  lines, my-own-secret")

    code, state = attempted(work, expected=expected)
    assert (code, state["state"], state["reason"]) == (1, "failed", "ValueError: two lines, ***")
    assert ("Traceback" in caplog.text) == (not expected)


def test_an_error_of_ray_is_told_by_its_cause(attempted):
    def work(held):
        error = RuntimeError("a traceback of many lines")
        error.cause = MemoryError("no memory for 3 GiB")
        raise error

    assert attempted(work)[1]["reason"] == "MemoryError: no memory for 3 GiB"


def test_other_versions_than_the_submitters_fail_before_any_work(attempted, monkeypatch):
    monkeypatch.setenv("VITLINE_SUBMITTED_FROM", json.dumps({"python": "2.7"}))
    code, state = attempted(lambda held: pytest.fail("it worked"))
    assert (code, state["state"]) == (1, "failed")
    assert "submitted from python 2.7" in state["reason"]


def test_work_that_follows_a_stop_request_itself_chooses_the_state(run, attempted):
    def work(held):
        request_stop(run, "out_of_time", by="the deadline", attempt=1)
        while not held.stopped():
            time.sleep(0.01)
        return held.stopped(), {"reason": held.stopped_by}

    code, state = attempted(work, ends_when_stopped=False)
    assert (code, state["state"], state["reason"]) == (1, "out_of_time", "the deadline")


def test_an_attempt_that_never_had_the_lease_writes_nothing(run, caplog):
    take(run)
    with joining_ray():
        assert run_attempt(run, 2, lambda held: pytest.fail("it worked")) == 3
    assert run.list() == ["lease.json"]
    assert "attempt 2 lost the lease" in caplog.text


@pytest.mark.parametrize("error", [None, ValueError("late")])
def test_an_attempt_that_loses_its_lease_during_its_work_writes_nothing_more(run, attempted, error):
    def work(held):
        write_state(run, "running", take(run))
        if error:
            raise error
        return "finished", {}

    code, state = attempted(work)
    assert code == 3
    assert (state["state"], state["attempt"]) == ("running", 2)


@pytest.mark.parametrize(
    ("written", "attempt", "ended"),
    [(None, 1, "failed"), ("running", 1, "failed"), ("finished", 1, "finished"), ("finished", 9, "failed")],
)
def test_the_end_that_workers_wrote_counts_more_than_what_the_driver_found(run, attempted, written, attempt, ended):
    def work(held):
        assert read_state(run) is None
        if written:
            write_state(run, written, attempt)
        return "failed", {"reason": "the workers ended without a result"}

    code, state = attempted(work, workers_write_state=True)
    assert (code, state["state"], state["attempt"]) == (0 if ended == "finished" else 1, ended, 1)
    assert ("reason" in state) == (ended == "failed")


def test_the_process_ends_with_the_code_of_the_state_whatever_handlers_wait(run, started):
    assert started("        return 'finished', {'answer': 42}").wait(120) == 0
    assert read_state(run)["answer"] == 42


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ", workers_write_state=True"])
@pytest.mark.parametrize(("reason", "code"), [("preempted", 75), ("cancelled", 143)])
def test_a_stop_request_ends_the_process_at_once(run, started, options, reason, code):
    job = started(options=options)
    request_stop(run, reason, by="someone", attempt=1)
    assert job.wait(120) == code
    state = read_state(run)
    assert (state["state"], state["attempt"], state["reason"]) == (reason, 1, "someone")


def test_sigterm_preempts(run, started):
    job = started(options=", grace_s=1000")
    job.terminate()
    assert job.wait(120) == 75
    assert (read_state(run)["state"], read_state(run)["reason"]) == ("preempted", "SIGTERM")


def test_workers_that_are_at_work_follow_the_stop_request_themselves(run, started):
    work = """
        while not held.stopped():
            time.sleep(0.05)
        time.sleep(1.5)  # in which a driver would have ended that does not leave it to its workers
        write_state(run, "cancelled", attempt, step=3)
        return "failed", {}
"""
    job = started(work, ", workers_write_state=True", at_work=True)
    request_stop(run, "cancelled", by="someone", attempt=1)
    assert job.wait(120) == 143
    assert read_state(run)["step"] == 3


def test_a_stop_request_ends_the_process_while_its_workers_wait_to_be_started_again(run, started):
    """They have been at work, and nobody but the driver is there to follow the request."""
    job = started(options=", workers_write_state=True, workers_wait=lambda: True", at_work=True)
    request_stop(run, "preempted", by="someone", attempt=1)
    assert job.wait(120) == 75
    assert (read_state(run)["state"], read_state(run)["reason"]) == ("preempted", "someone")


@pytest.mark.slow
@pytest.mark.parametrize("options", [", workers_write_state=True", ", ends_when_stopped=False"])
def test_a_job_that_hangs_ends_soon_after_the_deadline_of_its_flow(run, started, monkeypatch, options):
    """Its flow process may have died: nobody else ends the job."""
    monkeypatch.setenv("VITLINE_TIME_LEFT_S", "0.2")
    job = started(options=options + ", grace_s=0.2", at_work=True)
    assert job.wait(120) == 1
    state = read_state(run)
    assert (state["state"], state["attempt"]) == ("out_of_time", 1)
    assert state["reason"].endswith("has passed, and the job did not follow the stop request within 0.2 s")


def test_a_job_that_finishes_in_the_moment_of_its_deadline_has_finished(run, monkeypatch):
    """The worker's state arrives after the driver has found the job at work, and before the driver writes that it hung."""
    attempt, codes = take(run), []
    write_state(run, "running", attempt)
    monkeypatch.setattr(module, "_MARGIN_S", 0.0)
    swap = run.compare_and_swap

    def overtaken(key, data, tag):
        if key == "state.json":
            monkeypatch.undo()
            write_state(open_store(run.uri), "finished", attempt, step=20)
        return swap(key, data, tag)

    monkeypatch.setattr(run, "compare_and_swap", overtaken)
    left = threading.Event()
    leave = lambda code: (codes.append(code), left.set())  # noqa: E731
    with guarded(Run(run, attempt), lambda: False, left_s=0.0, grace_s=0.0, leave=leave):
        assert left.wait(120)
    assert (codes, read_state(run)["state"], read_state(run)["step"]) == ([0], "finished", 20)


def test_a_job_that_has_lost_its_lease_at_its_deadline_ends_with_the_code_and_one_line(run, monkeypatch, caplog):
    attempt, codes, left = take(run), [], threading.Event()
    monkeypatch.setattr(module, "_MARGIN_S", 0.0)
    take(run)
    leave = lambda code: (codes.append(code), left.set())  # noqa: E731
    with guarded(Run(run, attempt), lambda: False, left_s=0.0, grace_s=0.0, leave=leave):
        assert left.wait(120)
    assert codes == [LEASE_LOST_EXIT_CODE]
    assert "attempt 1 lost the lease" in caplog.text
    assert "Traceback" not in caplog.text
    assert not run.exists("state.json")


def test_a_job_that_follows_its_deadline_saves_first(run, started, monkeypatch):
    monkeypatch.setenv("VITLINE_TIME_LEFT_S", "0.2")
    work = """
        while not held.stopped():
            time.sleep(0.05)
        write_state(run, held.stopped(), attempt, step=3, reason=held.stopped_by)
        return "failed", {}
"""
    assert started(work, ", workers_write_state=True, grace_s=1000", at_work=True).wait(120) == 1
    state = read_state(run)
    assert (state["state"], state["step"]) == ("out_of_time", 3)
    assert "deadline of the flow run" in state["reason"]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_whose_lease_was_taken_ends_and_writes_nothing(run, started, stopped):
    """Its next heartbeat finds the loss, or the check before it writes the state that a stop request asks for."""
    job = started(every_s=1000 if stopped else 0.2)
    before = read_state(run)
    assert take(run) == 2
    if stopped:
        request_stop(run, "preempted", by="someone", attempt=1)
    assert job.wait(120) == 3
    assert read_state(run) == before


@pytest.mark.parametrize(("taken", "ended"), [(False, ("cancelled", 1)), (True, ("running", 2))])
def test_a_cancelled_process_that_gets_sigterm_writes_its_state_unless_its_lease_was_taken(run, started, taken, ended):
    job = started(options=", ends_when_stopped=False, grace_s=1000", every_s=1000)
    if taken:
        write_state(run, "running", take(run))
    request_stop(run, "cancelled", by="someone", attempt=1)
    job.terminate()
    assert job.wait(120) == 143
    assert (read_state(run)["state"], read_state(run)["attempt"]) == ended
