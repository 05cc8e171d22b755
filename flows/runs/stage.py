"""How every flow runs a stage: reuse a finished run, else take the claim, submit a Ray job and follow it."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from pydantic import BaseModel

from vitline.flows.catalog.records import AttemptRecord, Origin, attempt_records
from vitline.flows.runs.engines import Engines, StopRequested
from vitline.flows.runs.worker_errors import WorkerErrors, last_stacks
from vitline.infra.config import replace
from vitline.infra.plain_text import last_words
from vitline.infra.provenance import compared_versions
from vitline.infra.ray_jobs import ROOT, Job, JobLost, is_of, no_start
from vitline.infra.records import UnreadableRecord
from vitline.infra.redact import cleaned
from vitline.infra.runs import liveness
from vitline.infra.runs.attempt import DEADLINE_PASSED
from vitline.infra.runs.claims import Claim, ClaimHeld, ClaimHolder, held, read_claim, take_claim
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
from vitline.infra.runs.tries import MAX_WITHOUT_PROGRESS, AttemptsWithoutProgress
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
    """A living attempt of the same run is active elsewhere; `.claim` is its claim."""

    def __init__(self, text: str, claim: Claim | None = None):
        super().__init__(text)
        self.claim = claim


@dataclass(frozen=True)
class StageResult:
    """The result of a stage: its final state, whether it was finished before, and the seconds that this call took."""

    state: RunStateRecord
    reused: bool
    wall_s: float


def run_store(root: str, key: str) -> Store:
    """The folder of a run."""
    return open_store(root).child(f"runs/{key}")


def run_stage(
    engines: Engines,
    run: Store,
    key: str,
    module: str,
    config: BaseModel,
    *,
    title: str,
    progress: Callable[[], RunProgress | None],
    output: Callable[[RunStateRecord], bool] = lambda state: True,
    paused: Callable[[RunStateRecord], bool] = lambda state: False,
    kept: Callable[[], Mapping[str, int]] = dict,
    grace_s: float,
    claim_timeout_s: float,
    env: dict[str, str] | None = None,
) -> StageResult:
    """Brings a run to its end: returns at once if it is finished, else starts the next attempt and follows its job.

    `config` is written as the run's config.json once the claim is taken: only the holder of the claim writes there.
    `output(state)` says whether the output of a finished run still exists; if not, the run is done again. `paused(state)` says whether
    a paused run has come as far as it shall for now. `progress()` is
    what the observer shows. After a preempted attempt or a lost cluster the next attempt starts, until
    MAX_WITHOUT_PROGRESS in a row have brought no progress (`kept`: see `AttemptsWithoutProgress`). A living attempt whose
    flow process is gone is adopted and followed from here on. Raises Skipped if another process follows a living attempt,
    StageFailed for every other end, and any error that interrupts the following.
    """
    started = time.monotonic()

    def finished() -> RunStateRecord | None:
        state = read_state(run)
        if state is None:
            return None
        done = (state["state"] == "finished" and output(state)) or (state["state"] == "paused" and paused(state))
        return state if done else None

    def result(state: RunStateRecord, reused: bool) -> StageResult:
        engines.follow(key)
        return StageResult(state, reused, time.monotonic() - started)

    if (state := finished()) is not None:
        return result(state, True)
    probe_conditional_writes(run)
    without_progress = AttemptsWithoutProgress(kept)
    while True:
        try:
            claim = claim_or_skip(engines, run, key, claim_timeout_s, lambda job: job_state(engines, run, job))
            if (state := finished()) is not None:  # the attempt that held the claim has finished meanwhile
                return result(state, True)
            run.write_json("config.json", config.model_dump(mode="json"))
            stale = progress()  # of an earlier attempt; must not be shown as progress of this one
            submit(engines, run, claim, module, {"RAY_JOB_STOP_WAIT_TIME_S": str(int(grace_s) + 1), **(env or {})})
        except Skipped as skipped:
            claim, stale = adopt(engines, run, skipped), None
        job = follow_unless_lost(engines, run, claim, title, unless_stale(progress, stale), grace_s)
        if (state := finished()) is not None:
            return result(state, False)
        if not (
            job is None
            or job.exit_code == OUTCOMES["preempted"].exit_code
            or others_deadline(engines, run, claim)
            or was_frozen(run, claim)
        ):
            raise failure(engines, run, claim, job)
        if without_progress.add():
            text = f"{key} was preempted or lost its cluster without progress {MAX_WITHOUT_PROGRESS} times in a row"
            raise StageFailed(f"{text}; run the same command again to resume it.", "preempted")
        engines.observer.say(f"attempt {claim.attempt} of {key} has ended early; the next one resumes it")


def submit(engines: Engines, run: Store, claim: Claim, module: str, env: dict[str, str]) -> None:
    """Records the attempt and submits its driver to Ray. The record and the job's metadata name each other."""
    jobs, origin = engines.cluster.jobs, engines.origin
    record = AttemptRecord(
        run_key=claim.run_key,
        attempt=claim.attempt,
        job_id=claim.job_id,
        ray_address=jobs.address,
        owner=claim.owner,
        started_at=time.time(),
        origin=origin,
    )
    run.write_json(f"attempts/a{claim.attempt}.json", record.model_dump(mode="json"))
    identity = {"run_key": claim.run_key, "claim": claim.nonce, ROOT: open_store(engines.root).uri}
    metadata = identity | origin.model_dump(mode="json", exclude_none=True)
    command = [engines.cluster.python, "-P", "-m", module, "--run", run.uri, "--attempt", str(claim.attempt)]
    env = {**env, "VITLINE_SUBMITTED_FROM": json.dumps(compared_versions())}
    if (left_s := engines.observer.time_left()) is not None:
        env["VITLINE_TIME_LEFT_S"] = str(max(left_s, 0.0))
    if packages := Settings().recipe_packages:
        env["VITLINE_RECIPE_PACKAGES"] = ",".join(sorted(packages))
    jobs.submit(claim.job_id, command, env=env, metadata=metadata)
    announce(engines, run, claim)


