"""What a stage does for every way in which a job can end, with a fake cluster that follows a script."""

import contextlib
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitline.flows.catalog.records import AttemptRecord, Origin, attempt_records
from vitline.flows.runs import services, stage, worker_errors
from vitline.flows.runs.services import Cluster, ConsoleObserver, Services, StopRequested
from vitline.flows.runs.stage import StageFailed, run_stage
from vitline.flows.to_mlflow.child import SenderChild
from vitline.infra.config import FrozenConfig, replace
from vitline.infra.provenance import compared_versions
from vitline.infra.ray_jobs import Job, JobLost, JobServerAway
from vitline.infra.runs import liveness
from vitline.infra.runs.attempt import DEADLINE_PASSED
from vitline.infra.runs.lease import LeaseHolder, acquire_lease, job_id_of, read_lease
from vitline.infra.runs.run_state import OUTCOMES, read_state, read_stop, request_stop, write_state
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

KEY = "birds-0123456789ab"


class ScriptedCluster:
    """Each submitted job takes the next line of the script: a final run state, "silent" for a death without one, or an error."""

    def __init__(self, run, *script):
        self.run, self.script = run, list(script)
        self.submitted, self.stopped, self.messages, self.ended = [], [], [], {}
        self.jobs = self
        self.restarts = 0
        self.address, self.python = "http://cluster", "python"

    def restart(self):
        self.restarts += 1

    def submit(self, job_id, command, env, metadata):
        self.submitted.append(SimpleNamespace(id=job_id, command=command, env=env, metadata=metadata))

    def follow(self, job_id, on_poll, poll_s):
        on_poll(None)
        line = self.script.pop(0)
        if isinstance(line, Exception):
            raise line
        attempt = int(job_id.rpartition("-a")[2])
        code = -9 if line == "silent" else OUTCOMES[line].exit_code
        if line != "silent":
            reasons = {"failed": "no disk left", "out_of_time": f"{DEADLINE_PASSED}.", "preempted": "to make room"}
            write_state(self.run, line, attempt, **({"reason": reasons[line]} if line in reasons else {"step": 7}))
        self.ended[job_id] = Job(id=job_id, state="failed" if code else "succeeded", exit_code=code, message="")
        return self.ended[job_id]

    def find(self, job_id):
        return self.ended.get(job_id)

    def list(self, metadata=None, every_root=False):
        return list(self.ended.values())

    def page(self, job_id):
        return f"http://cluster/{job_id}"

    def stop(self, job_id, wait_s):
        self.stopped.append(job_id)

    def logs(self, job_id):
        return "".join(f"line {n}\n" for n in range(40))


class FakeObserver(ConsoleObserver):
    """An observer that keeps its messages; `check` is what a test puts there."""

    def __init__(self, messages, check=lambda: None):
        self.say, self.check = messages.append, check

    def stage(self, title):
        return contextlib.nullcontext(lambda progress: None)


@pytest.fixture
def run(root):
    return open_store(root).child(f"runs/{KEY}")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(stage, "POLL_S", 0.01)
    monkeypatch.setattr(stage, "LIVING_S", 0.1)


def root_of(run):
    return run.uri.removesuffix(f"/runs/{KEY}")


class Spec(FrozenConfig):
    run_key: str = KEY


def run_with_script(
    run,
    cluster,
    check=lambda: None,
    lease_timeout_s=0.05,
    grace_s=0.05,
    output=lambda state: True,
    progress=lambda: None,
    kept=dict,
):
    settings = Settings(root=root_of(run), mlflow_tracking_uri=None)
    messages = cluster.messages if cluster else []
    return run_stage(
        Services(settings, cluster, FakeObserver(messages, check), SenderChild(settings, Path())),
        Spec(),
        "vitline.vit.ray_jobs.train_driver",
        title="birds",
        progress=progress,
        output=output,
        kept=kept,
        grace_s=grace_s,
        lease_timeout_s=lease_timeout_s,
        env={"RAY_TRAIN_X": "1"},
    )


def lease(run):
    return acquire_lease(run, KEY, job_state=lambda job: "failed", owner="someone else")


def test_a_finished_run_is_returned_without_a_cluster(run):
    write_state(run, "finished", 3, val_top1=0.5)
    result = run_with_script(run, cluster=None)
    assert result.reused
    assert result.state["val_top1"] == 0.5
    assert read_lease(run) is None


