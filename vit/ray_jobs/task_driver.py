"""The Ray job driver of an evaluation or a batch prediction: runs its trials, or computes its features or predictions, on all CPUs or GPUs
of the cluster.

python -m vitline.vit.ray_jobs.task_driver --run URI --attempt N
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from vitline.infra.config import digest_of
from vitline.infra.runs.attempt import Ending, driver_main, run_attempt
from vitline.infra.runs.handle import Run
from vitline.infra.runs.progress import ProgressWriter
from vitline.infra.runs.ray_work import RayTask, run_keyed, start_ray, usable_nodes
from vitline.infra.runs.task_watch import TaskWatch
from vitline.infra.storage import Store, open_store
from vitline.vit.config import Precision
from vitline.vit.evaluation.evaluate import (
    STOP_GRACE_S,
    AllSettingsFailed,
    EvaluationSpec,
    Score,
    next_trials,
    plan_task_sweeps,
    total_trials,
)
from vitline.vit.evaluation.packing import (
    Gpus,
    Place,
    Resources,
    flops_of_this_gpu,
    memory_of_this_gpu,
    trial_resources,
)
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.run_trial import TrialStopped, ensure_trial
from vitline.vit.evaluation.trials import Trial, TrialResult
from vitline.vit.features.extract_features import Extractor
from vitline.vit.features.feature_plan import FeaturePart, work_chunks
from vitline.vit.features.frozen import frozen_scores
from vitline.vit.features.predict import Predictor, predict
from vitline.vit.features.prediction_plan import PredictionSpec
from vitline.vit.features.probe_trials import ProbeTrial
from vitline.vit.features.score_probes import score_probe
from vitline.vit.ray_jobs.ray_private import declared_resources

log = logging.getLogger(__name__)
OnRay = Callable[..., Iterator[tuple[Any, Any]]]
"""`run_keyed` with the watch and the stop requests of an attempt."""
_LEAVE_S = 3.0  # of STOP_GRACE_S: to notice the request, and to write the state


def drive(run: Store, attempt: int) -> int:
    """Runs one attempt to its end and returns the exit code. A stop loses only the parts that are running; trials save what
    they have trained."""
    config = run.read_json("config.json")

    def work(held: Run) -> Ending:
        on_ray = partial(run_keyed, watch=TaskWatch(run.uri, attempt), stop=held.stopped)
        if "top_k" in config:
            wanted = PredictionSpec.model_validate(config)
            counts = predict(run, wanted, partial(parts_on_ray, on_ray, Predictor), held.check)
            return _stopped(held) if counts is None else ("finished", {"predicted": counts._asdict()})
        spec = EvaluationSpec.model_validate(config)
        if isinstance(spec.protocol, Probe):
            computed, scored = partial(parts_on_ray, on_ray, Extractor), partial(probes_on_ray, on_ray)
            found = frozen_scores(run, spec, computed, scored, held.check)
            return _stopped(held) if found is None else ("finished", _detail(found))
        sweep = Sweep(held, spec)
        sweep.execute(partial(on_ray, grace_s=STOP_GRACE_S - _LEAVE_S))
        scores = [sweep.scores[index] for index in sorted(sweep.scores)]
        if held.stopped():
            return _stopped(held)
        if sweep.failed:
            recorded = f". The other scores ({len(scores)}) are recorded" if scores else ""
            return "failed", {"reason": f"{'. '.join(sweep.failed.values())}{recorded}", **_detail(scores)}
        return "finished", _detail(scores)

    return run_attempt(run, attempt, work, grace_s=STOP_GRACE_S, ends_when_stopped=False)


def _stopped(held: Run) -> Ending:
    return held.stopped() or "preempted", {"reason": held.stopped_by}


def _detail(scores: Sequence[Score]) -> dict[str, Any]:
    return {"scores": [score.model_dump(mode="json") for score in scores]}


class Sweep:
    """Runs the trials of an evaluation as Ray tasks. Finished trials are in the store and do not run again."""

    def __init__(self, held: Run, spec: EvaluationSpec) -> None:
        self.held = held
        self.root = open_store(spec.root)
        self.trials = open_store(self.root.uri_of("trials"))
        self.task_sweeps = plan_task_sweeps(spec)
        self.scores: dict[int, Score] = {
            i: score
            for i, sweep in enumerate(self.task_sweeps)
            if (score := Score.load_or_none(self.root, sweep.score_key)) is not None
        }
        # Trials that each task sweep has not finished yet: those of its settings, and the final trial.
        self.num_left = [0 if i in self.scores else sweep.num_trials for i, sweep in enumerate(self.task_sweeps)]
        # Task sweeps of which every setting has failed, with the reason.
        self.failed: dict[int, str] = {}
        # The task sweep of each trial in flight, by its key.
        self.running: dict[str, int] = {}
        self.new_progress = partial(
            ProgressWriter, held.store, "trials", total_trials(self.task_sweeps), check_lease=held.check
        )

    def execute(self, on_ray: OnRay) -> None:
        """Runs what is left, until all is done or the results of `on_ray` end because a stop was requested."""
        cluster, gpus = cluster_limit(), None
        if cluster.get("GPU") and any(self.num_left):
            gpus = measured_gpus(int(cluster["GPU"]), self.task_sweeps[0].protocol.precision, on_ray)
        next_tasks = partial(self._next_tasks, int(cluster.get("CPU", 1)), gpus)
        tasks = deque(next_tasks())
        progress = self.new_progress(self._num_done())
        progress.show(self._num_done(), running=sorted(self.running))
        for (trial, *_), result in on_ray(
            partial(_run_trial, self.held.store.uri, self.held.attempt, self.trials.uri), tasks
        ):
            self._finish(trial, result)
            tasks += next_tasks()
            progress.show(self._num_done(), running=sorted(self.running))

    def _next_tasks(self, cpus: int, gpus: Gpus | None) -> list[RayTask[tuple[Trial, Place]]]:
        """For each unscored task sweep without a running trial: its next trials, or none, if its score is recorded now."""
        new = list[Trial]()
        occupied = {*self.running.values(), *self.scores, *self.failed}
        for index in (i for i in range(len(self.task_sweeps)) if i not in occupied):
            task_sweep = self.task_sweeps[index]
            try:
                todo, score = next_trials(task_sweep, self.trials)
            except AllSettingsFailed as error:
                log.error("%s", error)
                self.failed[index], self.num_left[index] = str(error), 0
                continue
            # Task sweeps share trials where a task is given twice: do not start a trial that runs for another one.
            for trial in (trial for trial in todo if trial.key not in self.running):
                new.append(trial)
                self.running[trial.key] = index
            if score is not None:
                self.scores[index] = score.stored_first(self.root, task_sweep.score_key)
            final_to_come = bool(todo) and todo[0].phase == "select"
            self.num_left[index] = len(todo) + final_to_come
        return list(self._placed(new, cpus, gpus))

    def _placed(self, new: Sequence[Trial], cpus: int, gpus: Gpus | None) -> Iterator[RayTask[tuple[Trial, Place]]]:
        """The tasks of new trials, placed by their trainings and by how many trials there are to run now."""
        known = dict[str, Resources]()
        for trial in new:
            recipe = trial.recipe
            training = digest_of([recipe.model, recipe.input.num_lanes, recipe.total_steps])
            if training not in known:
                known[training] = trial_resources(recipe, cpus, gpus, len(self.running))
            wanted = known[training]
            yield RayTask(trial.key, (trial, wanted.place), wanted.num_cpus, wanted.num_gpus)

    def _finish(self, trial: Trial, result: TrialResult) -> None:
        self.num_left[self.running.pop(trial.key)] -= 1
        log.info(
            "trial=%s top1=%.4f examples=%d wall_s=%.1f", trial.key, result.top1, result.num_examples, result.wall_s
        )
        if result.failure:
            log.warning("trial=%s is a failed setting: %s", trial.key, result.failure)

    def _num_done(self) -> int:
        return total_trials(self.task_sweeps) - sum(self.num_left)


def measured_gpus(count: int, precision: Precision, on_ray: OnRay) -> Gpus:
    """The GPUs of the cluster, as one of them is; all are taken to be alike."""
    measure = partial(_memory_and_flops, precision)
    found = [measured for _, measured in on_ray(measure, deque([RayTask("gpu", None, 1, 1)]))]
    memory_bytes, flops = found[0] if found else (0, 0.0)  # none where a stop was requested meanwhile
    per_machine = max((int(node["Resources"].get("GPU", 0)) for node in usable_nodes()), default=0)
    return Gpus(count, max(1, per_machine), memory_bytes, flops)


def _memory_and_flops(precision: Precision, _: None) -> tuple[int, float]:
    return memory_of_this_gpu(), flops_of_this_gpu(precision)


def _run_trial(run_uri: str, attempt: int, trials_uri: str, placed: tuple[Trial, Place]) -> Iterator[TrialResult]:
    """The result of a trial, or none if the evaluation was stopped meanwhile."""
    with Run(open_store(run_uri), attempt) as held, contextlib.suppress(TrialStopped):
        yield ensure_trial(held, open_store(trials_uri), *placed)


def parts_on_ray(
    on_ray: OnRay, worker: type[Extractor], root: str, parts: Sequence[FeaturePart]
) -> Iterator[FeaturePart]:
    """Computes parts and yields each once it is stored, in processes that keep their model loaded, each with one GPU, or one CPU where
    there are no GPUs."""
    cluster = cluster_limit()
    cpus, gpus = int(cluster.get("CPU", 1)), int(cluster.get("GPU", 0))
    workers, threads = max(gpus or cpus, 1), max(cpus // gpus, 1) if gpus else 1
    tasks = deque(
        RayTask(f"{chunk[0].source.folder}/{chunk[0].key}".replace("/", "-"), chunk, 1, min(gpus, 1))
        for chunk in work_chunks(parts, workers)
    )
    for _, part in on_ray(worker(root, threads).ensure, tasks, keep=workers):
        yield part


def probes_on_ray(on_ray: OnRay, root: str, probe_trials: Sequence[ProbeTrial]) -> Iterator[tuple[ProbeTrial, Score]]:
    """Runs each probe trial with one CPU, and one GPU where there are any; yields scores once recorded."""
    gpus = min(int(cluster_limit().get("GPU", 0)), 1)
    return on_ray(partial(score_probe, root), deque(RayTask(trial.key, trial, 1, gpus) for trial in probe_trials))


def cluster_limit() -> dict[str, float]:
    """The resources of the nodes that the job may use, with CPUs and GPUs that the autoscaler can still add: a task that needs them
    waits."""
    alive, most = start_ray(), dict(declared_resources() or {})
    return alive | {name: max(alive.get(name, 0), most.get(name, 0)) for name in ("CPU", "GPU") if name in alive | most}


if __name__ == "__main__":
    driver_main(__doc__, drive)
