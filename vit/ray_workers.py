"""Many small trainings in one Ray job, packed onto the CPUs or fractions of GPUs of the cluster.

python -m vit.ray_workers --run URI --attempt N
"""

import argparse
import logging
import os
import sys
import time
from typing import Any

from infra.claims import ClaimHolder, ClaimLost
from infra.redact import log_to_stderr
from infra.run_state import CLAIM_LOST_EXIT_CODE, OUTCOMES, RunState, write_state
from infra.stopping import StopWatch, handlers_kept, stop_on_signals
from infra.storage import Store, open_store
from vit.vtab.evaluate import (
    Contest,
    EvaluationSpec,
    Score,
    next_trials,
    plan_contests,
    record_score,
    stored_score,
    total_trials,
)
from vit.vtab.run_trial import ensure_trial
from vit.vtab.trials import Trial

log = logging.getLogger(__name__)
# Trials this small use a fraction of a GPU; four together keep it busy while each waits for its own Python.
TRIALS_PER_GPU = 4
GRACE_S = 5.0


def main(argv: list[str] | None = None) -> None:
    """The job driver; leaves with the exit code of the evaluation's state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="URI of the evaluation: <root>/runs/<run key>")
    parser.add_argument("--attempt", required=True, type=int)
    args = parser.parse_args(argv)
    log_to_stderr()
    code = drive(open_store(args.run), args.attempt)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def drive(run: Store, attempt: int) -> int:
    """Runs one attempt to its end; returns the exit code. A stop loses only the trials that are running."""
    spec = EvaluationSpec.model_validate(run.read_json("config.json"))
    with ClaimHolder(run, attempt) as claim:
        write_state(run, "running", attempt)
        stop_on_signals(run.uri, attempt, grace_s=GRACE_S)
        state, detail = outcome(run, attempt, spec)
        try:
            claim.check()
        except ClaimLost:
            log.warning("run=%s attempt=%d: the claim is another attempt's; this one stops", run.uri, attempt)
            return CLAIM_LOST_EXIT_CODE
        write_state(run, state, attempt, **detail)
    return OUTCOMES[state].exit_code


def outcome(run: Store, attempt: int, spec: EvaluationSpec) -> tuple[RunState, dict[str, Any]]:
    """How the sweep ended, with the scores or the reason."""
    try:
        with StopWatch(run, attempt) as stop:
            scores = Sweep(run, spec, stop).execute()
            reason = stop.asked()
    except Exception as error:
        log.exception("the evaluation ended")
        # Ray wraps what a trial raised in the text of its traceback; the cause is the sentence for people.
        cause = getattr(error, "cause", None) or error
        return "failed", {"reason": f"{type(cause).__name__}: {str(cause)[:2000]}"}
    if scores is None:
        return reason or "preempted", {"reason": "stop.json asked for it"}
    return "finished", {"scores": [score.model_dump(mode="json") for score in scores]}


class Sweep:
    """Runs what is left of every contest; finished trials lie in the store and are not run again."""

    def __init__(self, run: Store, spec: EvaluationSpec, stop: StopWatch):
        self.run, self.spec, self.stop = run, spec, stop
        self.root = open_store(spec.root)
        self.trials_uri = self.root.uri_of("trials")
        self.started = time.monotonic()

    def execute(self) -> list[Score] | None:
        """The scores in the order of the contests, or None when a stop was asked for."""
        import ray

        with handlers_kept():
            ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
        work = ray.remote(ensure_trial).options(max_retries=3, **self._resources(ray.cluster_resources()))
        contests = plan_contests(self.spec)
        scores: dict[int, Score] = {
            i: s for i, c in enumerate(contests) if (s := stored_score(self.root, c)) is not None
        }
        running: dict[Any, tuple[int, Trial]] = {}
        left = [0 if i in scores else len(c.settings) + 1 for i, c in enumerate(contests)]
        total, done_before = total_trials(contests), -1

        def launch(index: int, contest: Contest) -> None:
            todo, score = next_trials(contest, open_store(self.trials_uri))
            busy = {trial.key for _, trial in running.values()}
            running.update({work.remote(self.trials_uri, t): (index, t) for t in todo if t.key not in busy})
            if score is not None:
                scores[index] = record_score(self.root, contest, score)
            selecting = bool(todo) and todo[0].phase == "select"
            left[index] = len(todo) + selecting

        while True:
            # Contests may share trials (a task named twice): whoever has nothing running looks what is left for it.
            at_work = {index for index, _ in running.values()}
            for index, contest in enumerate(contests):
                if index not in scores and index not in at_work:
                    launch(index, contest)
            if done_before < 0:
                done_before = total - sum(left)
            self._progress(total - sum(left), total, done_before, running)
            if not running:
                return [scores[index] for index in range(len(contests))]
            ready, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for ref in ready:
                index, trial = running.pop(ref)
                result = ray.get(ref)
                left[index] -= 1
                log.info(
                    "trial=%s top1=%.4f examples=%d wall_s=%.1f",
                    trial.key,
                    result.top1,
                    result.num_examples,
                    result.wall_s,
                )
            if self.stop.asked() is not None:
                for ref in running:
                    ray.cancel(ref, force=True)
                return None

    def _resources(self, cluster: dict[str, float]) -> dict[str, float]:
        return {"num_cpus": 1, "num_gpus": 1 / TRIALS_PER_GPU} if cluster.get("GPU") else {"num_cpus": 1}

    def _progress(self, done: int, total: int, done_before: int, running: dict[Any, tuple[int, Trial]]) -> None:
        elapsed, done_now = time.monotonic() - self.started, done - done_before
        self.run.write_json(
            "progress.json",
            {
                "step": done,
                "total_steps": total,
                "unit": "trials",
                "remaining_s": elapsed / done_now * (total - done) if done_now else None,
                "running": sorted(trial.key for _, trial in running.values()),
            },
        )


if __name__ == "__main__":
    main()