def test_a_job_names_its_run_and_attempt_and_has_a_stop_timeout(run):
    cluster = ScriptedCluster(run, "finished")
    polls = []
    result = run_with_script(run, cluster, check=lambda: polls.append(1), grace_s=10)
    assert (result.reused, result.state["step"], len(polls)) == (False, 7, 1)
    (job,) = cluster.submitted
    assert job.id == job_id_of(run, KEY, 1)
    assert job.command == [
        "python",
        "-P",
        "-m",
        "vitline.vit.ray_jobs.train_driver",
        "--run",
        run.uri,
        "--attempt",
        "1",
    ]
    assert json.loads(job.env.pop("VITLINE_SUBMITTED_FROM")) == compared_versions()
    assert job.env == {"RAY_JOB_STOP_WAIT_TIME_S": "11", "RAY_TRAIN_X": "1"}
    ours = {"run_key": KEY, "lease": job.metadata["lease"], "root": root_of(run), "trigger": "command"}
    assert job.metadata == ours
    (attempt,) = attempt_records(run)
    assert (attempt.job_id, attempt.attempt, attempt.ray_address) == (job.id, 1, "http://cluster")


def test_a_preempted_attempt_is_followed_by_the_next(run):
    cluster = ScriptedCluster(run, "preempted", "preempted", "finished")
    assert run_with_script(run, cluster).state["attempt"] == 3
    assert [job.id for job in cluster.submitted] == [job_id_of(run, KEY, n) for n in (1, 2, 3)]
    assert f"attempt 2 of {KEY} has ended early (to make room); the next one resumes it" in cluster.messages


def test_a_result_says_whether_an_earlier_request_had_begun_it(run):
    cluster = ScriptedCluster(run, "failed", "preempted", "finished")
    with pytest.raises(StageFailed):
        run_with_script(run, cluster)
    assert run_with_script(run, cluster).resumed
    fresh = open_store(f"{root_of(run)}-2").child(f"runs/{KEY}")
    assert not run_with_script(fresh, ScriptedCluster(fresh, "preempted", "finished")).resumed, "one call did all of it"


def test_a_lost_cluster_is_followed_by_the_next_attempt_once_the_heartbeat_is_old(run):
    cluster = ScriptedCluster(run, JobLost("the cluster was replaced"), "finished")
    began = time.time()
    assert run_with_script(run, cluster, lease_timeout_s=0.2).state["attempt"] == 2
    assert time.time() - began >= 0.2


def test_the_progress_of_a_dead_attempt_is_not_shown_for_the_next(run, monkeypatch):
    """Nor for the one after that: each attempt shows only its own steps."""
    cluster, shown = ScriptedCluster(run, "preempted", "finished"), []
    monkeypatch.setattr(FakeObserver, "stage", lambda self, title: contextlib.nullcontext(shown.append))
    seen = iter([{"step": 7}, {"step": 7}, {"step": 9}, {"step": 9}])  # stale, read; stale, read
    run_with_script(run, cluster, progress=lambda: next(seen))
    assert shown == [None, None]
    seen = iter([{"step": 7}, {"step": 8}])
    run.delete("state.json")
    run_with_script(run, ScriptedCluster(run, "finished"), progress=lambda: next(seen))
    assert shown[2:] == [{"step": 8}]


def test_attempts_that_bring_a_new_checkpoint_do_not_count(run):
    """A run of weeks on machines that are taken away: many preemptions and lost clusters, each after some progress."""
    lost = JobLost("the cluster was replaced")
    cluster = ScriptedCluster(run, *["preempted", lost] * 4, "finished")
    kept = lambda: {"checkpoint": 100 * len(cluster.submitted)}  # noqa: E731
    assert run_with_script(run, cluster, kept=kept).state["attempt"] == 9


