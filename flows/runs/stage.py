"""How every flow runs a stage: reuse a finished run, else take the lease, submit a Ray job and follow it."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from vitline.flows.catalog.records import AttemptRecord, Origin, attempt_records
from vitline.flows.runs.services import Services, StopRequested
from vitline.flows.runs.worker_errors import WorkerErrors, last_stacks
from vitline.infra.config import replace
from vitline.infra.plain_text import last_words
from vitline.infra.provenance import compared_versions
from vitline.infra.ray_jobs import ROOT, Job, JobLost, is_of, no_start
from vitline.infra.records import UnreadableRecord
from vitline.infra.redact import cleaned
from vitline.infra.runs import liveness
from vitline.infra.runs.attempt import DEADLINE_PASSED
from vitline.infra.runs.lease import Lease, LeaseHeld, LeaseHolder, acquire_lease, held, read_lease
from vitline.infra.runs.liveness import Watch, watch_until_moved
from vitline.infra.runs.progress import RunProgress
from vitline.infra.runs.run_state import (
    NO_STATE,
    OUTCOMES,
    RunState,
    RunStateRecord,
    StopReason,
    read_state,
    read_stop,
    request_stop,
    write_reconciled_state,
)
from vitline.infra.runs.tries import MAX_WITHOUT_PROGRESS, TriesWithoutProgress, finished_units
from vitline.infra.settings import Settings
from vitline.infra.storage import Store, open_store, probe_conditional_writes

log = logging.getLogger(__name__)
POLL_S = 1.0
# How long to wait for Ray to notice that the driver of a job it lists as unfinished was killed.
LIVING_S = 10.0
# Ray waits one second longer than the grace before it kills a stopped job; this margin is longer than that.
STOP_MARGIN_S = 5.0
# How long a cancelled job may take for the rest of its step and a checkpoint before its driver gets a signal. Prefect kills
# the flow process 30 s after the cancel.
CANCEL_PATIENCE_S = 15.0
# Without progress, the observer reports at this interval which other jobs run. After the longer time also that none does, or that
# the job itself has started: a compiled network takes minutes for its first step.
LOOK_S = 10.0
ALONE_S = 30.0
NO_OTHER_JOB = "no other job runs on this cluster"
NO_STEP_YET = "it has started"
LOG_LINES = 40
DRIVER_FROZEN = "its driver was silent, though Ray listed the job as running; reconcile stopped it"


class StageFailed(RuntimeError):
    """A stage ended in another state than finished. The text is one sentence and the next step."""

    def __init__(self, text: str, state: RunState = "failed"):
        super().__init__(text)
        self.state: RunState = state


class Skipped(RuntimeError):
    """A living attempt of the same run is active elsewhere; `.lease` is its lease."""

    def __init__(self, text: str, lease: Lease | None = None):
        super().__init__(text)
        self.lease = lease


@dataclass(frozen=True)
class StageResult:
    """The result of a stage: its final state, whether it was finished before, the seconds that this call took, and whether it found a
    part of the work done."""

    state: RunStateRecord
    reused: bool
    wall_s: float
    resumed: bool = False


class StageSpec(Protocol):
    """The config of a job, with the key of its run."""

    @property
    def run_key(self) -> str: ...

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


def run_store(root: str, key: str) -> Store:
    """The folder of a run."""
    return open_store(root).child(f"runs/{key}")


def run_stage(
    services: Services,
    spec: StageSpec,
    module: str,
    *,
    title: str,
    progress: Callable[[], RunProgress | None],
    output: Callable[[RunStateRecord], bool] = lambda state: True,
    paused: Callable[[RunStateRecord], bool] = lambda state: False,
    kept: Callable[[], Mapping[str, int]] | None = None,
    grace_s: float,
    lease_timeout_s: float = 30.0,
    env: dict[str, str] | None = None,
    make_room: Callable[[], object] = lambda: None,
) -> StageResult:
    """Brings the run of a spec to its end: returns at once if it is finished, else starts the next attempt and follows its job.

    `spec` is written as the run's config.json once the lease is taken: only the holder of the lease writes there.
    `output(state)` says whether the output of a finished run still exists; if not, the run is done again. `paused(state)` says whether
    a paused run has reached the target step of this call. `progress()` is what the observer shows. `make_room()` is called every LOOK_S
    while other jobs have the room that this one waits for. After a preempted attempt or a lost cluster the next attempt starts, until
    MAX_WITHOUT_PROGRESS in a row have brought no progress (`kept`: see `TriesWithoutProgress`; by default the finished units of
    `progress()`). A living attempt whose flow process is gone is adopted and followed from here on. Raises Skipped if another process
    follows a living attempt, StageFailed for every other end, and any error that interrupts the following.
    """
    started, key = time.monotonic(), spec.run_key
    run = run_store(services.root, key)

    def finished() -> RunStateRecord | None:
        state = read_state(run)
        if state is None:
            return None
        done = (state["state"] == "finished" and output(state)) or (state["state"] == "paused" and paused(state))
        return state if done else None

    resumed = bool(run.list("attempts/"))

    def result(state: RunStateRecord, reused: bool) -> StageResult:
        services.follow(key)
        return StageResult(state, reused, time.monotonic() - started, resumed)

    if (state := finished()) is not None:
        return result(state, True)
    probe_conditional_writes(run)
    without_progress = TriesWithoutProgress(kept or (lambda: finished_units(progress())))
    while True:
        try:
            lease = acquire_or_skip(services, run, key, lease_timeout_s, lambda job: job_state(services, run, job))
            if (state := finished()) is not None:  # the attempt that held the lease has finished meanwhile
                return result(state, True)
            run.write_json("config.json", spec.model_dump(mode="json"))
            stale = progress()
            submit(services, run, lease, module, {"RAY_JOB_STOP_WAIT_TIME_S": str(int(grace_s) + 1), **(env or {})})
        except Skipped as skipped:
            lease, stale = adopt(services, run, skipped), None
        try:
            job = follow(services, run, lease, title, progress, stale, grace_s, make_room)
        except JobLost as lost:  # with its cluster; the next job starts or joins one again
            services.observer.say(str(lost))
            services.cluster.restart()
            job = None
        if (state := finished()) is not None:
            return result(state, False)
        if not (
            job is None
            or job.exit_code == OUTCOMES["preempted"].exit_code
            or hit_foreign_deadline(services, run, lease)
            or was_frozen(run, lease)
        ):
            raise failure(services, run, lease, job)
        if without_progress.add():
            text = f"{key} was preempted or lost its cluster without progress {MAX_WITHOUT_PROGRESS} times in a row"
            raise StageFailed(f"{text}; run the same command again to resume it.", "preempted")
        ended = read_state(run) or NO_STATE
        why = f" ({ended['reason']})" if ended["attempt"] == lease.attempt and "reason" in ended else ""
        services.observer.say(f"attempt {lease.attempt} of {key} has ended early{why}; the next one resumes it")


def submit(services: Services, run: Store, lease: Lease, module: str, env: dict[str, str]) -> None:
    """Records the attempt and submits its driver to Ray. The record and the job's metadata name each other."""
    jobs, origin = services.cluster.jobs, services.origin
    record = AttemptRecord(
        run_key=lease.run_key,
        attempt=lease.attempt,
        job_id=lease.job_id,
        ray_address=jobs.address,
        owner=lease.owner,
        started_at=time.time(),
        origin=origin,
    )
    run.write_json(f"attempts/a{lease.attempt}.json", record.model_dump(mode="json"))
    identity = {"run_key": lease.run_key, "lease": lease.nonce, ROOT: open_store(services.root).uri}
    metadata = identity | origin.model_dump(mode="json", exclude_none=True)
    command = [services.cluster.python, "-P", "-m", module, "--run", run.uri, "--attempt", str(lease.attempt)]
    env = {**env, "VITLINE_SUBMITTED_FROM": json.dumps(compared_versions())}
    if (left_s := services.observer.time_left()) is not None:
        env["VITLINE_TIME_LEFT_S"] = str(max(left_s, 0.0))
    if packages := Settings().recipe_packages:
        env["VITLINE_RECIPE_PACKAGES"] = ",".join(sorted(packages))
    if (labels := Settings().node_labels_text()) and not jobs.has_usable_nodes():
        services.observer.say(
            f"warning: no node of the Ray at {jobs.address} has {labels} (VITLINE_NODE_LABELS) now; the job waits for one"
        )
    jobs.submit(lease.job_id, command, env=env, metadata=metadata)
    announce(services, run, lease)


