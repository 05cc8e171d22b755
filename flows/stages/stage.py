"""A stage as every flow runs it: reuse what is finished, take the claim, submit a Ray job, follow it (DESIGN 3.3)."""

import contextlib
import getpass
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from flows.records import AttemptRecord, Origin, attempt_records
from flows.stages import heartbeat
from flows.stages.engines import Engines, Progress, StopRequested
from infra.config import replace
from infra.provenance import compared_versions
from infra.ray_jobs import Job, JobLost
from infra.redact import cleaned
from infra.runs.claims import Claim, ClaimHeld, ClaimHolder, ClaimLost, read_claim, take_claim
from infra.runs.run_state import OUTCOMES, RunState, StopReason, read_state, request_stop, write_reconciled_state
from infra.storage import Store, open_store, probe_conditional_writes

log = logging.getLogger(__name__)
MAX_ATTEMPTS = 3
POLL_S = 0.5
# How long a job that Ray lists as unfinished may take to be found dead: Ray notices a killed driver with a delay.
LIVING_S = 10.0
# Ray's own wait before it kills a stopped job is a second longer than the grace; this is longer than that.
STOP_MARGIN_S = 5.0
# What a cancelled job may take for the rest of its step and a checkpoint before its driver is told by signal: Prefect
# kills the flow process 30 s after the cancel.
CANCEL_PATIENCE_S = 15.0
# Without progress for so long, people want to know what the job waits for; then it is looked at so often.
WAITING_S = 30.0
LOOK_S = 10.0
LOG_LINES = 40
# Of a shell whose command was not found, or is none.
NO_COMMAND = (126, 127)
# Age of the heartbeat after which a flow process counts as dead.
FLOW_CLAIM_S = 30.0


class StageFailed(RuntimeError):
    """A stage that ended in another state than finished; the text is one sentence and the next step."""

    def __init__(self, text: str, state: RunState = "failed"):
        super().__init__(text)
        self.state: RunState = state


class Skipped(RuntimeError):
    """A living attempt of the same run is at work elsewhere; `.claim` is what it holds."""

    def __init__(self, text: str, claim: Claim | None = None):
        super().__init__(text)
        self.claim = claim


@dataclass(frozen=True)
class StageResult:
    """How a stage ended: its final state, whether it had been finished before, seconds spent now."""

    state: dict[str, Any]
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
    progress: Callable[[], Progress | None],
    output: Callable[[dict[str, Any]], bool] = lambda state: True,
    grace_s: float,
    claim_timeout_s: float,
    env: dict[str, str] | None = None,
) -> StageResult:
    """Brings the run to its end: returns at once when it is finished, else starts the next attempt and follows it.

    `config` becomes the run's config.json once the claim is taken: only its holder ever writes there. `output(state)` says
    whether what a finished run made is still there; if not, the run is done again. `progress()` is what to show. A
    preempted attempt and a lost cluster are followed by another, up to MAX_ATTEMPTS in this call. A living attempt whose
    flow process is gone is followed from here on. Raises Skipped when somebody follows a living attempt, StageFailed for
    every other end, and what interrupted the following.
    """
    started = time.monotonic()

    def finished() -> dict[str, Any] | None:
        state = read_state(run)
        return state if state is not None and state["state"] == "finished" and output(state) else None

    def result(state: dict[str, Any], reused: bool) -> StageResult:
        engines.shipper.follow(key)
        return StageResult(state, reused, time.monotonic() - started)

    if (state := finished()) is not None:
        return result(state, True)
    probe_conditional_writes(run)
    for _ in range(MAX_ATTEMPTS):
        try:
            claim = claim_or_skip(engines, run, key, claim_timeout_s, lambda job: job_state(engines, run, job))
            if (state := finished()) is not None:  # by the attempt that was waited for
                return result(state, True)
            run.write_json("config.json", config.model_dump(mode="json"))
            left = progress()  # by an attempt that is dead: nobody takes it for news of this one
            submit(engines, run, claim, module, {"RAY_JOB_STOP_WAIT_TIME_S": str(int(grace_s) + 1), **(env or {})})
        except Skipped as skipped:
            claim, left = adopt(engines, run, skipped), None
        try:
            job = follow(engines, run, claim, title, news(progress, left), grace_s)
        except JobLost as lost:
            engines.observer.say(f"{lost} The next attempt resumes {key}.")
            engines.cluster.restart()
            continue
        if (state := finished()) is not None:
            return result(state, False)
        if job.exit_code != OUTCOMES["preempted"].exit_code:
            raise failure(engines, run, claim, job)
        engines.observer.say(f"attempt {claim.attempt} of {key} was preempted; the next one resumes it")
    raise StageFailed(
        f"{key} was preempted or lost its cluster {MAX_ATTEMPTS} times in a row; run the same command again to go on.",
        "preempted",
    )


