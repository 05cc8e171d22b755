"""The Ray job driver of an evaluation or a batch prediction: runs its trials, or computes its features or predictions, on all CPUs or GPUs
of the cluster.

python -m vitline.vit.ray_jobs.task_driver --run URI --attempt N
"""

import logging
import pickle
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from vitline.infra.provenance import require_same_versions
from vitline.infra.runs.attempt import Ending, driver_main, run_attempt
from vitline.infra.runs.handle import Run
from vitline.infra.runs.progress import RunProgress, remaining_s
from vitline.infra.runs.stopping import joining_ray
from vitline.infra.runs.task_watch import PROGRESS_TIMEOUT_S, TaskWatch
from vitline.infra.runs.watchdog import Watchdog
from vitline.infra.storage import Store, open_store
from vitline.vit.evaluation.evaluate import (
    EvaluationSpec,
    NoSettingLeft,
    Score,
    next_trials,
    plan_task_sweeps,
    record_score,
    stored_score,
    total_trials,
)
from vitline.vit.evaluation.packing import trial_resources
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.run_trial import ensure_trial
from vitline.vit.evaluation.trials import Trial
from vitline.vit.features.extract_features import Extractor
from vitline.vit.features.feature_plan import FeaturePart, work_chunks
from vitline.vit.features.frozen import frozen_scores
from vitline.vit.features.predict import Predictor, predict
from vitline.vit.features.prediction_plan import PredictionSpec
from vitline.vit.features.probe_trials import ProbeTrial
from vitline.vit.features.score_probes import score_probe
from vitline.vit.ray_jobs.ray_private import declared_resources

log = logging.getLogger(__name__)
MAX_RETRIES = 3


def drive(run: Store, attempt: int) -> int:
    """Runs one attempt to its end and returns the exit code. A stop loses only the trials, or parts, that are running."""
    config = run.read_json("config.json")
    if "top_k" in config:
        return drive_prediction(run, attempt, PredictionSpec.model_validate(config))
    spec = EvaluationSpec.model_validate(config)

    def work(held: Run) -> Ending:
        frozen = isinstance(spec.protocol, Probe)
        compute = partial(parts_on_ray, watch=TaskWatch(run.uri, attempt))
        on_ray = compute, partial(probe_trials_on_ray, run=run, attempt=attempt)
        sweep = None if frozen else Sweep(held, spec)
        scores = sweep.execute() if sweep else frozen_scores(held, spec, *on_ray)
        if scores is None:
            return held.stopped() or "preempted", {"reason": held.stopped_by}
        detail = {"scores": [score.model_dump(mode="json") for score in scores]}
        if sweep and sweep.failed:
            recorded = f". The other scores ({len(scores)}) are recorded" if scores else ""
            return "failed", {"reason": f"{'. '.join(sweep.failed.values())}{recorded}", **detail}
        return "finished", detail

    return run_attempt(run, attempt, work, ends_when_stopped=False)


def drive_prediction(run: Store, attempt: int, spec: PredictionSpec) -> int:
    """Runs one attempt of a batch prediction."""

    def work(held: Run) -> Ending:
        compute = partial(parts_on_ray, watch=TaskWatch(run.uri, attempt), extractor=Predictor)
        counts = predict(held, spec, compute)
        if counts is None:
            return held.stopped() or "preempted", {"reason": held.stopped_by}
        return "finished", {"predicted": counts._asdict()}

    return run_attempt(run, attempt, work, ends_when_stopped=False)