def announce(services: Services, run: Store, lease: Lease) -> None:
    """Announces an attempt that this process follows to the readers of its journal and the observer."""
    services.follow(lease.run_key)
    url = partial(services.sender.run_url, lease.run_key)
    services.observer.submitted(lease.run_key, services.cluster.jobs.page(lease.job_id), run.uri, url)


def adopt(services: Services, run: Store, skipped: Skipped) -> Lease:
    """Takes over a living attempt that no process follows, and returns its lease. If there is none, raises `skipped`."""
    lease = skipped.lease
    record = next((r for r in attempt_records(run) if lease is not None and r.job_id == lease.job_id), None)
    if lease is None or record is None or is_followed(services, record.origin):
        raise skipped
    services.observer.say(f"{lease.job_id} is running, but the flow that started it is gone; following it from here")
    adopted = replace(record, origin=services.origin)
    run.write_json(f"attempts/a{lease.attempt}.json", adopted.model_dump(mode="json"))
    announce(services, run, lease)
    return lease


def follower_of(root: str, job: Job) -> str | None:
    """Id of the flow run that follows a job: the one that adopted it, else the one that submitted it."""
    with contextlib.suppress(UnreadableRecord):
        for record in attempt_records(run_store(root, job.metadata["run_key"])):
            if record.job_id == job.id:
                return record.origin.flow_run_id
    return job.metadata.get("flow_run_id")


