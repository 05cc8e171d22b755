"""Ends what nobody follows any more: flow runs, Ray jobs, runs and pipelines that disagree; MLflow gets what it lacks.

Nothing ends on one sign alone, nothing that has ended changes, and what showed life within `quiet_minutes` is left alone.
Whoever comes back meanwhile is safe: a verdict names its attempt, a pipeline's record is written under its claim, and
Prefect is asked again before it is told.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from flows.records import list_run_keys, read_pipeline, write_pipeline
from flows.requests.forms import ReconcileRequest
from flows.stages.engines import Engines
from flows.stages.heartbeat import beats, forget
from flows.stages.stage import FLOW_CLAIM_S, exclusively, run_store, stop_jobs_of
from flows.to_mlflow import outbox
from flows.to_mlflow.shipper import sync_runs
from flows.to_mlflow.stage_snapshots import list_pipelines
from infra.config import replace
from infra.ray_jobs import Job
from infra.runs.claims import Claim, read_claim
from infra.runs.run_state import OUTCOMES, RunState, read_state, read_stop, write_reconciled_state
from infra.storage import Store, open_store

log = logging.getLogger(__name__)
# Six missed beats: however short a quiet time is asked for, a busy machine is not taken for a dead one.
LIFE_S = 60.0
READERS = 16
SYNCED = "ops/synced.json"


class Inconsistency(NamedTuple):
    """What disagrees, and what was done about it; in a dry run, what would be."""

    subject: str
    problem: str
    action: str


class SeenFlowRun(NamedTuple):
    """A flow run as Prefect shows it."""

    id: str
    name: str
    state: str
    """Prefect's type of the state: PENDING, RUNNING, CANCELLING, PAUSED, COMPLETED, FAILED, CANCELLED, CRASHED, ..."""
    since: float
    """Unix seconds of the state."""
    parent: str | None = None
    """Of a subflow, the flow run that it is part of."""
    awaits_infrastructure: bool = False
    """PENDING where a start may take long, and says nothing."""


class FlowRuns(Protocol):
    """What Prefect knows."""

    def unfinished(self) -> list[SeenFlowRun]: ...

    def find(self, ids: Sequence[str]) -> dict[str, SeenFlowRun]: ...

    def last_line(self, flow_run_id: str) -> float | None: ...

    def end(self, flow_run_id: str, state: RunState, message: str) -> None: ...


class NoFlowRuns:
    """Where there is no Prefect: runs of commands are reconciled all the same."""

    def unfinished(self) -> list[SeenFlowRun]:
        return []

    def find(self, ids: Sequence[str]) -> dict[str, SeenFlowRun]:
        return {}

    def last_line(self, flow_run_id: str) -> float | None:
        return None

    def end(self, flow_run_id: str, state: RunState, message: str) -> None:
        return None


class SeenRun(NamedTuple):
    """A run as the store shows it."""

    key: str
    claim: Claim | None
    state: dict[str, Any] | None


def reconcile(request: ReconcileRequest, engines: Engines, prefect: FlowRuns) -> list[Inconsistency]:
    """What disagrees between Prefect, Ray, the store and MLflow, each mended unless `dry_run`.

    What fails for one of them is said in its finding and holds up no other. Raises where an engine does not answer at
    the start: what it does not say is no sign.
    """
    with exclusively(engines, "reconcile"):
        at_work = Reconciler(request, engines, prefect)
        at_work.end_cancelled_jobs()
        at_work.end_silent_runs()
        at_work.end_left_pipelines()
        at_work.end_dead_flow_runs()
        at_work.tell_of_jobs_without_a_flow()
        at_work.send_to_mlflow()
    return at_work.findings