def submit(engines: Engines, run: Store, claim: Claim, module: str, env: dict[str, str]) -> None:
    """Records the attempt and hands its driver to Ray, with links both ways."""
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
    metadata = {"run_key": claim.run_key, **origin.model_dump(mode="json", exclude_none=True)}
    command = [engines.cluster.python, "-m", module, "--run", run.uri, "--attempt", str(claim.attempt)]
    env = {**env, "VITLINE_SUBMITTED_FROM": json.dumps(compared_versions())}
    jobs.submit(claim.job_id, command, env=env, metadata=metadata)
    tell_of(engines, run, claim)


def tell_of(engines: Engines, run: Store, claim: Claim) -> None:
    """Tells MLflow's shipper and whoever looks on of an attempt that is followed from here."""
    engines.shipper.follow(claim.run_key)
    page, url = engines.cluster.jobs.page(claim.job_id), engines.shipper.run_url(claim.run_key)
    engines.observer.submitted(claim.run_key, page, run.uri, url)


def adopt(engines: Engines, run: Store, skipped: Skipped) -> Claim:
    """The claim of a living attempt that nobody follows any more: it is followed from here on. Else raises `skipped`."""
    claim = skipped.claim
    record = next((r for r in attempt_records(run) if claim is not None and r.job_id == claim.job_id), None)
    if claim is None or record is None or is_followed(engines, record.origin):
        raise skipped
    engines.observer.say(f"{claim.job_id} is at work, but the flow that started it is gone; following it from here")
    adopted = replace(record, origin=engines.origin)
    run.write_json(f"attempts/a{claim.attempt}.json", adopted.model_dump(mode="json"))
    tell_of(engines, run, claim)
    return claim


def is_followed(engines: Engines, origin: Origin) -> bool:
    """Whether the flow run that submitted a job is alive: it writes a sign of life to the store every few seconds."""
    if origin.pipeline is not None and origin.pipeline == engines.origin.pipeline:
        return False  # we hold the claim of that pipeline, so the process that held it is dead
    if origin.flow_run_id is None:
        return True  # somebody's shell, of which no sign of life is known
    if origin.flow_run_id == engines.origin.flow_run_id:
        return False
    root, deadline = open_store(engines.root), time.monotonic() + 3 * heartbeat.BEAT_S
    first = now = heartbeat.beat_of(root, origin.flow_run_id)
    while now is not None and now == first and time.monotonic() < deadline:
        engines.observer.check()
        time.sleep(POLL_S)
        now = heartbeat.beat_of(root, origin.flow_run_id)
    return now is not None and now != first


@contextlib.contextmanager
def exclusively(engines: Engines, name: str) -> Iterator[ClaimHolder]:
    """Held while this process does something that has no job of its own, such as a whole pipeline.

    Raises Skipped where a living process holds `claims/<name>`. After a kill the next one waits for the heartbeat to
    grow old; there is no job to ask about.
    """
    store = open_store(engines.root).child(f"claims/{name}")
    claim = claim_or_skip(engines, store, name, FLOW_CLAIM_S, lambda job: None)
    with ClaimHolder(store, claim.attempt, every_s=FLOW_CLAIM_S / 6) as holder:
        try:
            yield holder
        finally:
            with contextlib.suppress(ClaimLost, OSError, RuntimeError):
                holder.release()