def is_followed(services: Services, origin: Origin) -> bool:
    """Whether the flow run that submitted a job is alive: it writes a heartbeat to the store every few seconds. One that cannot
    be read counts as life."""
    if origin.pipeline is not None and origin.pipeline == services.origin.pipeline:
        return False  # this process holds the lease of that pipeline, so the process that held it before is dead
    if origin.flow_run_id is None:
        return True  # a command in a shell, which writes no heartbeat
    if origin.flow_run_id == services.origin.flow_run_id:
        return False
    look = partial(liveness.heartbeat_of, open_store(services.root), origin.flow_run_id)
    wait = partial(services.wait, POLL_S)
    try:
        if look() is None:
            return False
        return bool(watch_until_moved({origin.flow_run_id: look}, liveness.WATCH_S, wait)) and look() is not None
    except UnreadableRecord:
        return True


@contextlib.contextmanager
def exclusively(
    services: Services, name: str, watch: Watch | None = None, what: str | None = None
) -> Iterator[LeaseHolder]:
    """Holds the lease `leases/<name>` for work that has no job of its own, such as a whole pipeline.

    Raises Skipped if a living process holds it. After a kill, the next process watches the heartbeat for FLOW_LEASE_S,
    because there is no job whose state it could read. `watch` has watched `lease_version` this lease already. `what` names the work in
    the sentence of Skipped.
    """
    store = open_store(services.root).child(f"leases/{name}")
    lease = acquire_or_skip(services, store, name, liveness.FLOW_LEASE_S, lambda job: None, watch, what)
    with held(store, lease, every_s=liveness.FLOW_LEASE_S / 6) as holder:
        yield holder


def acquire_or_skip(
    services: Services,
    run: Store,
    key: str,
    lease_timeout_s: float,
    job_state: Callable[[str], str | None],
    watch: Watch | None = None,
    what: str | None = None,
) -> Lease:
    """The lease of the next attempt. Of an attempt that Ray does not know, this process watches the heartbeat first: if it
    is unchanged for `lease_timeout_s`, the attempt is dead. Raises Skipped for a living attempt: one whose heartbeat moves, or
    that Ray keeps listing as unfinished."""
    started, told, watch = time.monotonic(), False, watch or Watch()
    owner = liveness.this_process()
    while True:
        try:
            return acquire_lease(
                run,
                key,
                job_state=job_state,
                owner=owner,
                page=services.origin.flow_run_url,
                lease_timeout_s=lease_timeout_s,
                watch=watch,
            )
        except LeaseHeld as held:
            unknown = job_state(held.lease.job_id) is None
            # Before a resume, an earlier process of this flow run held the lease; it is about to release it.
            ours = held.lease.page is not None and held.lease.page == services.origin.flow_run_url
            if (watch.moved and not (ours and unknown)) or (not unknown and time.monotonic() - started > LIVING_S):
                what = what or f"attempt {held.lease.attempt} of {key}"
                where = held.lease.page or held.lease.owner
                raise Skipped(still_running(what, held.lease.began, where), held.lease) from held
            if not told:
                services.observer.say(
                    f"{key}: another attempt held the lease; watching its heartbeat to see if it is alive"
                )
            told = True
            services.wait(POLL_S)