@dataclass
class Reconciler:
    """One look at all engines, and what follows from it, a case at a time."""

    request: ReconcileRequest
    engines: Engines
    prefect: FlowRuns

    def __post_init__(self) -> None:
        self.findings: list[Inconsistency] = []
        self.root = open_store(self.engines.root)
        self.quiet_s = 60 * self.request.quiet_minutes
        # A command without a cluster of its own would start one by asking.
        jobs = self.engines.cluster.jobs.list() if self.engines.settings.ray_address else []
        self.jobs = {job.id: job for job in jobs}
        self.unfinished = {run.id: run for run in self.prefect.unfinished()}
        self.beats = beats(self.root)
        self.runs = self._read_each(list_run_keys(self.root), self._read_run)
        self.pipelines = self._read_each(list_pipelines(self.root), lambda key: read_pipeline(self.root, key))
        named = {job.metadata.get("flow_run_id") for job in self._living()}
        named |= {record.origin.flow_run_id for record in self.pipelines if record.state == "running"}
        named |= {run.parent for run in self.unfinished.values()}
        self.flow_runs = self.prefect.find(sorted(flow_run_id for flow_run_id in named if flow_run_id))
        self.flow_runs |= self.unfinished
        self.now = time.time()
        self.changed: set[str] = set()

    def end_cancelled_jobs(self) -> None:
        """A job outlived its flow run: whoever cancelled it saw to the flow only."""
        for flow_run_id in sorted({job.metadata.get("flow_run_id", "") for job in self._living()}):
            run = self.flow_runs.get(flow_run_id)
            if run is None or not self._cancelled(run):
                continue
            ids = [job.id for job in self._living() if job.metadata.get("flow_run_id") == flow_run_id]
            stopped = self._mend(
                Inconsistency(
                    f"job {', '.join(ids)}", f"at work for flow run {run.name}, which is {run.state}", "stopped"
                ),
                partial(stop_jobs_of, self.engines, flow_run_id),
            )
            if stopped:
                for job_id in ids:
                    self.jobs[job_id] = self.engines.cluster.jobs.find(job_id) or self.jobs[job_id]
                    self.changed.add(self.jobs[job_id].metadata["run_key"])

    def end_silent_runs(self) -> None:
        """An attempt that holds the claim has ended, and neither it nor its flow could say how."""
        for run in self.runs:
            if run.claim is None or spoke(run) or run.key in self.changed:
                continue
            job = self.jobs.get(run.claim.job_id)
            if job is not None and not job.terminal:
                continue
            last, patience_s = run.claim.heartbeat, max(self.quiet_s, LIFE_S)
            if job is not None:  # Ray and the store are two signs; where Ray knows nothing, silence has to be long
                last, patience_s = job.ended_at or 0.0, self.quiet_s
            if self.now - last < patience_s:
                continue
            store, attempt = run_store(self.engines.root, run.key), run.claim.attempt
            state, reason = reconciled_state(store, attempt, job)
            problem = f"says that it runs, but {reason}"
            mended = self._mend(
                Inconsistency(f"run {run.key}", problem, f"attempt {attempt} is {state}"),
                partial(judge, store, run.claim, state, reason),
            )
            if mended:
                self.changed.add(run.key)

    def end_left_pipelines(self) -> None:
        """A pipeline whose process was killed. While a job of it is at work its record stays as it is."""
        for record in self.pipelines:
            if record.state != "running" or any(job.metadata.get("pipeline") == record.key for job in self._living()):
                continue
            claim = read_claim(self.root.child(f"claims/{record.key}"))
            heartbeat = claim.heartbeat if claim else 0.0
            if self.now - heartbeat < max(self.quiet_s, FLOW_CLAIM_S) or self.now - record.updated_at < self.quiet_s:
                continue
            flow_run_id = record.origin.flow_run_id
            if flow_run_id is not None and self._lives(flow_run_id):
                continue
            run = self.flow_runs.get(flow_run_id or "")
            state: RunState = "cancelled" if run is not None and self._cancelled(run) else "preempted"
            reason = f"nobody has driven it since {utc(max(heartbeat, record.updated_at))}; the same request goes on"
            mended = self._mend(
                Inconsistency(f"pipeline {record.key}", f"says that it runs, but {reason}", f"is {state}"),
                partial(self._end_pipeline, record.key, state, reason),
            )
            if mended:
                self.changed.add(record.key)

    def end_dead_flow_runs(self) -> None:
        """Flow runs that Prefect shows at work and whose process is gone; then the subflows of those that have ended."""
        ended: dict[str, RunState] = {}
        for run in self.unfinished.values():
            if run.state == "PAUSED":  # suspended: it has no process, and Prefect itself gives it up in time
                continue
            if run.parent is None and self._is_dead(run) and (end := self._end_of(run)) is not None:
                problem = f"{run.state} since {utc(run.since)}, but its process is gone"
                if self._end_flow_run(run, problem, *end):
                    ended[run.id] = end[0]
        for run in self.unfinished.values():
            parent = self.flow_runs.get(run.parent or "")
            if parent is None:
                continue
            message = f"flow run {parent.name}, which it is part of, has ended"
            if parent.id in ended:
                self._end_flow_run(run, message, ended[parent.id], message)
            elif parent.state in ENDED and self.now - max(parent.since, run.since) >= self.quiet_s:
                state: RunState = "cancelled" if parent.state == "CANCELLED" else "preempted"
                self._end_flow_run(run, message, state, message)

    def tell_of_jobs_without_a_flow(self) -> None:
        """Training goes on without its flow; nothing is to be done, but people want to know."""
        for job in self._living():
            flow_run_id = job.metadata.get("flow_run_id")
            if flow_run_id is None or isinstance(self.prefect, NoFlowRuns):
                continue
            run = self.flow_runs.get(flow_run_id)
            if run is not None and (self._cancelled(run) or (run.state not in ENDED and not self._is_dead(run))):
                continue
            self.changed.add(job.metadata["run_key"])
            problem = f"at work without a flow: {f'flow run {run.name} is gone' if run else 'Prefect has no such run'}"
            action = "left at work; the same request follows it again"
            self.findings.append(Inconsistency(f"job {job.id}", problem, action))

    def send_to_mlflow(self) -> None:
        """What has ended since the last look, and what nobody ships; what MLflow could not take waits for the next."""
        if self.engines.settings.mlflow_tracking_uri is None:
            return
        since = self._synced_until() - max(self.quiet_s, LIFE_S)
        lacking = self.changed | {entry.key for entry in outbox.left(self.root)}
        keys = [run.key for run in self.runs if run.key in lacking or (spoke(run) and reported_at(run) >= since)]
        for record in self.pipelines:
            if record.key in lacking or (record.state != "running" and record.updated_at >= since):
                keys.append(record.key)
        if not keys:
            return
        problem = f"may lack something of {listed(keys)}"
        if self.request.dry_run:
            self.findings.append(Inconsistency("MLflow", problem, "would be sent what it lacks"))
            return
        try:
            report = sync_runs(self.engines.settings, keys)
        except (RuntimeError, OSError, ValueError) as error:
            self.findings.append(Inconsistency("MLflow", problem, f"not done: {error}"))
            return
        if report.sent:
            self.findings.append(Inconsistency("MLflow", f"lacked something of {listed(report.sent)}", "sent"))
        for why in dict.fromkeys(report.left.values()):
            left = [key for key, reason in report.left.items() if reason == why]
            self.findings.append(Inconsistency("MLflow", f"lacks something of {listed(left)}", f"not done: {why}"))
        if not report.left:
            self.root.write_json(SYNCED, {"schema_version": 1, "until": self.now})

    # How it is judged.

    def _living(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.terminal and "run_key" in job.metadata]

    def _cancelled(self, run: SeenFlowRun) -> bool:
        """Cancelled, or about to be for so long that nobody does it."""
        return run.state == "CANCELLED" or (run.state == "CANCELLING" and self.now - run.since >= self.quiet_s)

    def _lives(self, flow_run_id: str) -> bool:
        return self.now - self.beats.get(flow_run_id, 0.0) < max(self.quiet_s, LIFE_S)

    def _is_dead(self, run: SeenFlowRun) -> bool:
        """No change in Prefect, and no sign of life in the store; of a body that was never entered, no line in the log."""
        if self.now - run.since < self.quiet_s or self._lives(run.id) or run.awaits_infrastructure:
            return False
        if run.id in self.beats:
            return True
        last = self.prefect.last_line(run.id) or run.since
        return self.now - last >= max(self.quiet_s, LIFE_S)

    def _end_of(self, run: SeenFlowRun) -> tuple[RunState, str] | None:
        """How a dead flow run has ended: as what it worked on did. None while that goes on."""
        if run.state == "CANCELLING":
            return "cancelled", "cancelled; its process was gone and could not say so"
        jobs = [job for job in self.jobs.values() if job.metadata.get("flow_run_id") == run.id]
        if any(not job.terminal for job in jobs):
            return None
        pipeline = next((p for p in self.pipelines if p.origin.flow_run_id == run.id), None)
        if pipeline is not None:
            record = read_pipeline(self.root, pipeline.key)
            if record.state == "running":
                return ("preempted", f"pipeline {record.key} was left") if self.request.dry_run else None
            return record.state, f"pipeline {record.key}: {record.reason or record.state} (told by reconcile)"
        if jobs:
            last = max(jobs, key=lambda job: job.started_at or 0.0)
            key = last.metadata.get("run_key", "")
            state = read_state(run_store(self.engines.root, key)) or {}
            if state.get("state") in (None, "running"):
                return None
            return state["state"], f"{key}: {state.get('reason') or state['state']} (told by reconcile)"
        return "preempted", "its process was gone before it had submitted a job; start it again"

    # What is done.

    def _mend(self, finding: Inconsistency, action: Callable[[], object]) -> bool:
        """Records a finding and does what it says, unless this is a dry run. Whether it was done."""
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
        with exclusively(self.engines, key):
            record = read_pipeline(self.root, key)
            if record.state == "running":
                write_pipeline(self.root, replace(record, state=state, reason=reason, updated_at=time.time()))

    def _end_flow_run(self, run: SeenFlowRun, problem: str, state: RunState, message: str) -> bool:
        outcome = OUTCOMES[state]
        finding = Inconsistency(f"flow run {run.name}", problem, f"is {outcome.prefect_type} ({message})")
        done = self._mend(finding, lambda: self.prefect.end(run.id, state, message))
        if done:
            forget(self.root, run.id)
        return done or self.request.dry_run

    # What is read.

    def _read_run(self, key: str) -> SeenRun:
        store = run_store(self.engines.root, key)
        return SeenRun(key, read_claim(store), read_state(store))

    def _read_each(self, keys: Iterable[str], read: Callable[[str], Any]) -> list[Any]:
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(read, keys))

    def _synced_until(self) -> float:
        try:
            return float(self.root.read_json(SYNCED)["until"])
        except FileNotFoundError:
            return 0.0


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def spoke(run: SeenRun) -> bool:
    """Whether the attempt that holds the claim has said how it ended."""
    state, attempt = run.state or {"state": "running"}, run.claim.attempt if run.claim else 0
    return state["state"] != "running" and state["attempt"] >= attempt