def announce(engines: Engines, run: Store, claim: Claim) -> None:
    """Announces an attempt that this process follows to the readers of its journal and the observer."""
    engines.follow(claim.run_key)
    url = partial(engines.sender.run_url, claim.run_key)
    engines.observer.submitted(claim.run_key, engines.cluster.jobs.page(claim.job_id), run.uri, url)


def adopt(engines: Engines, run: Store, skipped: Skipped) -> Claim:
    """Takes over a living attempt that no process follows, and returns its claim. If there is none, raises `skipped`."""
    claim = skipped.claim
    record = next((r for r in attempt_records(run) if claim is not None and r.job_id == claim.job_id), None)
    if claim is None or record is None or is_followed(engines, record.origin):
        raise skipped
    engines.observer.say(f"{claim.job_id} is running, but the flow that started it is gone; following it from here")
    adopted = replace(record, origin=engines.origin)
    run.write_json(f"attempts/a{claim.attempt}.json", adopted.model_dump(mode="json"))
    announce(engines, run, claim)
    return claim


def follower_of(root: str, job: Job) -> str | None:
    """Id of the flow run that follows a job: the one that adopted it, else the one that submitted it."""
    with contextlib.suppress(UnreadableRecord):
        for record in attempt_records(run_store(root, job.metadata["run_key"])):
            if record.job_id == job.id:
                return record.origin.flow_run_id
    return job.metadata.get("flow_run_id")


def is_followed(engines: Engines, origin: Origin) -> bool:
    """Whether the flow run that submitted a job is alive: it writes a heartbeat to the store every few seconds. One that cannot
    be read counts as life."""
    if origin.pipeline is not None and origin.pipeline == engines.origin.pipeline:
        return False  # this process holds the claim of that pipeline, so the process that held it before is dead
    if origin.flow_run_id is None:
        return True  # a command in a shell, which writes no heartbeat
    if origin.flow_run_id == engines.origin.flow_run_id:
        return False
    look = partial(liveness.heartbeat_of, open_store(engines.root), origin.flow_run_id)

    def wait() -> None:
        engines.observer.check()
        time.sleep(POLL_S)

    try:
        if look() is None:
            return False
        return bool(watch_until_moved({origin.flow_run_id: look}, liveness.WATCH_S, wait)) and look() is not None
    except UnreadableRecord:
        return True