def still_running(what: str, began: float, where: str) -> str:
    """`the night that began at 15:10 is still running: <page>`, in UTC; with the date if it began on another one."""
    at, now = datetime.fromtimestamp(began, UTC), datetime.now(UTC)
    return f"{what} that began at {at:{'%H:%M' if at.date() == now.date() else '%Y-%m-%d %H:%M'}} is still running: {where}"


def job_state(services: Services, run: Store, job_id: str) -> str | None:
    """The state of a job in Ray. If Ray does not know it: `failed` if the run's state says that it ended, else None."""
    job = services.cluster.jobs.find(job_id)
    if job is not None:
        return job.state
    state = read_state(run)
    ended = state is not None and state["state"] != "running" and job_id.endswith(f"-a{state['attempt']}")
    return "failed" if ended else None


def follow(
    services: Services,
    run: Store,
    lease: Lease,
    title: str,
    progress: Callable[[], RunProgress | None],
    stale: RunProgress | None,
    grace_s: float,
    make_room: Callable[[], object],
) -> Job:
    """Follows a job and returns it once it has ended. On an error, stops the job first if the observer requests it. `stale` is the
    progress of an earlier attempt, which is not shown."""
    started, waits = time.monotonic(), ""
    next_look, errors = started + LOOK_S, WorkerErrors(run, lease.attempt)
    with services.observer.stage(title) as show:

        def on_poll(job: Job) -> None:
            nonlocal next_look, waits
            now = None if (found := progress()) == stale else found
            no_room = now is not None and now.get("no_room") == lease.attempt
            if now is not None and not no_room:
                waits = ""
            elif time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_S
                if no_room:
                    make_room()
                why = other_jobs(services, lease.job_id) if no_room else why_no_progress(services, run, lease)
                if why in (NO_OTHER_JOB, NO_STEP_YET) and time.monotonic() < started + ALONE_S:
                    why = ""
                elif why not in (waits, NO_STEP_YET):
                    alone = why.startswith(NO_OTHER_JOB)
                    seen = "is starting, or waits for room" if alone else "has not started"
                    services.observer.say(f"{title} {'waits for room' if no_room else seen}; {why}")
                waits = why
            for line in errors.news():
                services.observer.say(f"{lease.run_key}: {line}")
            show({**(now or {}), "waits": waits} if waits else now)
            services.observer.check()

        try:
            return services.cluster.jobs.follow(lease.job_id, on_poll, poll_s=POLL_S)
        except BaseException as error:
            if waits not in ("", NO_STEP_YET) and isinstance(error, StopRequested) and error.reason == "out_of_time":
                error.args = (f"{error}, and {title} had not started; {waits}",)
            stop = services.observer.stop(error)
            if stop is not None:
                stop_attempt(services, run, lease, stop.reason, by=str(stop), grace_s=grace_s)
            raise


def hit_foreign_deadline(services: Services, run: Store, lease: Lease) -> bool:
    """Whether an attempt that was adopted ended at the deadline of the flow run that started it; this one has time left."""
    state, left_s = read_state(run) or NO_STATE, services.observer.time_left()
    ended = state["attempt"] == lease.attempt and state["state"] == "out_of_time"
    return ended and state.get("reason", "").startswith(DEADLINE_PASSED) and (left_s is None or left_s > 0)


def was_frozen(run: Store, lease: Lease) -> bool:
    """Whether reconcile stopped an attempt because its driver wrote no heartbeat; the next attempt resumes it."""
    stop, state = read_stop(run), read_state(run) or NO_STATE
    ended_otherwise = state["attempt"] == lease.attempt and state["state"] not in ("running", "preempted")
    asked = stop is not None and stop["attempt"] == lease.attempt and stop["by"] == DRIVER_FROZEN
    return asked and not ended_otherwise


def why_no_progress(services: Services, run: Store, lease: Lease) -> str:
    """Why a job has reported none: it is at its first step, or waits for room, which other jobs may have."""
    state = read_state(run)
    begun = state is not None and state["state"] == "running" and state["attempt"] == lease.attempt
    return NO_STEP_YET if begun else other_jobs(services, lease.job_id)