def test_three_attempts_in_a_row_from_the_same_checkpoint_are_too_many(run):
    """A checkpoint that is lost and saved again is no progress."""
    steps = [0, 100, 100, 200, 200, 100, 200, 300]
    cluster = ScriptedCluster(run, *["preempted"] * 9)
    with pytest.raises(StageFailed, match="without progress 3 times in a row") as failed:
        run_with_script(run, cluster, kept=lambda: {"checkpoint": steps[len(cluster.submitted)]})
    assert failed.value.state == "preempted"
    assert len(cluster.submitted) == 6


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("failed", "ended as failed: no disk left"),
        ("cancelled", "ended as cancelled"),
        ("diverged", "ended as diverged"),
    ],
)
def test_every_other_end_fails_with_state_reason_and_place(run, line, says):
    cluster = ScriptedCluster(run, line, "finished")
    with pytest.raises(StageFailed, match=says) as failed:
        run_with_script(run, cluster)
    assert f"{run.uri}/state.json, job {job_id_of(run, KEY, 1)}" in str(failed.value)
    assert len(cluster.submitted) == 1


def test_a_job_that_dies_silently_fails_in_one_sentence_with_the_end_of_its_log(run):
    with pytest.raises(StageFailed, match="without a result") as failed:
        run_with_script(run, ScriptedCluster(run, "silent"))
    assert "; its log ends with: line 39 (" in str(failed.value)
    assert "\n" not in str(failed.value)


def test_the_state_of_an_earlier_attempt_is_not_used_for_this_one(run):
    cluster = ScriptedCluster(run, "failed")
    with pytest.raises(StageFailed, match="no disk left"):
        run_with_script(run, cluster)
    cluster.script.append("silent")
    with pytest.raises(StageFailed, match="without a result"):
        run_with_script(run, cluster)


def test_a_job_server_that_stays_away_does_not_stop_the_job(run):
    with pytest.raises(JobServerAway, match="may go on"):
        run_with_script(run, ScriptedCluster(run, JobServerAway("away for 120 s; the job may go on without us")))
    assert read_stop(run) is None