class Sweep:
    """Runs the trials of an evaluation as Ray tasks. Finished trials are in the store and do not run again."""

    def __init__(self, held: Run, spec: EvaluationSpec) -> None:
        self.held, self.started = held, time.monotonic()
        self.root = open_store(spec.root)
        self.trials = open_store(self.root.uri_of("trials"))
        self.task_sweeps = plan_task_sweeps(spec)
        self.scores: dict[int, Score] = {
            i: score
            for i, sweep in enumerate(self.task_sweeps)
            if (score := stored_score(self.root, sweep)) is not None
        }
        # Trials that each task sweep has not finished yet: all settings, and the final trial.
        self.num_left = [0 if i in self.scores else len(s.settings) + 1 for i, s in enumerate(self.task_sweeps)]
        # Task sweeps of which every setting has failed, with the reason.
        self.failed: dict[int, str] = {}
        # The Ray tasks in flight, each with the index of its task sweep.
        self.running: dict[Any, tuple[int, Trial]] = {}

    def execute(self) -> list[Score] | None:
        """The scores in the order of the task sweeps, without those that failed; None if a stop was requested."""
        import ray

        cluster = start_ray()
        self._start_trials(cluster)
        done_before = self._num_done()
        while self.running:
            self._write_progress(done_before)
            ready, _ = ray.wait(list(self.running), num_returns=1, timeout=1.0)
            for ref in ready:
                self._finish_trial(ref)
            if self.held.stopped() is not None:
                for ref in self.running:
                    ray.cancel(ref, force=True)
                return None
            self._start_trials(cluster)
        self._write_progress(done_before)
        return [self.scores[index] for index in sorted(self.scores)]

    def _start_trials(self, cluster: dict[str, float]) -> None:
        """For each unscored task sweep without a running trial: starts its next trials, or records its score."""
        import ray

        work: Any = ray.remote(ensure_trial)
        occupied = {index for index, _ in self.running.values()} | set(self.scores) | set(self.failed)
        for index in (i for i in range(len(self.task_sweeps)) if i not in occupied):
            task_sweep = self.task_sweeps[index]
            try:
                todo, score = next_trials(task_sweep, self.trials)
            except NoSettingLeft as error:
                log.error("%s", error)
                self.failed[index], self.num_left[index] = str(error), 0
                continue
            # Task sweeps share trials where a task is given twice: do not start a trial that runs for another one.
            in_flight = {trial.key for _, trial in self.running.values()}
            for trial in (trial for trial in todo if trial.key not in in_flight):
                cpus, gpus, threads = trial_resources(trial.recipe, cluster)
                task = work.options(max_retries=MAX_RETRIES, num_cpus=cpus, num_gpus=gpus)
                watchdog = trial_watchdog(self.held.store, self.held.attempt, trial.key)
                self.running[task.remote(self.trials.uri, trial, threads, watchdog)] = (index, trial)
            if score is not None:
                self.scores[index] = record_score(self.root, task_sweep, score)
            final_to_come = bool(todo) and todo[0].phase == "select"
            self.num_left[index] = len(todo) + final_to_come

    def _finish_trial(self, ref: Any) -> None:
        import ray

        index, trial = self.running.pop(ref)
        try:
            result = ray.get(ref)
        except ray.exceptions.WorkerCrashedError as error:
            raise RuntimeError(crashed(self.held.store, self.held.attempt, trial.key)) from error
        self.num_left[index] -= 1
        log.info(
            "trial=%s top1=%.4f examples=%d wall_s=%.1f", trial.key, result.top1, result.num_examples, result.wall_s
        )
        if result.failure:
            log.warning("trial=%s is a failed setting: %s", trial.key, result.failure)

    def _num_done(self) -> int:
        return total_trials(self.task_sweeps) - sum(self.num_left)

    def _write_progress(self, done_before: int) -> None:
        done, total = self._num_done(), total_trials(self.task_sweeps)
        elapsed, done_now = time.monotonic() - self.started, done - done_before
        progress: RunProgress = {
            "step": done,
            "total_steps": total,
            "unit": "trials",
            "remaining_s": remaining_s(done_now, total - done, elapsed),
            "running": sorted(trial.key for _, trial in self.running.values()),
        }
        self.held.show(progress)


def trial_watchdog(run: Store, attempt: int, trial_key: str) -> Watchdog:
    """Ends the process of a trial that hangs; Ray runs the trial again."""
    return Watchdog(run.uri, attempt, PROGRESS_TIMEOUT_S, who=f"trial-{trial_key}")


def crashed(run: Store, attempt: int, trial_key: str) -> str:
    """Why the processes of a trial ended again and again: the last error that its watchdog left, or that it left none."""
    keys = [key for key in run.list(f"errors/a{attempt}-") if key.endswith(f"-trial-{trial_key}.json")]
    why = f"the last error: {run.read_json(keys[-1])['error']}" if keys else "it was killed, perhaps for its memory"
    return f"the process of trial {trial_key} ended {MAX_RETRIES + 1} times without a result; {why}"