def other_jobs(services: Services, job_id: str) -> str:
    """Which jobs but `job_id` run on the cluster, how to make room, and which other jobs wait for room."""
    everyones = services.cluster.jobs.list(every_root=True)
    others = [job for job in everyones if not job.terminal and job.id != job_id]
    waiting = [job for job in others if not has_begun(services, job)]
    running = [job for job in others if job not in waiting]
    also = f"; also starting or waiting: {', '.join(job.id for job in waiting)}" if waiting else ""
    if not running:
        return f"{NO_OTHER_JOB}{also}"
    keys = [job.metadata["run_key"] for job in running if "run_key" in job.metadata and is_ours(services, job)]
    names = ", ".join(job.id for job in running)
    if keys:
        names += f" (`vitline ops preempt {keys[0]}` makes room: that run stops and resumes later)"
    return f"other running jobs: {names}{also}"


def has_begun(services: Services, job: Job) -> bool:
    """Whether an unfinished job has begun its work; a job of another program or root counts as begun."""
    key = job.metadata.get("run_key") if is_ours(services, job) else None
    state = read_state(run_store(services.root, key)) if key else None
    return key is None or (state is not None and job.id.endswith(f"-a{state['attempt']}"))


def is_ours(services: Services, job: Job) -> bool:
    return is_of(job, open_store(services.root).uri)


def stop_attempt(services: Services, run: Store, lease: Lease, reason: StopReason, by: str, grace_s: float) -> None:
    """Stops an attempt: `stop.json`, then a signal to its driver, then Ray's SIGKILL. If it wrote no final state, writes a
    reconciled state."""
    hint = " (Ctrl-C again to stop at once)" if services.origin.flow_run_id is None else ""
    services.observer.say(f"stopping {lease.job_id}: {by}{hint}")
    request_stop(run, reason, by=by, attempt=lease.attempt)
    jobs = services.cluster.jobs
    patience_s = min(grace_s, CANCEL_PATIENCE_S) if reason == "cancelled" else grace_s
    deadline = time.monotonic() + patience_s
    while (job := jobs.find(lease.job_id)) is not None and not job.terminal and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if job is not None and not job.terminal:
        try:
            # The grace of a training's driver to save a checkpoint is longer than the time that a cancelled flow has left.
            job = jobs.stop(lease.job_id, wait_s=STOP_MARGIN_S + (0 if reason == "cancelled" else grace_s))
        except TimeoutError as late:
            services.observer.say(f"{late} `vitline ops reconcile` checks it again.")
            return
    state = read_state(run)
    if state is None or state["attempt"] < lease.attempt or state["state"] == "running":
        write_reconciled_state(run, reason, lease.attempt, by)


def stop_jobs_of(services: Services, flow_run_id: str) -> list[str]:
    """Cancels the unfinished jobs that a flow run follows and returns their ids."""
    every = [job for job in services.cluster.jobs.list() if not job.terminal and "run_key" in job.metadata]
    unfinished = [job for job in every if follower_of(services.root, job) == flow_run_id]
    for job in unfinished:
        key = job.metadata["run_key"]
        run = run_store(services.root, key)
        lease = read_lease(run)
        if lease is not None and lease.job_id == job.id:
            stop_attempt(services, run, lease, "cancelled", by="cancelled in Prefect", grace_s=CANCEL_PATIENCE_S)
        else:
            services.cluster.jobs.stop(job.id, wait_s=STOP_MARGIN_S)
    return [job.id for job in unfinished]


def failure(services: Services, run: Store, lease: Lease, job: Job) -> StageFailed:
    """The error that says in one sentence why a stage ended. The observer also gets the last lines of the job's log."""
    key, state = lease.run_key, read_state(run) or NO_STATE
    where = f"{run.uri_of('state.json')}, job {lease.job_id}"
    ended: RunState
    tail = cleaned("\n".join(services.cluster.jobs.logs(lease.job_id).splitlines()[-LOG_LINES:]))
    if state["attempt"] == lease.attempt and state["state"] != "running":
        reason, ended = state.get("reason", "no reason given"), state["state"]
        if state.get("no_room"):
            reason = f"{reason}; {other_jobs(services, lease.job_id)}"
        text = f"{key} ended as {ended}: {reason} ({where}). Fix the cause and run the same command again to resume the run."
    else:
        ended = "cancelled" if job.state == "stopped" else "failed"
        reason = cleaned(f"the job ended without a result ({job.message or job.state})")
        if problem := no_start(services.cluster.python, job, tail):
            reason = problem
        else:
            reason += f"; its log ends with: {last_words(tail)}"
        write_reconciled_state(run, ended, lease.attempt, reason)
        text = f"{key}: {reason} ({where}). The same command resumes the run."
    services.observer.failed(key, reason, tail + last_stacks(run, lease.attempt))
    return StageFailed(text, ended)
