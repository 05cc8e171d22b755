"""What follows for reconcile from the records of a run: how a silent attempt ended, and which one a flow run submitted last."""

from collections.abc import Iterable

from vitline.flows.catalog.records import AttemptRecord, attempt_records
from vitline.flows.catalog.snapshot import StoredRun
from vitline.infra.ray_jobs import Job
from vitline.infra.runs.run_state import OUTCOMES, RunState, read_stop
from vitline.infra.storage import Store, cached_records


def reconciled_state(run: Store, attempt: int, job: Job | None) -> tuple[RunState, str]:
    """The end state of an attempt that wrote none, and the evidence for it."""
    stop = read_stop(run)
    found = "Ray does not know its job and its heartbeat has stopped" if job is None else f"its job is {job.state}"
    if stop is not None and stop["attempt"] == attempt:
        return stop["reason"], f"{found}; it was asked to stop: {stop['by']}"
    if job is None:
        return "preempted", f"{found}; the same request resumes it"
    if job.state == "stopped":
        return "cancelled", f"{found} in Ray"
    if job.exit_code == OUTCOMES["preempted"].exit_code:
        return "preempted", f"{found} with exit code {job.exit_code}; the same request resumes it"
    return "failed", f"{found} ({job.message or f'exit code {job.exit_code}'})"


def last_attempt_of(root: Store, runs: Iterable[StoredRun], flow_run_id: str) -> tuple[StoredRun, AttemptRecord] | None:
    """The newest attempt that a flow run has submitted or followed, whether or not Ray still knows its job. The record of an attempt
    names the flow run that follows it, its lease the one that submitted it. Raises UnreadableRecord."""
    found = list[tuple[StoredRun, AttemptRecord]]()
    with cached_records(root, "runs/") as records:
        for run in runs:
            for record in attempt_records(records.child(f"runs/{run.key}")):
                lease = run.lease if run.lease is not None and run.lease.attempt == record.attempt else None
                submitted = lease is not None and (lease.page or "").endswith(f"/{flow_run_id}")
                if submitted or record.origin.flow_run_id == flow_run_id:
                    found.append((run, record))
    return max(found, key=lambda each: each[1].started_at, default=None)