@contextlib.contextmanager
def exclusively(
    engines: Engines, name: str, watch: Watch | None = None, what: str | None = None
) -> Iterator[ClaimHolder]:
    """Holds the claim `claims/<name>` for work that has no job of its own, such as a whole pipeline.

    Raises Skipped if a living process holds it. After a kill, the next process watches the heartbeat for FLOW_CLAIM_S,
    because there is no job whose state it could read. `watch` has watched `life_of` this claim already. `what` names the work in
    the sentence of Skipped.
    """
    store = open_store(engines.root).child(f"claims/{name}")
    claim = claim_or_skip(engines, store, name, liveness.FLOW_CLAIM_S, lambda job: None, watch, what)
    with held(store, claim, every_s=liveness.FLOW_CLAIM_S / 6) as holder:
        yield holder


def claim_or_skip(
    engines: Engines,
    run: Store,
    key: str,
    claim_timeout_s: float,
    job_state: Callable[[str], str | None],
    watch: Watch | None = None,
    what: str | None = None,
) -> Claim:
    """The claim of the next attempt. Of an attempt that Ray does not know, this process watches the heartbeat first: if it
    stands still for `claim_timeout_s`, the attempt is dead. Raises Skipped for a living attempt: one whose heartbeat moves, or
    that Ray keeps listing as unfinished."""
    started, told, watch = time.monotonic(), False, watch or Watch()
    owner = liveness.this_process()
    while True:
        try:
            return take_claim(
                run,
                key,
                job_state=job_state,
                owner=owner,
                page=engines.origin.flow_run_url,
                claim_timeout_s=claim_timeout_s,
                watch=watch,
            )
        except ClaimHeld as held:
            unknown = job_state(held.claim.job_id) is None
            # Before a resume, an earlier process of this flow run held the claim; it is about to release it.
            ours = held.claim.page is not None and held.claim.page == engines.origin.flow_run_url
            if (watch.moved and not (ours and unknown)) or (not unknown and time.monotonic() - started > LIVING_S):
                what = what or f"attempt {held.claim.attempt} of {key}"
                where = held.claim.page or held.claim.owner
                raise Skipped(still_running(what, held.claim.began, where), held.claim) from held
            if not told:
                engines.observer.say(
                    f"{key}: another attempt held the claim; watching its heartbeat to see if it is alive"
                )
            told = True
            engines.observer.check()
            time.sleep(POLL_S)


def still_running(what: str, began: float, where: str) -> str:
    """`the night that began at 15:10 is still running: <page>`, in UTC; with the date if it began on another one."""
    at, now = datetime.fromtimestamp(began, UTC), datetime.now(UTC)
    return f"{what} that began at {at:{'%H:%M' if at.date() == now.date() else '%Y-%m-%d %H:%M'}} is still running: {where}"


def job_state(engines: Engines, run: Store, job_id: str) -> str | None:
    """The state of a job in Ray. If Ray does not know it: `failed` if the run's state says that it ended, else None."""
    job = engines.cluster.jobs.find(job_id)
    if job is not None:
        return job.state
    state = read_state(run)
    ended = state is not None and state["state"] != "running" and job_id.endswith(f"-a{state['attempt']}")
    return "failed" if ended else None


def unless_stale(
    progress: Callable[[], RunProgress | None], stale: RunProgress | None
) -> Callable[[], RunProgress | None]:
    """`progress`, but None as long as it is the `stale` progress of an earlier attempt."""

    def latest() -> RunProgress | None:
        now = progress()
        return None if now == stale else now

    return latest


