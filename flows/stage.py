"""A stage as every flow runs it: reuse what is finished, take the claim, submit a Ray job, follow it (DESIGN 3.3)."""

import contextlib
import getpass
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infra.claims import Claim, ClaimHeld, take_claim
from infra.local.ray_node import LocalRay
from infra.ray_jobs import Job, JobLost, RayJobs
from infra.run_state import OUTCOMES, read_state, request_stop
from infra.settings import Settings
from infra.storage import Store, open_store, probe_conditional_writes

log = logging.getLogger(__name__)
MAX_ATTEMPTS = 3
POLL_S = 0.5
# How long a job that Ray lists as unfinished may take to be found dead: Ray notices a killed driver with a delay.
LIVING_S = 10.0
# Ray's own wait before it kills a stopped job is a second longer than the grace; this is longer than that.
STOP_MARGIN_S = 5.0


class StageFailed(RuntimeError):
    """A stage that ended in another state than finished; the text is one sentence and the next step."""


class Skipped(RuntimeError):
    """A living attempt of the same run is at work elsewhere."""


@dataclass(frozen=True)
class StageResult:
    """How a stage ended: its final state, whether it had been finished before, seconds spent now."""

    state: dict[str, Any]
    reused: bool
    wall_s: float


class Cluster:
    """Where jobs are sent: the job server at RAY_ADDRESS, else a one-node Ray that is started at the first job.

    A command whose stages are all finished starts nothing. Leaving the context stops what was started here.
    """

    def __init__(self, settings: Settings, log_dir: Path, announce: Callable[[str], None] = log.info):
        self.settings, self.log_dir, self.announce = settings, log_dir, announce
        self.local: LocalRay | None = None
        self._jobs: RayJobs | None = None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        if self.local is not None:
            self.local.__exit__(None, None, None)

    def restart(self) -> None:
        """After the cluster was lost: a local Ray is started anew at the next job, a remote one is asked again."""
        self.__exit__()
        self.local, self._jobs = None, None

    @property
    def jobs(self) -> RayJobs:
        if self._jobs is None:
            address = self.settings.ray_address
            if address is None:
                self.announce("starting a one-node Ray (dashboard on loopback, token authentication)")
                self.local = LocalRay(self.log_dir)
                self.local.__enter__()
                env = self.local.env
                self._jobs = RayJobs(env["RAY_ADDRESS"], token_path=env["RAY_AUTH_TOKEN_PATH"])
            else:
                self._jobs = RayJobs(address)
        return self._jobs


def run_store(root: str, key: str) -> Store:
    """The folder of a run."""
    return open_store(root).child(f"runs/{key}")


def run_stage(
    run: Store,
    key: str,
    module: str,
    config: BaseModel,
    cluster: Cluster,
    *,
    on_poll: Callable[[], None],
    output: Callable[[dict[str, Any]], bool] = lambda state: True,
    grace_s: float,
    claim_timeout_s: float,
    env: dict[str, str] | None = None,
) -> StageResult:
    """Brings the run to its end: returns at once when it is finished, else starts the next attempt and follows it.

    `config` becomes the run's config.json once the claim is taken: only its holder ever writes there. `output(state)` says
    whether what a finished run made is still there; if not, the run is done again. A preempted attempt and a lost
    cluster are followed by another, up to MAX_ATTEMPTS in this call. Raises Skipped when a living attempt holds the
    claim, StageFailed for every other end. Ctrl-C asks the job to write a checkpoint and stop.
    """
    started = time.monotonic()

    def finished() -> dict[str, Any] | None:
        state = read_state(run)
        return state if state is not None and state["state"] == "finished" and output(state) else None

    if (state := finished()) is not None:
        return StageResult(state, True, time.monotonic() - started)
    probe_conditional_writes(run)
    for _ in range(MAX_ATTEMPTS):
        claim = claim_or_skip(run, key, cluster, claim_timeout_s)
        if (state := finished()) is not None:  # by the attempt that was waited for
            return StageResult(state, True, time.monotonic() - started)
        run.write_json("config.json", config.model_dump(mode="json"))
        command = [sys.executable, "-m", module, "--run", run.uri, "--attempt", str(claim.attempt)]
        wait = {"RAY_JOB_STOP_WAIT_TIME_S": str(int(grace_s) + 1)}
        cluster.jobs.submit(claim.job_id, command, env={**wait, **(env or {})}, metadata={"run_key": key})
        try:
            job = follow(run, claim, cluster, on_poll, grace_s)
        except JobLost as lost:
            log.warning("%s The next attempt resumes %s.", lost, key)
            cluster.restart()
            continue
        if (state := finished()) is not None:
            return StageResult(state, False, time.monotonic() - started)
        if job.exit_code != OUTCOMES["preempted"].exit_code:
            raise StageFailed(explain(run, key, claim, cluster, read_state(run) or {}))
        log.warning("attempt %d of %s was preempted; the next one resumes it", claim.attempt, key)
    raise StageFailed(
        f"{key} was preempted or lost its cluster {MAX_ATTEMPTS} times in a row; run the same command again to go on."
    )