def reported_at(run: SeenRun) -> float:
    return run.state["updated_at"] if run.state else 0.0


def reconciled_state(run: Store, attempt: int, job: Job | None) -> tuple[RunState, str]:
    """How an attempt ended that did not say so, and why we think so."""
    stop = read_stop(run)
    asked = stop if stop is not None and stop["attempt"] == attempt else None
    found = "Ray does not know its job and its heartbeat has stopped" if job is None else f"its job is {job.state}"
    if asked is not None:
        return asked["reason"], f"{found}; it was asked to stop: {asked['by']}"
    if job is None:
        return "preempted", f"{found}; the same request resumes it"
    if job.state == "stopped":
        return "cancelled", f"{found} in Ray"
    if job.exit_code == OUTCOMES["preempted"].exit_code:
        return "preempted", f"{found} with exit code {job.exit_code}; the same request resumes it"
    return "failed", f"{found} ({job.message or f'exit code {job.exit_code}'})"


def judge(run: Store, claim: Claim, state: RunState, reason: str) -> None:
    """Writes the verdict. Raises RuntimeError where the attempt beats after all, has spoken or was followed by another."""
    if read_claim(run) != claim or spoke(SeenRun(claim.run_key, claim, read_state(run))):
        raise RuntimeError("it showed life in this moment.")
    write_reconciled_state(run, state, claim.attempt, reason)


def utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def listed(keys: Sequence[str], limit: int = 5) -> str:
    more = len(keys) - limit
    return ", ".join(keys[:limit]) + (f" and {more} more" if more > 0 else "")