def follow(
    engines: Engines, run: Store, claim: Claim, title: str, progress: Callable[[], RunProgress | None], grace_s: float
) -> Job:
    """Follows a job and returns it once it has ended. On an error, stops the job first if the observer requests it."""
    started, waits = time.monotonic(), ""
    next_look, errors = started + LOOK_S, WorkerErrors(run, claim.attempt)
    with engines.observer.stage(title) as show:

        def on_poll(job: Job) -> None:
            nonlocal next_look, waits
            now = progress()
            if now is not None:
                waits = ""
            elif time.monotonic() > next_look:
                found, next_look = why_no_progress(engines, run, claim), time.monotonic() + LOOK_S
                if found in (NO_OTHER_JOB, NO_STEP_YET) and time.monotonic() < started + ALONE_S:
                    found = ""
                elif found not in (waits, NO_STEP_YET):
                    alone = found.startswith(NO_OTHER_JOB)
                    engines.observer.say(
                        f"{title} {'is starting, or waits for room' if alone else 'has not started'}; {found}"
                    )
                waits = found
            for line in errors.news():
                engines.observer.say(f"{claim.run_key}: {line}")
            show({"waits": waits} if waits else now)
            engines.observer.check()

        try:
            return engines.cluster.jobs.follow(claim.job_id, on_poll, poll_s=POLL_S)
        except BaseException as error:
            if waits not in ("", NO_STEP_YET) and isinstance(error, StopRequested) and error.reason == "out_of_time":
                error.args = (f"{error}, and {title} had not started; {waits}",)
            stop = engines.observer.stop(error)
            if stop is not None:
                stop_attempt(engines, run, claim, stop.reason, by=str(stop), grace_s=grace_s)
            raise


def follow_unless_lost(
    engines: Engines, run: Store, claim: Claim, title: str, progress: Callable[[], RunProgress | None], grace_s: float
) -> Job | None:
    """`follow`, but None if the cluster was lost together with the job; the next job starts or joins one again."""
    try:
        return follow(engines, run, claim, title, progress, grace_s)
    except JobLost as lost:
        engines.observer.say(str(lost))
        engines.cluster.restart()
        return None


def others_deadline(engines: Engines, run: Store, claim: Claim) -> bool:
    """Whether an attempt that was adopted ended at the deadline of the flow run that started it; this one has time left."""
    state, left_s = read_state(run) or NO_STATE, engines.observer.time_left()
    ended = state["attempt"] == claim.attempt and state["state"] == "out_of_time"
    return ended and state.get("reason", "").startswith(DEADLINE_PASSED) and (left_s is None or left_s > 0)


def was_frozen(run: Store, claim: Claim) -> bool:
    """Whether reconcile stopped an attempt because its driver wrote no heartbeat; the next attempt resumes it."""
    stop, state = read_stop(run), read_state(run) or NO_STATE
    ended_otherwise = state["attempt"] == claim.attempt and state["state"] not in ("running", "preempted")
    asked = stop is not None and stop["attempt"] == claim.attempt and stop["by"] == DRIVER_FROZEN
    return asked and not ended_otherwise


def why_no_progress(engines: Engines, run: Store, claim: Claim) -> str:
    """Why a job has reported none: it is at its first step, or waits for room, which other jobs may have."""
    state = read_state(run)
    begun = state is not None and state["state"] == "running" and state["attempt"] == claim.attempt
    return NO_STEP_YET if begun else other_jobs(engines, claim.job_id)


def other_jobs(engines: Engines, job_id: str) -> str:
    """Which jobs but `job_id` run on the cluster, how to make room, and which other jobs wait for room."""
    everyones = engines.cluster.jobs.list(every_root=True)
    others = [job for job in everyones if not job.terminal and job.id != job_id]
    waiting = [job for job in others if not has_begun(engines, job)]
    running = [job for job in others if job not in waiting]
    also = f"; also starting or waiting: {', '.join(job.id for job in waiting)}" if waiting else ""
    if not running:
        return f"{NO_OTHER_JOB}{also}"
    keys = [job.metadata["run_key"] for job in running if "run_key" in job.metadata and is_ours(engines, job)]
    names = ", ".join(job.id for job in running)
    if keys:
        names += f" (`vitline ops preempt {keys[0]}` makes room: that run stops and resumes later)"
    return f"other running jobs: {names}{also}"


