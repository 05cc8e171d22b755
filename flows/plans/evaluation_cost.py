"""What an evaluation will take: trainings, images and operations of each task, before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vitline.data_prep.shard_format import load_manifest
from vitline.flows.forms.evaluation_plan import EvaluationPlan
from vitline.flows.plans.evaluation_spec import draft_spec
from vitline.infra.config import replace
from vitline.infra.storage import Store, open_store
from vitline.vit.config import TrainRecipe
from vitline.vit.cost.estimate import flops_per_image
from vitline.vit.cost.memory import num_weights
from vitline.vit.evaluation.evaluate import EvaluationSpec, TaskSweep, init_text, plan_task_sweeps
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.trials import finished_result
from vitline.vit.features.features import missing_parts
from vitline.vit.features.probe_trials import ProbeTrial, feature_splits, plan_probe_trials
from vitline.vit.models.flops import forward_flops


@dataclass(frozen=True)
class TaskCost:
    """The remaining work of one task for one init and seed."""

    task: str
    start: str
    seed: int
    trainings: int
    finished: int
    """How many of the trainings have results in the store."""
    trained_images: int
    """Images still to be trained on, counting repeats."""
    scored_images: int
    """Images still to be evaluated."""
    flop: float
    """Operations still to be done: of a forward and a backward pass for a trained image, of a forward pass for an evaluated one."""
    kept_bytes: int = 0
    """Of the model that is still to be published."""
    recipe: TrainRecipe | None = None
    """Of the first setting; None for a probe."""

    @property
    def loss(self) -> str:
        """The loss of the trainings; empty for a probe."""
        return self.recipe.loss if self.recipe else ""


MODEL_TO_COME, _ITS_DIGEST = "the model of this pipeline", "0" * 64


def task_costs(root: str, plan: EvaluationPlan, counted: set[str] | None = None) -> list[TaskCost]:
    """One entry for every task, model and seed; for a probe, one for every task and model. A model may be `MODEL_TO_COME`. Features are
    computed once for several probes: those in `counted` are left out, and those of this plan are added to it.

    Raises ValueError for a task or model that the protocol cannot use."""
    spec = draft_spec(plan, root)
    store, counted = open_store(root), set() if counted is None else counted
    if isinstance(plan.protocol, Probe):
        planned = plan_probe_trials(spec, {MODEL_TO_COME: _ITS_DIGEST})
        return [
            probe_cost(store, list(probe_trials), plan, counted)
            for _, probe_trials in groupby(planned, key=lambda probe_trial: probe_trial.source)
        ]
    return [sweep_cost(store, task_sweep) for task_sweep in _task_sweeps(spec)]


def _task_sweeps(spec: EvaluationSpec) -> list[TaskSweep]:
    """The task sweeps of a plan. Those of a model to come are those of a network from scratch, with another start."""
    if MODEL_TO_COME not in spec.models:
        return plan_task_sweeps(spec)
    from_scratch = plan_task_sweeps(replace(spec, models=(None,)))
    starts = {"model": MODEL_TO_COME, "model_digest": _ITS_DIGEST}
    to_come = [task_sweep.model_copy(update=starts) for task_sweep in from_scratch]
    return [*to_come, *(from_scratch if None in spec.models else ())]


def sweep_cost(root: Store, task_sweep: TaskSweep) -> TaskCost:
    """The cost of a task sweep, without the trials whose results are in the store."""
    splits = load_manifest(open_store(task_sweep.task.corpus)).splits
    trials, scored = root.child("trials"), root.exists(task_sweep.score_key)
    select = [] if scored else task_sweep.select_trials()
    todo = [trial.recipe for trial in select if finished_result(trials, trial) is None]
    finals = [] if scored else [_longest(task_sweep.settings)]
    trained = [(recipe, recipe.total_steps * recipe.input.global_batch_size) for recipe in (*todo, *finals)]
    evaluated = (
        len(todo) * splits[task_sweep.splits.val].num_rows + len(finals) * splits[task_sweep.splits.test].num_rows
    )
    recipe, total = task_sweep.settings[0], task_sweep.num_trials
    return TaskCost(
        task=task_sweep.task.name,
        start=init_text(task_sweep.model),
        seed=task_sweep.seed,
        trainings=total,
        finished=total - len(todo) - len(finals),
        trained_images=sum(images for _, images in trained),
        scored_images=evaluated,
        flop=sum(flops_per_image(recipe, task_sweep.num_classes) * images for recipe, images in trained)
        + forward_flops(recipe.model, task_sweep.num_classes) * evaluated,
        kept_bytes=len(finals) * 4 * num_weights(recipe.model, task_sweep.num_classes) if task_sweep.keep_in else 0,
        recipe=recipe,
    )


def probe_cost(root: Store, probe_trials: Sequence[ProbeTrial], plan: EvaluationPlan, counted: set[str]) -> TaskCost:
    """The cost of the probe trials that share features: one forward pass over their splits, without stored and `counted` features,
    to which it adds its own."""
    todo = [probe_trial for probe_trial in probe_trials if not root.exists(probe_trial.score_key)]
    parts = {part.key: part for _, planned in feature_splits(todo) for part in planned}
    folder = root.child(probe_trials[0].source.folder)
    missing = {folder.uri_of(part.key): part for part in missing_parts(folder, list(parts.values()))}
    images = sum(len(part.rows) for uri, part in missing.items() if uri not in counted)
    counted |= missing.keys()
    return TaskCost(
        task=probe_trials[0].task.name,
        start="pre-trained",
        seed=probe_trials[0].seed,
        trainings=0,
        finished=0,
        trained_images=0,
        scored_images=images,
        flop=forward_flops(plan.architecture, probe_trials[0].num_classes) * images,
    )


def _longest(recipes: Sequence[TrainRecipe]) -> TrainRecipe:
    """The final trial uses the chosen setting, which is not known yet; the longest gives an upper bound."""
    return max(recipes, key=lambda recipe: recipe.total_steps)