def claim_or_skip(run: Store, key: str, cluster: Cluster, claim_timeout_s: float) -> Claim:
    """The claim of the next attempt. A heartbeat that has stopped is waited out; a living attempt raises Skipped: one
    whose heartbeat moves, or that Ray goes on listing as unfinished."""
    started, last_beat = time.monotonic(), None
    owner = f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}"
    while True:
        try:
            return take_claim(
                run,
                key,
                job_state=lambda job: job_state(run, cluster, job),
                owner=owner,
                claim_timeout_s=claim_timeout_s,
            )
        except ClaimHeld as held:
            patience_s = claim_timeout_s + 5 if job_state(run, cluster, held.claim.job_id) is None else LIVING_S
            beats = last_beat is not None and held.claim.heartbeat > last_beat
            if beats or time.monotonic() - started > patience_s:
                raise Skipped(f"{held} It goes on there; its state is in {run.uri_of('state.json')}.") from held
            if last_beat is None:
                cluster.announce(f"{key}: an attempt was here a moment ago; waiting to see whether it lives")
            last_beat = held.claim.heartbeat
            time.sleep(POLL_S)


def job_state(run: Store, cluster: Cluster, job_id: str) -> str | None:
    """What Ray says of a job; of one that it does not know, whether the run's own state says that it has ended."""
    job = cluster.jobs.find(job_id)
    if job is not None:
        return job.state
    state = read_state(run)
    ended = state is not None and state["state"] != "running" and job_id.endswith(f"-a{state['attempt']}")
    return "failed" if ended else None


def follow(run: Store, claim: Claim, cluster: Cluster, on_poll: Callable[[], None], grace_s: float) -> Job:
    try:
        return cluster.jobs.follow(claim.job_id, lambda job: on_poll(), poll_s=POLL_S)
    except KeyboardInterrupt:
        cluster.announce("stopping: the job writes a checkpoint first (Ctrl-C again to stop at once)")
        request_stop(run, "preempted", by="Ctrl-C", attempt=claim.attempt)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            job = cluster.jobs.find(claim.job_id)
            if job is None or job.terminal:
                break
            time.sleep(POLL_S)
        else:
            with contextlib.suppress(TimeoutError):
                cluster.jobs.stop(claim.job_id, wait_s=grace_s + STOP_MARGIN_S)
        raise


def explain(run: Store, key: str, claim: Claim, cluster: Cluster, state: dict[str, Any]) -> str:
    """One sentence of what ended a stage, with the last lines of its log where the job left no reason."""
    where = f"{run.uri_of('state.json')}, job {claim.job_id}"
    if state.get("attempt") == claim.attempt and state.get("state") not in (None, "running"):
        reason = state.get("reason", "no reason given")
        return f"{key} is {state['state']}: {reason} ({where}). Mend that and run the same command again: it goes on there."
    tail = "\n".join(cluster.jobs.logs(claim.job_id).splitlines()[-15:])
    return f"{key}: the job ended without a result ({where}); the same command goes on. Its last lines:\n{tail}"