def claim_or_skip(
    engines: Engines, run: Store, key: str, claim_timeout_s: float, job_state: Callable[[str], str | None]
) -> Claim:
    """The claim of the next attempt. A heartbeat that has stopped is waited out; a living attempt raises Skipped: one
    whose heartbeat moves, or that Ray goes on listing as unfinished."""
    started, last_beat = time.monotonic(), None
    owner = f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}"
    while True:
        try:
            return take_claim(
                run,
                key,
                job_state=job_state,
                owner=owner,
                page=engines.origin.flow_run_url,
                claim_timeout_s=claim_timeout_s,
            )
        except ClaimHeld as held:
            unknown = job_state(held.claim.job_id) is None
            patience_s = claim_timeout_s + 5 if unknown else LIVING_S
            beats = last_beat is not None and held.claim.heartbeat > last_beat
            # The process of this flow run from before it was suspended and resumed is about to let go.
            ours = held.claim.page is not None and held.claim.page == engines.origin.flow_run_url
            if beats and ours and unknown:
                started = time.monotonic()
            elif beats or time.monotonic() - started > patience_s:
                where = f": {held.claim.page}" if held.claim.page else "."
                raise Skipped(f"{held} It goes on there{where}", held.claim) from held
            if last_beat is None:
                engines.observer.say(f"{key}: an attempt was here a moment ago; waiting to see whether it lives")
            last_beat = held.claim.heartbeat
            engines.observer.check()
            time.sleep(POLL_S)


def job_state(engines: Engines, run: Store, job_id: str) -> str | None:
    """What Ray says of a job; of one that it does not know, whether the run's own state says that it has ended."""
    job = engines.cluster.jobs.find(job_id)
    if job is not None:
        return job.state
    state = read_state(run)
    ended = state is not None and state["state"] != "running" and job_id.endswith(f"-a{state['attempt']}")
    return "failed" if ended else None


def news(progress: Callable[[], Progress | None], left: Progress | None) -> Callable[[], Progress | None]:
    """`progress` as long as it is another than what an earlier attempt has `left`; None before."""

    def latest() -> Progress | None:
        now = progress()
        return None if now == left else now

    return latest


def follow(
    engines: Engines, run: Store, claim: Claim, title: str, progress: Callable[[], Progress | None], grace_s: float
) -> Job:
    """The job once it has ended. What interrupts the following stops the job first, where the one who looks on says so."""
    look_at, waits = time.monotonic() + WAITING_S, ""
    with engines.observer.stage(title) as show:

        def on_poll(job: Job) -> None:
            nonlocal look_at, waits
            now = progress()
            if now is not None:
                waits = ""
            elif time.monotonic() > look_at:
                found, look_at = at_work(engines, claim.job_id), time.monotonic() + LOOK_S
                if found != waits:
                    engines.observer.say(f"{title} has not begun; {found}")
                waits = found
            show({"waits": waits} if waits else now)
            engines.observer.check()

        try:
            return engines.cluster.jobs.follow(claim.job_id, on_poll, poll_s=POLL_S)
        except BaseException as error:
            if waits and isinstance(error, StopRequested) and error.reason == "out_of_time":
                error.args = (f"{error}, and {title} had not begun; {waits}",)
            stop = engines.observer.stop(error)
            if stop is not None:
                stop_attempt(engines, run, claim, stop.reason, by=str(stop), grace_s=grace_s)
            raise


