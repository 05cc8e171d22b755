"""What reconcile ends and what it leaves alone, with a fake Ray and a fake Prefect."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vitline.flows.catalog.records import AttemptRecord, Origin, PipelineRecord, read_pipeline, write_pipeline
from vitline.flows.forms.forms import ReconcileRequest
from vitline.flows.ops import reconcile as module
from vitline.flows.ops.flow_runs import SeenFlowRun
from vitline.flows.ops.reconcile import reconcile
from vitline.flows.runs import stage
from vitline.flows.runs.services import ConsoleObserver, Services
from vitline.flows.to_mlflow import outbox
from vitline.flows.to_mlflow.child import SenderChild, SyncReport
from vitline.infra.ray_jobs import Job, JobServerAway
from vitline.infra.runs import liveness
from vitline.infra.runs.lease import LeaseHolder, acquire_lease, read_lease
from vitline.infra.runs.liveness import read_heartbeats
from vitline.infra.runs.run_state import read_state, request_stop, write_state
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

KEY, JOB, FLOW = "birds-0123456789ab", "birds-0123456789ab-a1", "0198f3a2-0000-7000-8000-000000000001"
PIPELINE = "nightly-0123456789ab"
HOUR = 3600.0


class FakeRay:
    """The jobs that a test puts here; stopping one ends it."""

    def __init__(self):
        self.jobs, self.known, self.address = self, {}, "http://cluster"

    def put(self, job_id=JOB, state="running", exit_code=None, ended_ago=HOUR, **metadata):
        at = None if state in ("running", "pending") else time.time() - ended_ago
        job = Job(id=job_id, state=state, exit_code=exit_code, message="", metadata=metadata, ended_at=at)
        self.known[job_id] = job

    def list(self, metadata=None, every_root=False):
        wanted = (metadata or {}).items()
        return [job for job in self.known.values() if wanted <= job.metadata.items()]

    def find(self, job_id):
        return self.known.get(job_id)

    def stop(self, job_id, wait_s):
        self.put(job_id, "stopped", ended_ago=0, **self.known[job_id].metadata)
        return self.known[job_id]


UNFINISHED = ("PENDING", "RUNNING", "CANCELLING", "PAUSED")


class FakePrefect:
    def __init__(self):
        self.runs, self.lines, self.ended, self.messages, self.resumed = {}, {}, {}, {}, []

    def put(self, state, ago=HOUR, id=FLOW, **more):
        self.runs[id] = SeenFlowRun(id, f"run {id[-1]}", state, time.time() - ago, **more)

    def unfinished(self):
        return [run for run in self.runs.values() if run.state in UNFINISHED]

    def find(self, ids):
        return {id: run for id, run in self.runs.items() if id in ids}

    def last_line(self, id):
        return self.lines.get(id)

    def resume(self, id):
        self.resumed.append(id)

    def end(self, id, state, message):
        assert self.runs[id].state in UNFINISHED
        self.ended[id] = state
        self.messages[id] = message
        self.runs[id] = self.runs[id]._replace(
            state={"finished": "COMPLETED", "cancelled": "CANCELLED"}.get(state, "CRASHED")
        )


class Place:
    """A root, a cluster and a Prefect; `reconcile()` returns the findings."""

    def __init__(self, root):
        self.uri, self.root, self.ray, self.prefect = root, open_store(root), FakeRay(), FakePrefect()
        self.run = self.root.child(f"runs/{KEY}")

    def reconcile(self, mlflow=None, patient=False, dead_before=0.0, **request):
        settings = Settings(root=self.uri, ray_address="http://cluster", mlflow_tracking_uri=mlflow)
        services = Services(settings, self.ray, ConsoleObserver(), SenderChild(settings, Path()))
        options = {"patient": patient, "dead_before": dead_before}
        return reconcile(ReconcileRequest.model_validate(request), services, self.prefect, **options)

    def attempt(self, silent_s=HOUR, state="running", flow_run=None, page=None):
        """An attempt that has claimed the run and whose last heartbeat was `silent_s` seconds ago."""
        self.run.write_json("config.json", {"run_key": KEY})
        lease = acquire_lease(self.run, KEY, job_state=lambda job: "failed", owner="someone", page=page)
        if flow_run:
            self.record_attempt(lease, flow_run)
        self.silence(self.run, silent_s)
        if state:
            write_state(self.run, state, lease.attempt)
        return lease

    def record_attempt(self, lease, flow_run):
        origin = Origin(flow_run_id=flow_run, flow_run_url=f"http://pages/runs/flow-run/{flow_run}")
        at = time.time() - HOUR + lease.attempt
        names = {"run_key": KEY, "attempt": lease.attempt, "job_id": lease.job_id}
        record = AttemptRecord(**names, ray_address="", owner="", started_at=at, origin=origin)
        self.run.write_json(f"attempts/a{lease.attempt}.json", record.model_dump(mode="json"))

    def silence(self, store, silent_s):
        store.write_json("lease.json", {**read_lease(store).model_dump(), "heartbeat": time.time() - silent_s})

    def pipeline(self, silent_s=HOUR, flow_run_id=FLOW, **record):
        at = {"started_at": time.time() - silent_s, "updated_at": time.time() - silent_s}
        origin = Origin(flow_run_id=flow_run_id)
        write_pipeline(
            self.root, PipelineRecord(key=PIPELINE, name="nightly", request={}, origin=origin, **(at | record))
        )
        store = self.root.child(f"leases/{PIPELINE}")
        acquire_lease(store, PIPELINE, job_state=lambda job: "failed", owner="someone")
        self.silence(store, silent_s)

    def beat(self, ago, id=FLOW):
        self.root.write_json(f"flow-runs/{id}.json", {"heartbeat": time.time() - ago})

    def content(self):
        kept = [key for key in self.root.list() if not key.startswith("leases/reconcile/")]
        return {key: self.root.read(key) for key in kept}


@pytest.fixture
def place(root, monkeypatch):
    monkeypatch.setattr("vitline.infra.runs.lease.job_id_of", lambda run, key, attempt: f"{key}-a{attempt}")
    monkeypatch.setattr(stage, "CANCEL_PATIENCE_S", 0.0)  # no real job would stop by itself
    monkeypatch.setattr(liveness, "FLOW_LEASE_S", 0.05)
    monkeypatch.setattr(stage, "POLL_S", 0.01)
    monkeypatch.setattr(liveness, "WATCH_S", 0.05)
    monkeypatch.setattr(liveness, "FROZEN_WATCH_S", 0.1)
    monkeypatch.setattr(module, "FROZEN_GRACE_S", 0.0)
    return Place(root)


@pytest.mark.parametrize(
    ("job", "stop", "ends_as"),
    [
        ({"state": "failed", "exit_code": -9}, None, "failed"),
        ({"state": "failed", "exit_code": 75}, None, "preempted"),
        ({"state": "stopped"}, None, "cancelled"),
        ({"state": "succeeded", "exit_code": 0}, None, "failed"),
        ({"state": "stopped"}, "out_of_time", "out_of_time"),
        (None, None, "preempted"),
        (None, "cancelled", "cancelled"),
    ],
)
def test_a_run_whose_attempt_died_silently_gets_a_reconciled_state(place, job, stop, ends_as):
    attempt = place.attempt().attempt
    if job:
        place.ray.put(**job)
    if stop:
        request_stop(place.run, stop, by="someone", attempt=attempt)
    (finding,) = place.reconcile()
    assert (finding.subject, finding.action) == (f"run {KEY}", f"attempt 1 is {ends_as}")
    assert read_state(place.run)["state"] == ends_as
    assert place.reconcile() == []


def test_an_attempt_that_died_before_its_first_state_gets_a_reconciled_state(place):
    place.attempt(state=None)
    place.reconcile()
    assert read_state(place.run)["state"] == "preempted"


@pytest.mark.parametrize(
    ("job", "silent_s"),
    [
        ({"state": "running"}, 800),  # the store is away or the node swaps, but Ray reports the job as running
        ({"state": "pending"}, HOUR),
        ({"state": "failed", "ended_ago": 60}, HOUR),  # the flow that follows it still has to write its state
    ],
)
def test_a_run_that_one_engine_reports_as_alive_is_left_alone(place, job, silent_s):
    place.attempt(silent_s)
    place.ray.put(**job)
    before = place.content()
    assert [finding for finding in place.reconcile() if "left alone until" not in finding.action] == []
    assert place.content() == before


def test_what_was_killed_a_moment_ago_is_reported_and_ended_once_it_was_silent_for_long(place, monkeypatch):
    """A killed worker takes its flow run along: reconcile may not say that there is nothing."""
    place.attempt(silent_s=240)
    place.prefect.put("RUNNING")
    place.beat(240)
    before = place.content()
    found = {finding.subject: finding for finding in place.reconcile()}
    assert found.keys() == {f"run {KEY}", "flow run run 1"}
    assert all("without a sign of life since" in finding.problem for finding in found.values())
    assert all("left alone until" in finding.action for finding in found.values())
    assert place.content() == before

    waited = []

    def sleep(services, seconds):
        if seconds > liveness.WATCH_S:
            waited.append(seconds)
            place.attempt(silent_s=301)
            place.beat(301)

    monkeypatch.setattr(Services, "wait", sleep)
    place.reconcile(patient=True)
    (seconds,) = waited
    assert 31 < seconds <= 61  # of 300 s and one more, less 240 s and what this test takes
    assert place.prefect.ended == {FLOW: "preempted"}


@pytest.mark.parametrize(
    ("before", "after"), [("running", "preempted"), (None, "preempted"), ("finished", "finished"), ("failed", "failed")]
)
def test_a_job_whose_driver_has_been_silent_for_long_is_stopped(place, before, after):
    place.attempt(state=before)
    place.ray.put()
    (finding,) = place.reconcile()
    assert finding.subject == f"job {JOB}"
    assert "its driver has been silent since" in finding.problem
    assert place.ray.known[JOB].state == "stopped"
    assert read_state(place.run)["state"] == after
    assert place.reconcile() == []


def test_a_job_that_does_not_end_is_stopped_again(place, monkeypatch):
    def still_running(job_id, wait_s):
        raise TimeoutError("job is still running.")

    place.attempt()
    place.ray.put()
    with monkeypatch.context() as patch:
        patch.setattr(place.ray, "stop", still_running)
        (finding,) = place.reconcile()
    assert finding.action == f"not done: job {JOB} is still running; the next reconcile stops it again."
    assert [finding.action for finding in place.reconcile()] == ["stopped"]
    assert read_state(place.run)["state"] == "preempted"


DRIVER = """
import sys
from vitline.infra.runs.lease import LeaseHolder
from vitline.infra.storage import open_store

