"""Many small trainings, or features in bulk, in one Ray job, packed onto the CPUs or GPUs of the cluster.

python -m vit.ray_workers --run URI --attempt N
"""

import argparse
import logging
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from infra.provenance import differing_versions
from infra.redact import log_to_stderr
from infra.runs.claims import ClaimHolder, ClaimLost
from infra.runs.run_state import CLAIM_LOST_EXIT_CODE, OUTCOMES, RunState, write_state
from infra.runs.stopping import StopPoller, handlers_kept, stop_on_signals
from infra.storage import Store, open_store
from vit.ray_train import declared_resources
from vit.vtab.evaluate import (
    EvaluationSpec,
    Score,
    TaskSweep,
    next_trials,
    plan_task_sweeps,
    record_score,
    stored_score,
    total_trials,
)
from vit.vtab.frozen.extract_features import Extractor
from vit.vtab.frozen.feature_plan import FeaturePart, work_chunks
from vit.vtab.frozen.frozen import frozen_scores
from vit.vtab.frozen.probe_trials import ProbeTrial
from vit.vtab.frozen.score_probes import score_probe
from vit.vtab.probes import Probe
from vit.vtab.trained.packing import trial_resources
from vit.vtab.trained.run_trial import ensure_trial
from vit.vtab.trained.trials import Trial

log = logging.getLogger(__name__)
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
    if differ := differing_versions():
        return "failed", {"reason": differ}
    try:
        with StopPoller(run, attempt) as stop:
            frozen = isinstance(spec.protocol, Probe)
            on_ray = (features_on_ray, probe_trials_on_ray)
            scores = frozen_scores(run, spec, stop, *on_ray) if frozen else Sweep(run, spec, stop).execute()
            reason = stop.asked()
    except Exception as error:
        log.exception("the evaluation ended")
        # Ray wraps what a trial raised in the text of its traceback; the cause is the sentence for people.
        cause = getattr(error, "cause", None) or error
        return "failed", {"reason": f"{type(cause).__name__}: {str(cause)[:2000]}"}
    if scores is None:
        return reason or "preempted", {"reason": stop.by}
    return "finished", {"scores": [score.model_dump(mode="json") for score in scores]}


class Sweep:
    """Runs what is left of every contest; finished trials lie in the store and are not run again."""

    def __init__(self, run: Store, spec: EvaluationSpec, stop: StopPoller):
        self.run, self.spec, self.stop = run, spec, stop
        self.root = open_store(spec.root)
        self.trials_uri = self.root.uri_of("trials")
        self.started = time.monotonic()

    def execute(self) -> list[Score] | None:
        """The scores in the order of the contests, or None when a stop was asked for."""
        import ray

        cluster = start_ray()
        work: Any = ray.remote(ensure_trial)
        task_sweeps = plan_task_sweeps(self.spec)
        scores: dict[int, Score] = {
            i: s for i, c in enumerate(task_sweeps) if (s := stored_score(self.root, c)) is not None
        }
        running: dict[Any, tuple[int, Trial]] = {}
        left = [0 if i in scores else len(c.settings) + 1 for i, c in enumerate(task_sweeps)]
        total, done_before = total_trials(task_sweeps), -1

        def launch(index: int, task_sweep: TaskSweep) -> None:
            todo, score = next_trials(task_sweep, open_store(self.trials_uri))
            busy = {trial.key for _, trial in running.values()}
            for trial in (trial for trial in todo if trial.key not in busy):
                cpus, gpus, threads = trial_resources(trial.recipe, cluster)
                placed = work.options(max_retries=3, num_cpus=cpus, num_gpus=gpus)
                running[placed.remote(self.trials_uri, trial, threads)] = (index, trial)
            if score is not None:
                scores[index] = record_score(self.root, task_sweep, score)
            selecting = bool(todo) and todo[0].phase == "select"
            left[index] = len(todo) + selecting

        while True:
            # Contests may share trials (a task named twice): whoever has nothing running looks what is left for it.
            at_work = {index for index, _ in running.values()}
            for index, task_sweep in enumerate(task_sweeps):
                if index not in scores and index not in at_work:
                    launch(index, task_sweep)
            if done_before < 0:
                done_before = total - sum(left)
            self._progress(total - sum(left), total, done_before, running)
            if not running:
                return [scores[index] for index in range(len(task_sweeps))]
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


def features_on_ray(root: str, parts: Sequence[FeaturePart]) -> Iterator[FeaturePart]:
    """Parts as they are kept, by one Ray Data execution: actors that hold on to their model, each with a GPU, or a CPU
    where there are no GPUs. Raises RuntimeError with the message of a worker that failed for a reason of its own."""
    import ray.data

    cluster = start_ray()
    cpus, gpus = int(cluster.get("CPU", 1)), int(cluster.get("GPU", 0))
    workers, threads = max(gpus or cpus, 1), max(cpus // gpus, 1) if gpus else 1
    for handler in logging.getLogger("ray.data").handlers:
        if handler.get_name() == "console":  # says when the execution starts and ends; its own file keeps that
            handler.setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # Else Ray holds back what an actor yields until a block is full: here, until the whole errand is done.
    context.target_max_block_size = 1
    rows = [{"errand": pickle.dumps((root, threads, errand))} for errand in work_chunks(parts, workers)]
    kept = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        FeatureWorker,
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(workers, len(rows))),
        num_cpus=1,
        num_gpus=1 if gpus else 0,
    )
    for row in kept.iter_rows():
        part, error = pickle.loads(row["kept"])
        if error:
            raise RuntimeError(error)
        yield part


class FeatureWorker:
    """An actor of `features_on_ray`: runs errands, and tells of every part as soon as it is kept."""

    def __init__(self) -> None:
        self._extractor: Extractor | None = None

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        root, threads, errand = pickle.loads(batch.column("errand")[0].as_py())
        self._extractor = self._extractor or Extractor(root, threads)
        # An error of ours comes back as a value: as an exception, Ray Data would wrap it in pages of traceback.
        try:
            for part in self._extractor.ensure(errand):
                yield pa.table({"kept": [pickle.dumps((part, ""))]})
        except (ValueError, RuntimeError, OSError) as error:
            yield pa.table({"kept": [pickle.dumps((None, f"{type(error).__name__}: {error}"))]})


def probe_trials_on_ray(root: str, probe_trials: Sequence[ProbeTrial]) -> Iterator[tuple[ProbeTrial, Score]]:
    """Scores as they are recorded, each by a Ray task with a CPU, and a GPU where there are any."""
    import ray

    num_gpus = 1 if start_ray().get("GPU") else 0
    work = ray.remote(score_probe).options(max_retries=3, num_cpus=1, num_gpus=num_gpus)
    running = {work.remote(root, probe_trial): probe_trial for probe_trial in probe_trials}
    try:
        while running:
            (ref,), _ = ray.wait(list(running), num_returns=1)
            yield running.pop(ref), ray.get(ref)
    finally:
        for ref in running:
            ray.cancel(ref, force=True)


def start_ray() -> dict[str, float]:
    """Joins the cluster that the job runs in; its resources, those included that its autoscaler's node types can bring: work
    that asks for them waits for them."""
    import ray

    with handlers_kept():
        ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
    alive, most = ray.cluster_resources(), declared_resources() or {}
    return alive | {name: max(alive.get(name, 0), most.get(name, 0)) for name in ("CPU", "GPU") if name in alive | most}


if __name__ == "__main__":
    main()