def parts_on_ray(
    root: str, parts: Sequence[FeaturePart], watch: TaskWatch, extractor: type[Extractor] = Extractor
) -> Iterator[FeaturePart]:
    """Computes parts with one Ray Data execution and yields each part once it is stored.

    The work runs in actors that keep their model loaded, each with one GPU, or one CPU where there are no GPUs. Raises
    RuntimeError with the worker's message if a part cannot be computed, or if its workers end each time. `watch` ends workers
    that hang; Ray starts them again.
    """
    import ray.data

    cluster = start_ray()
    cpus, gpus = int(cluster.get("CPU", 1)), int(cluster.get("GPU", 0))
    workers, threads = max(gpus or cpus, 1), max(cpus // gpus, 1) if gpus else 1
    for handler in logging.getLogger("ray.data").handlers:
        if handler.get_name() == "console":  # reports start and end of the execution; Ray Data's log file has them too
            handler.setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # Otherwise Ray holds back what an actor yields until a block is full: here, until a whole work chunk is done.
    context.target_max_block_size = 1
    rows = [{"chunk": pickle.dumps((extractor, root, threads, chunk, watch))} for chunk in work_chunks(parts, workers)]
    results = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        PartWorker,
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(workers, len(rows))),
        num_cpus=1,
        num_gpus=1 if gpus else 0,
    )
    for row in results.iter_rows():
        part, error = pickle.loads(row["result"])
        if error:
            raise RuntimeError(error)
        yield part


class PartWorker:
    """An actor of `parts_on_ray`: computes work chunks and yields each part as soon as it is stored."""

    def __init__(self) -> None:
        self._extractor: Extractor | None = None

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        # An expected error is returned as a value: Ray Data would wrap an exception in pages of traceback.
        try:
            require_same_versions()
            extractor, root, threads, chunk, watch = pickle.loads(batch.column("chunk")[0].as_py())
            self._extractor = self._extractor or extractor(root, threads)
            parts = self._extractor.ensure(chunk)
            for planned in chunk:
                # Between two parts Ray may hold this process back for as long as it likes.
                with watch.over(f"{planned.source.folder}/{planned.key}".replace("/", "-")):
                    part = next(parts)
                yield pa.table({"result": [pickle.dumps((part, ""))]})
        except (ValueError, RuntimeError, OSError) as error:
            yield pa.table({"result": [pickle.dumps((None, f"{type(error).__name__}: {error}"))]})


def probe_trials_on_ray(
    root: str, probe_trials: Sequence[ProbeTrial], run: Store, attempt: int
) -> Iterator[tuple[ProbeTrial, Score]]:
    """Runs each probe trial as a Ray task with one CPU, and one GPU where there are any; yields scores once recorded.

    Raises RuntimeError with the last error of its watchdog for a trial whose processes end again and again.
    """
    import ray

    num_gpus = 1 if start_ray().get("GPU") else 0
    work = ray.remote(watched_probe).options(max_retries=MAX_RETRIES, num_cpus=1, num_gpus=num_gpus)
    running = {
        work.remote(root, probe_trial, trial_watchdog(run, attempt, probe_trial.key)): probe_trial
        for probe_trial in probe_trials
    }
    try:
        while running:
            (ref,), _ = ray.wait(list(running), num_returns=1)
            probe_trial = running.pop(ref)
            try:
                score = ray.get(ref)
            except ray.exceptions.WorkerCrashedError as error:
                raise RuntimeError(crashed(run, attempt, probe_trial.key)) from error
            yield probe_trial, score
    finally:
        for ref in running:
            ray.cancel(ref, force=True)


def watched_probe(root: str, probe_trial: ProbeTrial, watchdog: Watchdog) -> Score:
    """The score of a probe trial, with the watchdog open meanwhile."""
    require_same_versions()
    with watchdog:
        return score_probe(root, probe_trial)


def start_ray() -> dict[str, float]:
    """Joins the cluster that the job runs in, and returns its resources.

    CPUs and GPUs include those of nodes that its autoscaler can still start: a task that needs them waits for them.
    """
    import ray

    with joining_ray():
        ray.init(ignore_reinit_error=True, logging_level=logging.WARNING)
    alive: dict[str, float] = ray.cluster_resources()
    most = dict(declared_resources() or {})
    return alive | {name: max(alive.get(name, 0), most.get(name, 0)) for name in ("CPU", "GPU") if name in alive | most}


if __name__ == "__main__":
    driver_main(__doc__, drive)