def test_a_one_node_ray_that_has_ended_is_lost_at_once(tmp_path, monkeypatch):
    """Nothing starts it again, so nobody waits for it as for the Ray of a stack."""
    (tmp_path / "token").write_text("token")
    env = {"RAY_ADDRESS": "http://127.0.0.1:9", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    ended = SimpleNamespace(env=env, has_ended=lambda: True, __enter__=lambda: None)
    monkeypatch.setattr(services, "LocalRay", lambda log_dir, announce: ended)
    with pytest.raises(JobLost, match="the one-node Ray of this command has ended"):
        Cluster(Settings(ray_address=None), tmp_path).jobs.find("a")


def test_an_attempt_with_a_moving_heartbeat_is_skipped_long_before_the_lease_timeout(run):
    attempt = lease(run).attempt
    cluster = ScriptedCluster(run)
    began = time.monotonic()
    with (
        LeaseHolder(run, attempt, every_s=0.02),
        pytest.raises(
            stage.Skipped,
            match=r"^attempt 1 of birds-\w+ that began at \d\d:\d\d is still running: someone else$",
        ),
    ):
        run_with_script(run, cluster, lease_timeout_s=60)
    assert time.monotonic() - began < 20
    assert cluster.submitted == []
    assert len(cluster.messages) == 1


def test_work_whose_heartbeat_is_old_by_the_clock_but_moves_is_not_taken_over(run, monkeypatch):
    """This machine's clock is an hour ahead, or all its processes were suspended for an hour and go on now."""
    monkeypatch.setattr(liveness, "FLOW_LEASE_S", 6.0)  # a heartbeat every second
    services = Services(Settings(root=root_of(run)), ScriptedCluster(run), FakeObserver([]), None)
    with stage.exclusively(services, "night") as holder:
        lease_file = open_store(root_of(run)).child("leases/night")
        lease_file.write_json("lease.json", {**holder.check().model_dump(), "heartbeat": time.time() - 3600})
        with pytest.raises(stage.Skipped, match="is still running"), stage.exclusively(services, "night"):
            pass
        assert holder.check().attempt == 1


def test_an_attempt_that_ray_lists_as_running_is_skipped(run):
    held = lease(run)
    cluster = ScriptedCluster(run)
    cluster.ended[held.job_id] = Job(id=held.job_id, state="running", exit_code=None, message="")
    with pytest.raises(stage.Skipped, match=r"attempt 1 of birds-0123456789ab .* is still running"):
        run_with_script(run, cluster, lease_timeout_s=60)
    assert read_lease(run).attempt == 1


def test_a_resumed_flow_run_waits_for_its_process_from_before_the_suspension(run, monkeypatch):
    """That process is still writing its checkpoint and renews its heartbeat. No other flow run is active."""
    cluster, page = ScriptedCluster(run), "http://prefect/runs/1"
    services = Services(
        Settings(root=root_of(run)), cluster, FakeObserver([]), None, Origin(flow_run_id="1", flow_run_url=page)
    )  # fmt: skip
    monkeypatch.setattr(liveness, "FLOW_LEASE_S", 6.0)  # a heartbeat every second
    before = contextlib.ExitStack()
    before.enter_context(stage.exclusively(services, "night"))
    threading.Timer(1.5, before.close).start()
    with stage.exclusively(services, "night") as lease:
        assert lease.check().attempt == 2
    stranger = replace(services.origin, flow_run_id="2", flow_run_url="http://prefect/runs/2")
    with (
        stage.exclusively(services, "night"),
        pytest.raises(stage.Skipped),
        stage.exclusively(Services(services.settings, cluster, FakeObserver([]), None, stranger), "night"),
    ):
        pass


def test_a_run_that_another_process_finished_meanwhile_is_not_run_again(run, monkeypatch):
    monkeypatch.setattr(stage, "LIVING_S", 60.0)  # it ends at the second look, however late that comes
    held = lease(run)
    cluster = ScriptedCluster(run)
    cluster.ended[held.job_id] = Job(id=held.job_id, state="running", exit_code=None, message="")

    def finish(text):
        write_state(run, "finished", 1, step=9)
        cluster.ended[held.job_id] = Job(id=held.job_id, state="succeeded", exit_code=0, message="")

    cluster.messages = SimpleNamespace(append=finish)
    result = run_with_script(run, cluster, lease_timeout_s=60)
    assert (result.reused, result.state["step"], cluster.submitted) == (True, 9, [])


def test_running_jobs_are_named_with_the_command_that_makes_room(run, root, monkeypatch):
    """In the log, in the progress, and in the error of a run that found no room in time. Jobs that wait, too, are listed
    apart."""
    monkeypatch.setattr(stage, "LOOK_S", -1)
    cluster, shown = ScriptedCluster(run, "failed"), []
    monkeypatch.setattr(FakeObserver, "stage", lambda self, title: contextlib.nullcontext(shown.append))
    for key, of in (
        ("owls-0123456789ab", root_of(run)),
        ("cats-0123456789ab", root_of(run)),
        ("elks-0123456789ab", "s3://theirs"),
    ):
        metadata = {"run_key": key, "root": of}
        cluster.ended[key] = Job(id=f"{key}-a1", state="running", exit_code=None, message="", metadata=metadata)
    write_state(stage.run_store(root_of(run), "owls-0123456789ab"), "running", 1)
    with pytest.raises(StageFailed, match="no disk left"):
        run_with_script(run, cluster)
    text = "other running jobs: owls-0123456789ab-a1, elks-0123456789ab-a1 (`vitline ops preempt owls-0123456789ab` makes room"
    assert any(text in message for message in cluster.messages)
    assert text in shown[0]["waits"]
    assert "also starting or waiting: cats-0123456789ab-a1" in shown[0]["waits"]
    write_state(run, "failed", 2, reason="no room for 1 workers", no_room=True)
    error = stage.failure(
        Services(Settings(root=root_of(run)), cluster, FakeObserver([]), None), run, replace(read_lease(run), attempt=2),
        Job(id="x", state="failed", exit_code=1, message=""),
    )  # fmt: skip
    assert f"no room for 1 workers; {text}" in str(error)


def test_of_two_jobs_that_start_neither_is_said_to_wait_for_the_other(run, monkeypatch):
    """Both have reported nothing: one of them is starting, and nobody knows which."""
    monkeypatch.setattr(stage, "LOOK_S", -1)
    monkeypatch.setattr(stage, "ALONE_S", -1)
    cluster, key = ScriptedCluster(run, "finished"), "owls-0123456789ab"
    other = Job(id=f"{key}-a1", state="running", exit_code=None, message="", metadata={"run_key": key})
    cluster.ended[other.id] = other
    run_with_script(run, cluster)
    alone = "no other job runs on this cluster; also starting or waiting: owls-0123456789ab-a1"
    assert f"birds is starting, or waits for room; {alone}" in cluster.messages


def test_a_job_at_its_first_step_is_not_said_to_wait_for_others(run, monkeypatch):
    """A compiled network takes minutes for it, and to stop another run would not help."""
    monkeypatch.setattr(stage, "LOOK_S", -1)
    monkeypatch.setattr(stage, "ALONE_S", -1)
    cluster, shown = ScriptedCluster(run, "failed"), []
    monkeypatch.setattr(FakeObserver, "stage", lambda self, title: contextlib.nullcontext(shown.append))
    cluster.ended["owls-a1"] = Job(id="owls-a1", state="running", exit_code=None, message="")
    monkeypatch.setattr(stage, "read_state", lambda run: {"state": "running", "attempt": 1})
    with pytest.raises(StageFailed):
        run_with_script(run, cluster)
    assert shown[0] == {"waits": "it has started"}
    assert not any("not started" in message for message in cluster.messages)


def test_ctrl_c_requests_a_checkpoint_and_waits_for_it(run):
    cluster = ScriptedCluster(run)

    def interrupt():
        cluster.ended[job_id_of(run, KEY, 1)] = Job(id=job_id_of(run, KEY, 1), state="failed", exit_code=75, message="")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_with_script(run, cluster, check=interrupt)
    assert (read_stop(run)["reason"], read_stop(run)["attempt"]) == ("preempted", 1)
    assert cluster.stopped == []


def test_ctrl_c_stops_a_job_that_does_not_end_in_time(run):
    cluster = ScriptedCluster(run)

    def interrupt():
        cluster.ended[job_id_of(run, KEY, 1)] = Job(
            id=job_id_of(run, KEY, 1), state="running", exit_code=None, message=""
        )
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_with_script(run, cluster, check=interrupt)
    assert cluster.stopped == [job_id_of(run, KEY, 1)]


def test_a_finished_run_whose_output_was_deleted_is_run_again(run):
    """As for a deleted corpus or model: the state of its run is still finished."""
    write_state(run, "finished", 1)
    cluster, outputs = ScriptedCluster(run, "finished"), []
    result = run_with_script(run, cluster, check=lambda: outputs.append(True), output=lambda state: bool(outputs))
    assert not result.reused
    assert len(cluster.submitted) == 1
    assert run.read_json("config.json") == Spec().model_dump(mode="json")


def test_a_cancelled_stage_stops_its_job_and_writes_a_reconciled_state(run):
    """The job is queued: it has no driver that could write a state."""
    cluster = ScriptedCluster(run)

    def cancelled():
        cluster.ended[job_id_of(run, KEY, 1)] = Job(
            id=job_id_of(run, KEY, 1), state="stopped", exit_code=None, message=""
        )
        raise StopRequested("cancelled", "cancelled in Prefect")

    with pytest.raises(StopRequested):
        run_with_script(run, cluster, check=cancelled)
    assert read_stop(run)["reason"] == "cancelled"
    assert read_state(run)["state"] == "cancelled"
    assert run_with_script(run, ScriptedCluster(run, "finished")).state["attempt"] == 2


def test_an_error_that_is_no_stop_request_leaves_the_job_running(run):
    class Terminated(BaseException):
        pass

    def terminated():
        raise Terminated

    cluster = ScriptedCluster(run)
    with pytest.raises(Terminated):
        run_with_script(run, cluster, check=terminated)
    assert (read_stop(run), cluster.stopped) == (None, [])


def held_by(run, flow_run_id):
    """A living attempt that a flow run has submitted."""
    attempt = lease(run)
    record = AttemptRecord(
        run_key=KEY, attempt=1, job_id=attempt.job_id, ray_address="", owner="", started_at=0.0,
        origin=Origin(trigger="manual", flow_run_id=flow_run_id),
    )  # fmt: skip
    run.write_json("attempts/a1.json", record.model_dump(mode="json"))
    return attempt


def test_a_living_job_whose_flow_is_gone_is_adopted(run, monkeypatch):
    monkeypatch.setattr(liveness, "BEAT_S", 0.05)
    attempt = held_by(run, "killed")
    open_store(root_of(run)).write_json("flow-runs/killed.json", {"heartbeat": time.time()})
    cluster = ScriptedCluster(run, "finished")
    cluster.ended[attempt.job_id] = Job(id=attempt.job_id, state="running", exit_code=None, message="")
    result = run_with_script(run, cluster)
    assert (result.state["state"], result.reused, cluster.submitted) == ("finished", False, [])
    assert attempt_records(run)[0].origin == Origin()


def test_a_living_job_is_not_adopted_where_the_heartbeat_of_its_flow_cannot_be_read(run):
    """A record of a newer version, perhaps: nobody knows whether that flow is gone, so it counts as alive."""
    attempt = held_by(run, "of-a-newer-version")
    open_store(root_of(run)).write_json("flow-runs/of-a-newer-version.json", {})
    cluster = ScriptedCluster(run)
    cluster.ended[attempt.job_id] = Job(id=attempt.job_id, state="running", exit_code=None, message="")
    with pytest.raises(stage.Skipped, match="is still running"):
        run_with_script(run, cluster)


@pytest.mark.parametrize("left_s", [None, 3600.0, -0.5])
def test_an_adopted_job_that_reaches_the_deadline_of_its_own_flow_is_resumed_if_time_is_left(run, monkeypatch, left_s):
    monkeypatch.setattr(FakeObserver, "time_left", lambda self: left_s)
    attempt = held_by(run, "killed")
    cluster = ScriptedCluster(run, "out_of_time", "finished")
    cluster.ended[attempt.job_id] = Job(id=attempt.job_id, state="running", exit_code=None, message="")
    if left_s is not None and left_s < 0:
        with pytest.raises(StageFailed, match="ended as out_of_time") as failed:
            run_with_script(run, cluster)
        assert failed.value.state == "out_of_time"
        return
    assert run_with_script(run, cluster).state["attempt"] == 2
    (job,) = cluster.submitted
    assert job.env.get("VITLINE_TIME_LEFT_S") == (None if left_s is None else "3600.0")


@pytest.mark.parametrize("written", [None, "preempted"])
def test_an_attempt_that_reconcile_stopped_for_its_silent_driver_is_followed_by_the_next(run, written):
    class Stopped(ScriptedCluster):
        def follow(self, job_id, on_poll, poll_s):
            if job_id.endswith("-a2"):
                return super().follow(job_id, on_poll, poll_s)
            request_stop(run, "preempted", by=stage.DRIVER_FROZEN, attempt=1)
            write_state(run, written or "running", 1)
            self.ended[job_id] = Job(id=job_id, state="stopped", exit_code=None, message="")
            return self.ended[job_id]

    assert run_with_script(run, Stopped(run, "finished")).state["attempt"] == 2


def test_errors_of_workers_are_said_once_and_stacks_are_shown_at_a_failure(run, monkeypatch):
    error = "no progress for 1800 s: it is in read (read.py:3)"

    class Hanging(ScriptedCluster):
        def follow(self, job_id, on_poll, poll_s):
            run.write_json("errors/a1-100-rank0.json", {"at": 0.1, "rank": 0, "error": error})
            run.write_json("errors/a1-200-rank1.json", {"of": "another version"})
            run.write("stacks/a1-100-rank0.txt", b"older")
            run.write("stacks/a1-300-rank0.txt", b"  File read.py, line 3 in read")
            on_poll(None)
            return super().follow(job_id, on_poll, poll_s)

    shown = []
    monkeypatch.setattr(worker_errors, "LOOK_S", 0.0)
    monkeypatch.setattr(FakeObserver, "failed", lambda self, key, reason, tail: shown.append(tail))
    cluster = Hanging(run, "failed")
    with pytest.raises(StageFailed):
        run_with_script(run, cluster)
    assert [message for message in cluster.messages if "rank" in message] == [f"{KEY}: rank0 ended: {error}"]
    assert "line 39" in shown[0]
    assert shown[0].endswith("  File read.py, line 3 in read")
    assert run.uri_of("stacks/a1-300-rank0.txt") in shown[0]
    assert "older" not in shown[0]


def test_a_living_job_that_a_living_flow_follows_is_skipped(run, root, monkeypatch):
    monkeypatch.setattr(liveness, "BEAT_S", 0.5)
    attempt = held_by(run, "alive")
    cluster = ScriptedCluster(run)
    cluster.ended[attempt.job_id] = Job(id=attempt.job_id, state="running", exit_code=None, message="")
    with (
        liveness.sending_heartbeats(open_store(root_of(run)), "alive"),
        pytest.raises(stage.Skipped, match="is still running"),
    ):
        run_with_script(run, cluster)
    assert read_lease(run).attempt == 1