with LeaseHolder(open_store(sys.argv[1]), 1, every_s=0.05):
    print("working", flush=True)
    sys.stdin.read()
"""


class RealJob(FakeRay):
    """A job whose driver is a process; Ray shows it as running until it is stopped, by SIGTERM and then SIGKILL."""

    def __init__(self, run):
        super().__init__()
        command = [sys.executable, "-c", DRIVER, run.uri]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process.stdout.readline()
        self.put()

    def stop(self, job_id, wait_s):
        self.process.terminate()
        self.process.kill()
        self.process.wait()
        return super().stop(job_id, wait_s)


@pytest.mark.slow
def test_a_driver_that_stands_still_is_ended_and_the_next_attempt_can_start(place, monkeypatch):
    """The clocks are left out: what counts is that its counter moved, or stood still, while reconcile watched it."""
    monkeypatch.setattr(liveness, "FROZEN_S", -HOUR)
    monkeypatch.setattr(liveness, "FROZEN_WATCH_S", 5.0)
    place.attempt(silent_s=0)
    place.ray = RealJob(place.run)
    assert place.reconcile(quiet_minutes=0) == []
    assert place.ray.process.poll() is None

    place.ray.process.send_signal(signal.SIGSTOP)
    (finding,) = place.reconcile(quiet_minutes=0)
    assert finding.subject == f"job {JOB}"
    assert place.ray.process.returncode == -signal.SIGKILL
    assert read_state(place.run)["reason"] == stage.DRIVER_FROZEN
    lease = acquire_lease(place.run, KEY, job_state=lambda job: place.ray.find(job).state, owner="the next night")
    assert lease.attempt == 2


def test_a_heartbeat_within_a_minute_counts_whatever_quiet_minutes_is(place):
    place.attempt(silent_s=30)
    assert place.reconcile(quiet_minutes=0) == []


@pytest.mark.parametrize("ended", ["finished", "failed", "cancelled", "diverged"])
def test_ended_runs_and_pipelines_never_change(place, ended):
    place.attempt(state=ended)
    place.ray.put(state="stopped")
    place.pipeline(state=ended)
    place.prefect.put("CANCELLED")
    before = place.content()
    assert place.reconcile() == []
    assert place.content() == before


def test_the_end_of_one_attempt_does_not_end_the_next(place):
    place.attempt()
    place.attempt(silent_s=0, state=None)
    place.ray.put(state="failed", exit_code=-9)
    assert place.reconcile() == []


def test_a_heartbeat_in_the_last_moment_keeps_the_state(place, monkeypatch):
    place.attempt()
    write_reconciled = module.write_reconciled

    def late(run, *rest):
        place.silence(run, 0)
        write_reconciled(run, *rest)

    monkeypatch.setattr(module, "write_reconciled", late)
    (finding,) = place.reconcile()
    assert "not done: the lease or state of this run changed meanwhile" in finding.action
    assert read_state(place.run)["state"] == "running"


@pytest.mark.parametrize("ago", [0, HOUR])
def test_a_job_that_outlived_its_cancelled_flow_run_is_stopped(place, ago):
    place.attempt(silent_s=0)
    place.ray.put(run_key=KEY, flow_run_id=FLOW)
    place.prefect.put("CANCELLED", ago)
    (finding,) = place.reconcile()
    assert finding.subject == f"job {JOB}"
    assert place.ray.find(JOB).state == "stopped"
    assert read_state(place.run)["state"] == "cancelled"
    assert place.reconcile() == []


def test_a_cancellation_without_a_process_ends_job_run_and_flow_run(place):
    place.attempt(silent_s=0)
    place.ray.put(run_key=KEY, flow_run_id=FLOW)
    place.prefect.put("CANCELLING", 60)
    place.beat(HOUR)
    assert ["left alone until" in finding.action for finding in place.reconcile()] == [True]
    place.prefect.put("CANCELLING", HOUR)
    assert [finding.subject for finding in place.reconcile()] == [f"job {JOB}", "flow run run 1"]
    assert (read_state(place.run)["state"], place.prefect.ended) == ("cancelled", {FLOW: "cancelled"})
    assert read_heartbeats(place.root) == {}
    assert place.reconcile() == []


@pytest.mark.parametrize("ended", ["finished", "failed", "out_of_time"])
def test_a_dead_flow_run_ends_as_its_run_did(place, ended):
    place.attempt(state=ended, flow_run=FLOW)
    place.ray.put(state="succeeded", run_key=KEY, flow_run_id=FLOW)
    place.prefect.put("RUNNING")
    place.beat(HOUR)
    place.reconcile()
    assert place.prefect.ended == {FLOW: ended}


def test_a_dead_flow_run_ends_as_its_run_did_whose_job_ray_has_lost(place):
    """It says what the run did, which another Ray knows nothing of."""
    place.attempt(flow_run=FLOW)
    place.prefect.put("RUNNING")
    place.beat(HOUR)
    dry = place.reconcile(dry_run=True)
    assert any("Ray does not know its job" in finding.action for finding in dry if finding.subject.startswith("flow"))
    place.reconcile()
    assert place.prefect.ended == {FLOW: "preempted"}
    assert place.prefect.messages[FLOW].startswith(f"{KEY}: Ray does not know its job")


@pytest.mark.parametrize("adopted", [True, False])
def test_a_dead_flow_run_whose_run_goes_on_elsewhere_ends(place, adopted):
    """The same request was made again: another flow run follows its job, or has started the next attempt."""
    other = FLOW[:-1] + "2"
    if adopted:
        place.attempt(silent_s=0, flow_run=other, page=f"http://pages/runs/flow-run/{FLOW}")
        place.ray.put(run_key=KEY, flow_run_id=FLOW)
    else:
        place.attempt(flow_run=FLOW)
        place.ray.put(state="failed", run_key=KEY, flow_run_id=FLOW)
        place.attempt(silent_s=0, flow_run=other)
        place.ray.put(f"{KEY}-a2", run_key=KEY, flow_run_id=other)
    place.prefect.put("RUNNING")
    place.prefect.put("RUNNING", id=other)
    place.beat(HOUR)
    place.beat(0, id=other)
    assert [finding.subject for finding in place.reconcile()] == ["flow run run 1"]
    assert place.prefect.ended == {FLOW: "preempted"}
    assert "continues in another flow run" in place.prefect.messages[FLOW]
    place.prefect.put("CANCELLED")
    assert place.reconcile() == []
    assert all(job.state != "stopped" for job in place.ray.known.values())


def test_a_job_without_its_flow_keeps_running_and_is_reported(place):
    place.attempt(silent_s=0)
    place.ray.put(run_key=KEY, flow_run_id=FLOW)
    place.prefect.put("RUNNING")
    place.beat(HOUR)
    for state in ("RUNNING", "CRASHED", None):
        if state:
            place.prefect.put(state)
        else:
            place.prefect.runs.clear()
        (finding,) = place.reconcile()
        assert "active without a flow" in finding.problem
        assert "left running" in finding.action
    assert (place.prefect.ended, place.ray.find(JOB).state) == ({}, "running")


@pytest.mark.parametrize(
    ("state", "beat_ago", "line_ago", "more"),
    [
        ("RUNNING", 20, None, {}),
        ("CANCELLING", 20, None, {}),  # its process carries it out
        ("RUNNING", None, 20, {}),  # it has not written its first heartbeat yet, or its store is away
        ("PENDING", None, None, {"awaits_infrastructure": True}),
    ],
)
def test_a_flow_run_with_any_sign_of_life_is_left_alone(place, state, beat_ago, line_ago, more):
    place.prefect.put(state, **more)
    if beat_ago is not None:
        place.beat(beat_ago)
    if line_ago is not None:
        place.prefect.lines[FLOW] = time.time() - line_ago
    assert place.reconcile() == []


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_flow_run_that_died_before_its_first_job_ends_as_crashed(place, state):
    place.prefect.put(state)
    place.reconcile()
    assert place.prefect.ended == {FLOW: "preempted"}


def test_subflows_end_with_their_parent(place):
    child, orphan, gone = FLOW[:-1] + "2", FLOW[:-1] + "3", FLOW[:-1] + "4"
    place.prefect.put("CANCELLING")
    place.prefect.put("RUNNING", id=child, parent=FLOW)
    place.prefect.put("CRASHED", id=gone)
    place.prefect.put("RUNNING", id=orphan, parent=gone)
    place.reconcile()
    assert place.prefect.ended == {FLOW: "cancelled", child: "cancelled", orphan: "preempted"}


def test_a_suspended_run_is_left_alone_and_its_suspended_parts_end_with_it(place):
    """It has no process while it waits to be resumed, by a person or, after its limit, by reconcile. If it is cancelled, Prefect ends
    only the parent."""
    part = FLOW[:-1] + "2"
    place.prefect.put("PAUSED")
    place.prefect.put("PAUSED", id=part, parent=FLOW)
    place.reconcile()
    assert (place.prefect.ended, place.prefect.resumed) == ({}, [])
    place.prefect.put("PAUSED", resume_at=time.time() + 60)
    place.reconcile()
    assert place.prefect.resumed == []
    place.prefect.put("PAUSED", resume_at=time.time() - 60)
    assert [finding.action for finding in place.reconcile()] == ["resumed"]
    assert (place.prefect.ended, place.prefect.resumed) == ({}, [FLOW])
    place.prefect.put("FAILED")
    place.reconcile()
    assert place.prefect.ended == {part: "preempted"}


def test_after_a_restart_of_the_stack_what_lived_before_it_is_ended_and_nothing_else(place):
    """A stack that went down took all its processes along, however recent their heartbeats are."""
    other, began = FLOW[:-1] + "2", time.time() - 5
    place.attempt(silent_s=10, flow_run=FLOW)
    place.prefect.put("RUNNING", ago=60)
    place.beat(10)
    place.prefect.put("RUNNING", ago=1, id=other)  # the new worker has just started it
    place.reconcile(dead_before=began)
    assert place.prefect.ended == {FLOW: "preempted"}
    assert read_state(place.run)["state"] == "preempted"


def test_a_pipeline_without_a_process_ends_and_so_does_its_flow_run(place):
    place.pipeline()
    place.prefect.put("RUNNING")
    place.beat(HOUR)
    place.reconcile()
    record = read_pipeline(place.root, PIPELINE)
    assert record.state == "preempted"
    assert "the same request resumes it" in record.reason
    assert place.prefect.ended == {FLOW: "preempted"}


def test_a_pipeline_of_a_cancelled_flow_run_is_cancelled(place):
    place.pipeline()
    place.prefect.put("CANCELLED")
    place.reconcile()
    assert read_pipeline(place.root, PIPELINE).state == "cancelled"


def test_a_pipeline_with_a_sign_of_life_is_left_alone(place):
    place.pipeline(silent_s=20)
    assert place.reconcile() == []
    place.pipeline(flow_run_id=None)
    place.ray.put(run_key=KEY, pipeline=PIPELINE)
    assert place.reconcile() == []
    place.ray.known.clear()
    place.pipeline()
    place.beat(20)
    assert place.reconcile() == []
    assert read_pipeline(place.root, PIPELINE).state == "running"


@pytest.mark.parametrize("ahead_s", [10.0, 30 * HOUR])
def test_heartbeats_of_the_dead_that_lie_ahead_of_this_clock_keep_nothing_alive(place, ahead_s):
    """The clock of their machine was ahead, or this one was set back: the watch decides."""
    place.attempt(silent_s=-ahead_s)
    place.pipeline(silent_s=-ahead_s)
    place.prefect.put("RUNNING")
    place.beat(-ahead_s)
    place.reconcile()
    assert read_state(place.run)["state"] == read_pipeline(place.root, PIPELINE).state == "preempted"
    assert place.prefect.ended == {FLOW: "preempted"}


def test_times_of_ray_and_prefect_that_lie_far_ahead_of_this_clock_keep_nothing_at_work(place):
    other = FLOW[:-1] + "2"
    place.attempt(silent_s=-30 * HOUR)
    place.ray.put(state="failed", exit_code=75, ended_ago=-30 * HOUR)
    place.prefect.put("CANCELLING", ago=-30 * HOUR)
    place.prefect.put("RUNNING", ago=-30 * HOUR, id=other)
    place.prefect.lines[other] = time.time() + 30 * HOUR
    place.reconcile()
    assert read_state(place.run)["state"] == "preempted"
    assert place.prefect.ended == {FLOW: "cancelled", other: "preempted"}


def test_times_of_ray_and_prefect_that_lie_just_ahead_of_this_clock_are_recent(place):
    place.attempt()
    place.ray.put(state="failed", exit_code=75, ended_ago=-5)
    place.prefect.put("RUNNING", ago=-5)
    before = place.content()
    assert place.reconcile() == []
    assert (place.content(), place.prefect.ended) == (before, {})


@pytest.mark.parametrize("dry_run", [True, False])
def test_heartbeats_that_are_old_by_the_clock_but_move_keep_everything_at_work(place, monkeypatch, dry_run):
    """A clock that is an hour ahead, or a laptop that was suspended for an hour: reconcile may be the first to wake up."""
    silent_s = iter(range(3600, 0, -1))

    def everything_beats():
        for store in (place.run, place.root.child(f"leases/{PIPELINE}")):
            LeaseHolder(store, 1).beat()
            place.silence(store, next(silent_s))
        place.beat(next(silent_s))

    place.attempt()
    place.pipeline()
    place.prefect.put("RUNNING")
    place.beat(HOUR)
    monkeypatch.setattr(ConsoleObserver, "check", lambda self: everything_beats())
    assert place.reconcile(dry_run=dry_run) == []
    assert read_state(place.run)["state"] == read_pipeline(place.root, PIPELINE).state == "running"
    assert place.prefect.ended == {}


def test_a_dry_run_reports_everything_and_changes_nothing(place):
    place.attempt()
    place.pipeline()
    place.ray.put("other-a1", run_key="other", flow_run_id=FLOW)
    place.prefect.put("CANCELLING")
    before = place.content()
    findings = place.reconcile(dry_run=True)
    assert {finding.subject.split()[0] for finding in findings} == {"job", "run", "pipeline", "flow"}
    assert all(finding.action.startswith("would be: ") for finding in findings)
    assert (place.content(), place.prefect.ended, place.ray.find("other-a1").state) == (before, {}, "running")


def test_a_run_that_cannot_be_read_is_reported_and_stops_no_other(place):
    """Which records make a run unreadable: tests/flows/test_odd_records.py."""
    place.attempt()
    other = place.root.child("runs/odd-0123456789ab")
    other.write_json("config.json", {"run_key": "odd-0123456789ab"})
    other.write("state.json", b"{}")
    findings = {finding.subject: finding for finding in place.reconcile()}
    assert findings.pop("run odd-0123456789ab").action == "left as it is"
    assert [*findings] == [f"run {KEY}"]
    assert other.read("state.json") == b"{}"
    assert read_state(place.run)["state"] == "preempted"


@pytest.mark.parametrize(
    ("key", "subject", "others"),
    [
        (f"runs/{KEY}/lease.json", f"run {KEY}", {"pipeline", "flow"}),
        (f"runs/{KEY}/stop.json", f"run {KEY}", {"pipeline", "flow"}),
        (f"leases/{PIPELINE}/lease.json", f"pipeline {PIPELINE}", {"run"}),
        (f"pipelines/{PIPELINE}.json", f"pipeline {PIPELINE}", {"run"}),
        (f"flow-runs/{FLOW}.json", f"flow run {FLOW}", {"run"}),
    ],
)
def test_a_record_that_becomes_unreadable_during_the_watch_stops_no_other(place, monkeypatch, key, subject, others):
    place.attempt()
    place.pipeline()
    place.prefect.put("RUNNING")
    place.beat(HOUR)
    monkeypatch.setattr(ConsoleObserver, "check", lambda self: place.root.write(key, b"{}"))
    findings = place.reconcile()
    (unreadable,) = [finding for finding in findings if finding.subject == subject]
    assert (
        f"{place.root.uri_of(key)} is not a record that this version of vitline reads"
        in unreadable.problem + unreadable.action
    )
    assert {finding.subject.split()[0] for finding in findings if finding != unreadable} == others
    assert place.root.read(key) == b"{}"
    assert (read_state(place.run)["state"] == "preempted") == ("run" in others)
    assert bool(place.prefect.ended) == ("flow" in others)


def test_a_flow_run_or_pipeline_that_cannot_be_read_is_left_alone(place):
    place.root.write_json(f"pipelines/{PIPELINE}.json", {})
    place.prefect.put("RUNNING")
    place.root.write_json(f"flow-runs/{FLOW}.json", {"beat_at": 0})
    place.root.write_json("ops/synced.json", {})
    before = place.content()
    findings = place.reconcile()
    assert [(finding.subject, finding.action) for finding in findings] == [
        (f"flow run {FLOW}", "left as it is"),
        (f"pipeline {PIPELINE}", "left as it is"),
    ]
    assert "it has no 'heartbeat'" in findings[0].problem
    assert (place.content(), place.prefect.ended) == (before, {})


def test_fields_of_a_newer_version_are_kept(place):
    place.pipeline()
    newer = {"cost": 3, "origin": {"flow_run_id": FLOW, "team": "birds"}}
    path = f"pipelines/{PIPELINE}.json"
    place.root.write_json(path, place.root.read_json(path) | newer)
    place.reconcile()
    record = place.root.read_json(path)
    assert (record["state"], record["cost"], record["origin"]["team"]) == ("preempted", 3, "birds")


def test_a_failed_repair_stops_no_other(place, monkeypatch):
    place.attempt()
    place.ray.put("other-a1", run_key="other", flow_run_id=FLOW)
    place.prefect.put("CANCELLED")

    def away(job_id, wait_s):
        raise JobServerAway("the job server is away")

    monkeypatch.setattr(place.ray, "stop", away)
    job, run = place.reconcile()
    assert job.action == "not done: the job server is away"
    assert run.action == "attempt 1 is preempted"


def test_nothing_is_changed_if_an_engine_does_not_answer(place, monkeypatch):
    place.attempt()
    before = place.content()

    def away():
        raise JobServerAway("the job server is away")

    monkeypatch.setattr(place.ray, "list", away)
    with pytest.raises(JobServerAway):
        place.reconcile()
    assert place.content() == before


def test_mlflow_is_sent_newly_ended_runs_until_it_accepts_them(place, monkeypatch):
    requested, left = [], {KEY: "MLflow does not answer"}

    def sync(settings, keys):
        requested.append(keys)
        return SyncReport([] if left else keys, left)

    monkeypatch.setattr(module, "sync_runs", sync)
    place.attempt(state="finished")
    outbox.put(place.root, outbox.OutboxEntry("run", KEY))
    (finding,) = place.reconcile(mlflow="http://mlflow")
    assert finding.action == "not done: MLflow does not answer"
    left = {}
    (finding,) = place.reconcile(mlflow="http://mlflow")
    assert finding == ("MLflow", f"lacked parts of {KEY}", "sent")
    outbox.clear(
        place.root, outbox.OutboxEntry("run", KEY), outbox.read(place.root, outbox.OutboxEntry("run", KEY)).nonce
    )
    assert place.reconcile(mlflow="http://mlflow") == []  # it is sent once more, which says nothing
    place.run.write_json("state.json", {**read_state(place.run), "updated_at": time.time() - 2 * HOUR})
    assert place.reconcile(mlflow="http://mlflow") == []
    assert requested == [[KEY], [KEY], [KEY]]


def test_only_the_schedules_of_reconcile_and_collect_garbage_are_active_by_default():
    from vitline.flows.on_prefect.deploy.registered import starts_by_itself
    from vitline.flows.on_prefect.deployments import DEPLOYMENTS

    scheduled = {d.full_name: d for d in DEPLOYMENTS if d.schedules}
    assert [name for name, d in scheduled.items() if starts_by_itself(d)] == [
        "reconcile/default",
        "collect-garbage/default",
    ]
    collect = scheduled["collect-garbage/default"].form()
    assert (collect["dry_run"], collect["notice_days"]) == (False, 6.5)  # what is deleted was on the page for a week