def at_work(engines: Engines, but: str) -> str:
    """Which other jobs hold the cluster, and what makes room; of those that wait for room, too, only that they do."""
    others = [job for job in engines.cluster.jobs.list() if not job.terminal and job.id != but]
    waiting = [job for job in others if not has_begun(engines, job)]
    working = [job for job in others if job not in waiting]
    if not working:
        return f"no other job of this cluster is at work{waits_too(waiting)}"
    keys = [job.metadata["run_key"] for job in working if "run_key" in job.metadata]
    room = f" (`vitline ops preempt {keys[0]}` makes room: that run saves, gives way and goes on later)" if keys else ""
    return f"also at work: {', '.join(job.id for job in working)}{room}{waits_too(waiting)}"


def waits_too(jobs: Sequence[Job]) -> str:
    return f"; waiting, too: {', '.join(job.id for job in jobs)}" if jobs else ""


def has_begun(engines: Engines, job: Job) -> bool:
    """Whether a living job is known to have begun its work; of one that is not ours, nothing else is known."""
    key = job.metadata.get("run_key")
    state = read_state(run_store(engines.root, key)) if key else None
    return key is None or (state is not None and job.id == f"{key}-a{state['attempt']}")


def stop_attempt(engines: Engines, run: Store, claim: Claim, reason: StopReason, by: str, grace_s: float) -> None:
    """Ends an attempt: `stop.json`, then a signal to its driver, then Ray's SIGKILL; and a verdict where it said nothing."""
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
            # The driver of a training has its grace to save once more: a longer one than a cancelled flow has to end.
            job = jobs.stop(claim.job_id, wait_s=STOP_MARGIN_S + (0 if reason == "cancelled" else grace_s))
        except TimeoutError as late:
            engines.observer.say(f"{late} `vitline ops reconcile` looks again.")
            return
    state = read_state(run)
    if state is None or state["attempt"] < claim.attempt or state["state"] == "running":
        write_reconciled_state(run, reason, claim.attempt, by)


def stop_jobs_of(engines: Engines, flow_run_id: str) -> list[str]:
    """Cancels the jobs that a flow run has left at work; the ids of those."""
    left = [job for job in engines.cluster.jobs.list({"flow_run_id": flow_run_id}) if not job.terminal]
    for job in left:
        key = job.metadata["run_key"]
        run = run_store(engines.root, key)
        claim = read_claim(run)
        if claim is not None and claim.job_id == job.id:
            stop_attempt(engines, run, claim, "cancelled", by="cancelled in Prefect", grace_s=CANCEL_PATIENCE_S)
        else:
            engines.cluster.jobs.stop(job.id, wait_s=STOP_MARGIN_S)
    return [job.id for job in left]


def failure(engines: Engines, run: Store, claim: Claim, job: Job) -> StageFailed:
    """What ended a stage in one sentence; the one who looks on gets the last lines of its log beside it."""
    key, state = claim.run_key, read_state(run) or {}
    where = f"{run.uri_of('state.json')}, job {claim.job_id}"
    ended: RunState
    tail = cleaned("\n".join(engines.cluster.jobs.logs(claim.job_id).splitlines()[-LOG_LINES:]))
    if state.get("attempt") == claim.attempt and state.get("state") not in (None, "running"):
        reason, ended = state.get("reason", "no reason given"), state["state"]
        if state.get("no_room"):
            reason = f"{reason}; {at_work(engines, claim.job_id)}"
        text = f"{key} is {ended}: {reason} ({where}). Mend that and run the same command again: it goes on there."
    else:
        ended = "cancelled" if job.state == "stopped" else "failed"
        reason = cleaned(f"the job ended without a result ({job.message or job.state})")
        lacks = re.search(r"No module named '?([\w.]+)", tail)
        if job.exit_code in NO_COMMAND or lacks:
            problem = f"has no {lacks[1]}" if lacks else "cannot be run"
            reason += f". {engines.cluster.python} {problem} there; name a Python with vitline by VITLINE_JOB_PYTHON"
        write_reconciled_state(run, ended, claim.attempt, reason)
        text = f"{key}: {reason} ({where}); the same command goes on. Its last lines:\n" + "\n".join(
            tail.splitlines()[-15:]
        )
    engines.observer.failed(key, reason, tail)
    return StageFailed(text, ended)
