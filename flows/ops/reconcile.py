"""Brings flow runs, Ray jobs, runs and pipelines left by killed processes to an end state, and sends MLflow what it lacks.

Nothing ends on one sign alone, nothing that has ended changes, and everything with a heartbeat within `quiet_minutes` is left
alone. What seems silent is watched for `liveness.WATCH_S` first, because a clock that is ahead, or a machine that was suspended, makes
every heartbeat old. A process that comes back meanwhile is safe: a reconciled state names its attempt, a pipeline's record is
written under its lease, and a flow run's state is read again before it is set.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from vitline.flows.catalog.records import AttemptRecord, PipelineRecord, read_pipeline, write_pipeline
from vitline.flows.catalog.snapshot import RootSnapshot, StoredRun
from vitline.flows.forms.forms import ReconcileRequest
from vitline.flows.ops.flow_runs import FlowRuns, NoFlowRuns, SeenFlowRun
from vitline.flows.ops.silent_attempts import last_attempt_of, reconciled_state
from vitline.flows.runs.services import Services
from vitline.flows.runs.stage import (
    DRIVER_FROZEN,
    exclusively,
    follower_of,
    stop_attempt,
    stop_jobs_of,
)
from vitline.flows.to_mlflow import outbox
from vitline.flows.to_mlflow.child import sync_runs
from vitline.infra.config import replace
from vitline.infra.html.text import shortened_list, utc
from vitline.infra.ray_jobs import Job
from vitline.infra.records import UnreadableRecord, reading
from vitline.infra.runs import liveness
from vitline.infra.runs.lease import Lease, lease_version, read_lease
from vitline.infra.runs.liveness import (
    Silence,
    Watch,
    delete_heartbeat,
    heartbeat_of,
    read_heartbeats,
    watch_until_moved,
)
from vitline.infra.runs.run_state import (
    NO_STATE,
    OUTCOMES,
    RunState,
    has_ended,
    read_state,
    write_reconciled_state,
)
from vitline.infra.storage import Store, open_store

log = logging.getLogger(__name__)
# How long workers of a frozen driver may take for a checkpoint.
FROZEN_GRACE_S = 30.0
SYNCED = "ops/synced.json"


class Finding(NamedTuple):
    """An inconsistency and what was done about it; in a dry run, what would be done."""

    subject: str
    problem: str
    action: str


def reconcile(
    request: ReconcileRequest, services: Services, prefect: FlowRuns, *, patient: bool = False, dead_before: float = 0.0
) -> list[Finding]:
    """Finds inconsistencies between Prefect, Ray, the store and MLflow, and repairs each unless `dry_run`.

    An error in one repair is reported in its finding and stops no other. Raises if an engine does not answer at the start:
    a missing answer proves nothing. What has been silent for less than `quiet_minutes` is a finding and left alone; if
    `patient`, this first waits until it has been silent for so long, or lives. What has shown life only before `dead_before`, in Unix
    seconds, counts as silent for long: then all processes of a local stack were ended.
    """
    with exclusively(services, "reconcile"):
        reconciler = Reconciler(request, services, prefect, dead_before)
        if patient and (wait_s := reconciler.quiet_in_s()):
            services.observer.say(f"something has just become silent; looking again in {wait_s:.0f} s")
            services.wait(wait_s)
            reconciler = Reconciler(request, services, prefect)
        reconciler.end_cancelled_jobs()
        reconciler.end_frozen_jobs()
        reconciler.end_silent_runs()
        reconciler.end_abandoned_pipelines()
        reconciler.end_dead_flow_runs()
        reconciler.resume_suspended()
        reconciler.report_jobs_without_a_flow()
        reconciler.report_silent()
        reconciler.send_to_mlflow()
    return reconciler.findings


@dataclass
class Reconciler:
    """Reads the state of all services once, then handles the inconsistencies case by case."""

    request: ReconcileRequest
    services: Services
    prefect: FlowRuns
    dead_before: float = 0.0

    def __post_init__(self) -> None:
        self.findings: list[Finding] = []
        self.root = open_store(self.services.root)
        self.quiet_s = 60 * self.request.quiet_minutes
        # Without a configured cluster, listing jobs would start a local one.
        jobs = self.services.cluster.jobs.list() if self.services.settings.ray_address else []
        self.jobs = {job.id: job for job in jobs}
        self.unfinished = {run.id: run for run in self.prefect.unfinished()}
        self.alive: set[str] = set()
        self.read_heartbeats = read_heartbeats(self.root, partial(self._keep, "flow run"))
        with RootSnapshot.read(self.root, leases=True) as snapshot:
            self.runs = [*snapshot.runs.values()]
            self.pipelines = [pipeline.record for pipeline in snapshot.pipelines.values()]
            self.pipeline_leases = {key: pipeline.lease for key, pipeline in snapshot.pipelines.items()}
        for unreadable in snapshot.unreadable:
            self.findings.append(Finding(f"{unreadable.kind} {unreadable.key}", str(unreadable.error), LEFT))
        self.followers = {job.id: follower_of(self.services.root, job) for job in self._active_jobs()}
        ids = set(self.followers.values())
        ids |= {record.origin.flow_run_id for record in self.pipelines if record.state == "running"}
        ids |= {run.parent for run in self.unfinished.values()}
        self.flow_runs = self.prefect.find(sorted(flow_run_id for flow_run_id in ids if flow_run_id))
        self.flow_runs |= self.unfinished
        self.silence = Silence(time.time(), self.quiet_s, self.dead_before)
        self.changed: set[str] = set()
        self.watches: defaultdict[str, Watch] = defaultdict(Watch)
        self._watch_silent()

    def end_cancelled_jobs(self) -> None:
        """Stops jobs that outlived their cancelled flow run."""
        for flow_run_id in sorted({self.followers[job.id] or "" for job in self._active_jobs()}):
            run = self.flow_runs.get(flow_run_id)
            if run is None or not self._cancelled(run):
                continue
            ids = self._jobs_followed_by(flow_run_id)
            stopped = self._repair(
                Finding(f"job {', '.join(ids)}", f"active for flow run {run.name}, which is {run.state}", "stopped"),
                partial(stop_jobs_of, self.services, flow_run_id),
            )
            if stopped:
                for job_id in ids:
                    self.jobs[job_id] = self.services.cluster.jobs.find(job_id) or self.jobs[job_id]
                    self.changed.add(self.jobs[job_id].metadata["run_key"])

    def end_frozen_jobs(self) -> None:
        """Stops jobs that Ray lists as running although their driver writes no heartbeat: it is stopped, or hangs.

        Such a job would keep its place on the cluster for ever, and every later scheduled run of its deployment would be
        skipped. Its workers may still train, and are asked to save a checkpoint first.
        """
        for run in self.runs:
            if run.lease is None or run.key in self.changed or run.key in self.alive or not self._is_frozen(run):
                continue
            job_id, silent_since = run.lease.job_id, utc(run.lease.heartbeat)
            stop = partial(stop_frozen, self.services, run.store, run.lease)
            problem = f"running, but its driver has been silent since {silent_since}"
            if self._repair(Finding(f"job {job_id}", problem, "stopped"), stop):
                self.jobs[job_id] = self.services.cluster.jobs.find(job_id) or self.jobs[job_id]
                self.changed.add(run.key)

    def end_silent_runs(self) -> None:
        """Sets the reconciled state of runs whose attempt ended without writing a final state."""
        for run in self.runs:
            if run.lease is None or run.key in self.changed or not self._is_silent(run):
                continue
            job, store = self.jobs.get(run.lease.job_id), run.store
            attempt = run.lease.attempt
            try:
                state, reason = reconciled_state(store, attempt, job)
            except UnreadableRecord as unreadable:
                self._keep("run", run.key, unreadable)
                continue
            problem = f"recorded as running, but {reason}"
            repaired = self._repair(
                Finding(f"run {run.key}", problem, f"attempt {attempt} is {state}"),
                partial(write_reconciled, store, run.lease, state, reason),
            )
            if repaired:
                self.changed.add(run.key)

    def end_abandoned_pipelines(self) -> None:
        """Ends pipelines whose process was killed. As long as one of its jobs is active, a pipeline keeps its state."""
        for record in self.pipelines:
            if not self._is_abandoned(record):
                continue
            run = self.flow_runs.get(record.origin.flow_run_id or "")
            state: RunState = "cancelled" if run is not None and self._cancelled(run) else "preempted"
            lease = self.pipeline_leases[record.key]
            silent_since = utc(max(lease.heartbeat if lease else 0.0, record.updated_at))
            reason = f"its process has been silent since {silent_since}; the same request resumes it"
            repaired = self._repair(
                Finding(f"pipeline {record.key}", f"recorded as running, but {reason}", f"is {state}"),
                partial(self._end_pipeline, record.key, state, reason),
            )
            if repaired:
                self.changed.add(record.key)

    def end_dead_flow_runs(self) -> None:
        """Ends flow runs that Prefect shows as unfinished although their process is gone, then the subflows of ended runs."""
        ended: dict[str, RunState] = {}
        for run in self.unfinished.values():
            if run.state == "PAUSED":  # suspended: it has no process
                continue
            if run.parent is None and self._is_dead(run) and (end := self._end_of(run)) is not None:
                problem = f"{run.state} since {utc(run.since)}, but its process is gone"
                if self._end_flow_run(run, problem, *end):
                    ended[run.id] = end[0]
        for run in self.unfinished.values():
            parent = self.flow_runs.get(run.parent or "")
            if parent is None:
                continue
            message = f"its parent flow run {parent.name} has ended"
            if parent.id in ended:
                self._end_flow_run(run, message, ended[parent.id], message)
            elif parent.state in ENDED and self.silence.is_old(parent.since) and self.silence.is_old(run.since):
                state: RunState = "cancelled" if parent.state == "CANCELLED" else "preempted"
                self._end_flow_run(run, message, state, message)

    def resume_suspended(self) -> None:
        """Resumes suspended flow runs whose limit has passed."""
        for run in self.unfinished.values():
            if run.parent is None and run.resume_at is not None and run.resume_at <= self.silence.now:
                finding = Finding(f"flow run {run.name}", f"suspended until {utc(run.resume_at)}", "resumed")
                self._repair(finding, partial(self.prefect.resume, run.id))

    def report_jobs_without_a_flow(self) -> None:
        """Reports jobs that run without their flow. They need no repair, but users want to know."""
        for job in self._active_jobs():
            flow_run_id = self.followers[job.id]
            if flow_run_id is None or isinstance(self.prefect, NoFlowRuns):
                continue
            run = self.flow_runs.get(flow_run_id)
            if run is not None and (self._cancelled(run) or (run.state not in ENDED and not self._is_dead(run))):
                continue
            self.changed.add(job.metadata["run_key"])
            problem = f"active without a flow: {f'flow run {run.name} is gone' if run else 'Prefect has no such run'}"
            action = "left running; the same request follows it again"
            self.findings.append(Finding(f"job {job.id}", problem, action))

    def report_silent(self) -> None:
        """Reports what may be dead and has not been silent for `quiet_minutes`: the next reconcile ends it."""
        for subject, last in self._silent_for_now():
            problem = f"without a sign of life since {utc(last)}"
            action = (
                f"left alone until {utc(last + max(self.quiet_s, liveness.LIFE_S))}, then the next reconcile ends it"
            )
            self.findings.append(Finding(subject, problem, action))

    def quiet_in_s(self) -> float:
        """Seconds until all that may be dead has been silent for `quiet_minutes`; 0 if nothing is."""
        last = max((last for _, last in self._silent_for_now()), default=None)
        return 0.0 if last is None else max(self.quiet_s, liveness.LIFE_S) - (self.silence.now - last) + 1.0

    def send_to_mlflow(self) -> None:
        """Sends what has ended since the last reconcile and what is in the outbox. What fails is sent by the next one."""
        if self.services.settings.mlflow_tracking_uri is None:
            return
        since = self._synced_until() - max(self.quiet_s, liveness.LIFE_S)
        unsent = self.changed | {entry.key for entry in outbox.left(self.root)}
        keys = [run.key for run in self.runs if run.key in unsent or (run.ended and run.updated_at >= since)]
        for record in self.pipelines:
            if record.key in unsent or (record.state != "running" and record.updated_at >= since):
                keys.append(record.key)
        if not keys:
            return
        problem = f"may lack parts of {shortened_list(keys)}"
        if self.request.dry_run:
            self.findings.append(Finding("MLflow", problem, "would be sent what it lacks"))
            return
        try:
            report = sync_runs(self.services.settings, keys)
        except (RuntimeError, OSError, ValueError) as error:
            self.findings.append(Finding("MLflow", problem, f"not done: {error}"))
            return
        if sent := [key for key in report.done if key in unsent]:
            self.findings.append(Finding("MLflow", f"lacked parts of {shortened_list(sent)}", "sent"))
        for why in dict.fromkeys(report.left.values()):
            left = [key for key, reason in report.left.items() if reason == why]
            self.findings.append(Finding("MLflow", f"lacks parts of {shortened_list(left)}", f"not done: {why}"))
        if not report.left:
            self.root.write_json(SYNCED, {"schema_version": 1, "until": self.silence.now})

    # How states are decided.

    def _active_jobs(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.terminal and "run_key" in job.metadata]

    def _jobs_followed_by(self, flow_run_id: str) -> list[str]:
        return [job.id for job in self._active_jobs() if self.followers[job.id] == flow_run_id]

    def _silent_for_now(self) -> Iterator[tuple[str, float]]:
        """What has missed six heartbeats and has not been silent for `quiet_minutes`, and its last sign of life."""

        def recent(last: float) -> bool:
            return liveness.LIFE_S <= self.silence.now - last < self.quiet_s

        for flow_run in self.unfinished.values():
            last = max(flow_run.since, self.read_heartbeats.get(flow_run.id, 0.0))
            if flow_run.parent or flow_run.state == "PAUSED" or flow_run.awaits_infrastructure or not recent(last):
                continue
            if flow_run.id not in self.read_heartbeats:
                last = max(last, self.prefect.last_line(flow_run.id) or 0.0)
            if flow_run.id not in self.alive and recent(last):
                yield f"flow run {flow_run.name}", last
        for run in self.runs:
            job = self.jobs.get(run.lease.job_id) if run.lease else None
            at_work = job is not None and not job.terminal
            if run.lease and not run.ended and not at_work and recent(run.lease.heartbeat):
                yield f"run {run.key}", run.lease.heartbeat

    def _cancelled(self, run: SeenFlowRun) -> bool:
        """Whether it is cancelled, or has been CANCELLING for so long that no process will finish the cancel."""
        return run.state == "CANCELLED" or (run.state == "CANCELLING" and self.silence.is_old(run.since))

    def _is_silent(self, run: StoredRun) -> bool:
        """Whether the attempt of a run has ended, or shows no life, without having written how it ended."""
        if run.lease is None or run.ended:
            return False
        job = self.jobs.get(run.lease.job_id)
        if (
            job is not None
        ):  # Ray and the store are two signs; if Ray does not know the job, the silence has to be longer
            return job.terminal and self.silence.is_old(job.ended_at or 0.0)
        return run.key not in self.alive and self.silence.heartbeat_is_old(run.lease.heartbeat, liveness.LIFE_S)

    def _is_frozen(self, run: StoredRun) -> bool:
        """Whether Ray lists the job of a run as running, but its driver writes no heartbeat. The run may have ended: its
        workers write that."""
        job = self.jobs.get(run.lease.job_id) if run.lease else None
        if run.lease is None or job is None or job.state != "running":
            return False
        return self.silence.heartbeat_is_old(run.lease.heartbeat, liveness.FROZEN_S) and self.silence.is_old(
            job.started_at or 0.0, liveness.FROZEN_S
        )

    def _is_abandoned(self, record: PipelineRecord) -> bool:
        """Whether a pipeline is recorded as running although neither its process nor one of its jobs shows life."""
        active = any(job.metadata.get("pipeline") == record.key for job in self._active_jobs())
        if record.state != "running" or active or record.key in self.alive or self._lives(record.origin.flow_run_id):
            return False
        lease = self.pipeline_leases[record.key]
        last_beat = lease.heartbeat if lease else 0.0
        return self.silence.heartbeat_is_old(last_beat, liveness.FLOW_LEASE_S) and self.silence.heartbeat_is_old(
            record.updated_at
        )

    def _lives(self, flow_run_id: str | None) -> bool:
        if flow_run_id is None:
            return False
        return flow_run_id in self.alive or not self.silence.heartbeat_is_old(
            self.read_heartbeats.get(flow_run_id, 0.0), liveness.LIFE_S
        )

    def _watch_silent(self) -> None:
        """Watches everything that would be ended for its silence; what shows life meanwhile is `alive`."""
        looks: dict[str, Callable[[], Hashable]] = {}
        frozen = {run.key for run in self.runs if self._is_frozen(run)}
        for run in (run for run in self.runs if run.key in frozen or self._is_silent(run)):
            looks[run.key] = self._look("run", run.key, partial(lease_version, run.store))
        for record in filter(self._is_abandoned, self.pipelines):
            lease = self.root.child(f"leases/{record.key}")
            looks[record.key] = self._look("pipeline", record.key, partial(lease_version, lease))
        for flow_run in self.unfinished.values():
            if flow_run.parent is None and self._is_dead(flow_run):
                look = partial(self._life_of_flow_run, flow_run.id)
                looks[flow_run.id] = self._look("flow run", flow_run.id, look)

        for_s = {key: liveness.FROZEN_WATCH_S if key in frozen else liveness.WATCH_S for key in looks}
        self.alive |= watch_until_moved(looks, for_s, partial(self.services.wait, liveness.WATCH_S / 15), self.watches)

    def _look(self, kind: str, key: str, look: Callable[[], Hashable]) -> Callable[[], Hashable]:
        """`look`, but what cannot be read any more is a finding, once, and counts as alive."""

        def look_or_keep() -> Hashable:
            try:
                return look()
            except UnreadableRecord as unreadable:
                if key not in self.alive:
                    self._keep(kind, key, unreadable)
                return None

        return look_or_keep

    def _life_of_flow_run(self, flow_run_id: str) -> Hashable:
        return heartbeat_of(self.root, flow_run_id), self.prefect.last_line(flow_run_id)

    def _is_dead(self, run: SeenFlowRun) -> bool:
        """Whether its state in Prefect is old and it has no heartbeat in the store; before its first heartbeat, no log line."""
        if not self.silence.is_old(run.since) or self._lives(run.id) or run.awaits_infrastructure:
            return False
        if run.id in self.read_heartbeats:
            return True
        last = self.prefect.last_line(run.id) or run.since
        return self.silence.is_old(last, liveness.LIFE_S)

    def _end_of(self, run: SeenFlowRun) -> tuple[RunState, str] | None:
        """The end state of a dead flow run: that of its pipeline or last run. None while that is still running."""
        if run.state == "CANCELLING":
            return "cancelled", "cancelled; its process was gone and could not report it"
        if self._jobs_followed_by(run.id):
            return None
        pipeline = next((p for p in self.pipelines if p.origin.flow_run_id == run.id), None)
        if pipeline is not None:
            try:
                record = read_pipeline(self.root, pipeline.key)
            except UnreadableRecord:  # since it was listed; it is a finding of its own
                return None
            if record.state == "running":
                return ("preempted", f"the process of pipeline {record.key} is gone") if self.request.dry_run else None
            return record.state, f"pipeline {record.key}: {record.reason or record.state} (set by reconcile)"
        try:
            last = last_attempt_of(self.root, self.runs, run.id)
            if last is None:
                return "preempted", "its process is gone, and no run in the store names it; start it again"
            return self._end_of_attempt(run, *last)
        except UnreadableRecord:  # a finding of its own
            return None

    def _end_of_attempt(
        self, flow_run: SeenFlowRun, run: StoredRun, record: AttemptRecord
    ) -> tuple[RunState, str] | None:
        """How a dead flow run ends whose last attempt this is. None while the attempt is active."""
        newest = run.lease.attempt if run.lease else 0
        if newest > record.attempt or record.origin.flow_run_id != flow_run.id:
            where = f": {record.origin.flow_run_url}" if record.origin.flow_run_url and newest == record.attempt else ""
            return "preempted", f"{run.key} continues in another flow run or command, in attempt {newest}{where}"
        store = run.store
        state = read_state(store) or NO_STATE
        if state["state"] != "running" and state["attempt"] >= record.attempt:
            return state["state"], f"{run.key}: {state.get('reason') or state['state']} (set by reconcile)"
        if self.request.dry_run and self._is_silent(run):
            ended, reason = reconciled_state(store, record.attempt, self.jobs.get(record.job_id))
            return ended, f"{run.key}: {reason}"
        problem = f"{flow_run.state} since {utc(flow_run.since)}, but its process is gone"
        self.findings.append(Finding(f"flow run {flow_run.name}", problem, f"left until {record.job_id} has ended"))
        return None

    # Repairs.

    def _repair(self, finding: Finding, action: Callable[[], object]) -> bool:
        """Records a finding and runs its action unless this is a dry run. Returns whether the action succeeded."""
        if self.request.dry_run:
            self.findings.append(finding._replace(action=f"would be: {finding.action}"))
            return False
        try:
            action()
        except (RuntimeError, OSError) as error:
            self.findings.append(finding._replace(action=f"not done: {error}"))
            return False
        self.findings.append(finding)
        return True

    def _end_pipeline(self, key: str, state: RunState, reason: str) -> None:
        with exclusively(self.services, key, self.watches[key]):
            record = read_pipeline(self.root, key)
            if record.state == "running":
                write_pipeline(self.root, replace(record, state=state, reason=reason, updated_at=time.time()))

    def _end_flow_run(self, run: SeenFlowRun, problem: str, state: RunState, message: str) -> bool:
        outcome = OUTCOMES[state]
        finding = Finding(f"flow run {run.name}", problem, f"is {outcome.prefect_type} ({message})")
        done = self._repair(finding, lambda: self.prefect.end(run.id, state, message))
        if done:
            delete_heartbeat(self.root, run.id)
        return done or self.request.dry_run

    # Reading the store.

    def _keep(self, kind: str, key: str, unreadable: UnreadableRecord) -> None:
        """Treat runs with unreadable records as alive."""
        self.alive.add(key)
        self.findings.append(Finding(f"{kind} {key}", str(unreadable), LEFT))

    def _synced_until(self) -> float:
        with contextlib.suppress(UnreadableRecord), reading(self.root.uri_of(SYNCED)):
            synced = self.root.read_json_or_none(SYNCED)
            return min(float(synced["until"]), self.silence.now) if synced else 0.0
        return 0.0  # everything is sent again, which changes nothing, and the record is written anew


LEFT = "left as it is"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def stop_frozen(services: Services, run: Store, lease: Lease) -> None:
    """Stops the job of a frozen driver. Raises RuntimeError if it has shown life meanwhile, or does not end."""
    if read_lease(run) != lease:
        raise RuntimeError("the lease of this run changed meanwhile; the next reconcile checks it again.")
    stop_attempt(services, run, lease, "preempted", by=DRIVER_FROZEN, grace_s=FROZEN_GRACE_S)
    job = services.cluster.jobs.find(lease.job_id)
    if job is not None and not job.terminal:
        raise RuntimeError(f"job {job.id} is still {job.state}; the next reconcile stops it again.")


def write_reconciled(run: Store, lease: Lease, state: RunState, reason: str) -> None:
    """Writes the reconciled state. Raises RuntimeError if the attempt is alive or has ended, or if another has followed."""
    if read_lease(run) != lease or has_ended(read_state(run), lease.attempt):
        raise RuntimeError("the lease or state of this run changed meanwhile; the next reconcile checks it again.")
    write_reconciled_state(run, state, lease.attempt, reason)