def has_begun(engines: Engines, job: Job) -> bool:
    """Whether an unfinished job has begun its work; a job of another program or root counts as begun."""
    key = job.metadata.get("run_key") if is_ours(engines, job) else None
    state = read_state(run_store(engines.root, key)) if key else None
    return key is None or (state is not None and job.id.endswith(f"-a{state['attempt']}"))


def is_ours(engines: Engines, job: Job) -> bool:
    return is_of(job, open_store(engines.root).uri)


def stop_attempt(engines: Engines, run: Store, claim: Claim, reason: StopReason, by: str, grace_s: float) -> None:
    """Stops an attempt: `stop.json`, then a signal to its driver, then Ray's SIGKILL. If it wrote no final state, writes a
    reconciled state."""
    hint = " (Ctrl-C again to stop at once)" if engines.origin.flow_run_id is None else ""
    engines.observer.say(f"stopping {claim.job_id}: {by}{hint}")
    request_stop(run, reason, by=by, attempt=claim.attempt)
    jobs = engines.cluster.jobs
    patience_s = min(grace_s, CANCEL_PATIENCE_S) if reason == "cancelled" else grace_s
    deadline = time.monotonic() + patience_s
    while (job := jobs.find(claim.job_id)) is not None and not job.terminal and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if job is not None and not job.terminal:
        try:
            # The grace of a training's driver to save a checkpoint is longer than the time that a cancelled flow has left.
            job = jobs.stop(claim.job_id, wait_s=STOP_MARGIN_S + (0 if reason == "cancelled" else grace_s))
        except TimeoutError as late:
            engines.observer.say(f"{late} `vitline ops reconcile` checks it again.")
            return
    state = read_state(run)
    if state is None or state["attempt"] < claim.attempt or state["state"] == "running":
        write_reconciled_state(run, reason, claim.attempt, by)


def stop_jobs_of(engines: Engines, flow_run_id: str) -> list[str]:
    """Cancels the unfinished jobs that a flow run follows and returns their ids."""
    every = [job for job in engines.cluster.jobs.list() if not job.terminal and "run_key" in job.metadata]
    unfinished = [job for job in every if follower_of(engines.root, job) == flow_run_id]
    for job in unfinished:
        key = job.metadata["run_key"]
        run = run_store(engines.root, key)
        claim = read_claim(run)
        if claim is not None and claim.job_id == job.id:
            stop_attempt(engines, run, claim, "cancelled", by="cancelled in Prefect", grace_s=CANCEL_PATIENCE_S)
        else:
            engines.cluster.jobs.stop(job.id, wait_s=STOP_MARGIN_S)
    return [job.id for job in unfinished]


def failure(engines: Engines, run: Store, claim: Claim, job: Job) -> StageFailed:
    """The error that says in one sentence why a stage ended. The observer also gets the last lines of the job's log."""
    key, state = claim.run_key, read_state(run) or NO_STATE
    where = f"{run.uri_of('state.json')}, job {claim.job_id}"
    ended: RunState
    tail = cleaned("\n".join(engines.cluster.jobs.logs(claim.job_id).splitlines()[-LOG_LINES:]))
    if state["attempt"] == claim.attempt and state["state"] != "running":
        reason, ended = state.get("reason", "no reason given"), state["state"]
        if state.get("no_room"):
            reason = f"{reason}; {other_jobs(engines, claim.job_id)}"
        text = f"{key} ended as {ended}: {reason} ({where}). Fix the cause and run the same command again to resume the run."
    else:
        ended = "cancelled" if job.state == "stopped" else "failed"
        reason = cleaned(f"the job ended without a result ({job.message or job.state})")
        if problem := no_start(engines.cluster.python, job, tail):
            reason = problem
        else:
            reason += f"; its log ends with: {last_words(tail)}"
        write_reconciled_state(run, ended, claim.attempt, reason)
        text = f"{key}: {reason} ({where}). The same command resumes the run."
    engines.observer.failed(key, reason, tail + last_stacks(run, claim.attempt))
    return StageFailed(text, ended)
