"""The plan of an evaluation: trainings, images, operations, hours and cost, before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from data_prep.shard_format import load_manifest
from flows import console
from flows.requests.forms import EvaluateRequest
from flows.requests.resolve import EvaluationPlan, resolve_evaluate, tasks_text
from infra.settings import Settings
from infra.storage import Store, open_store
from vit.config import ExecutionConfig, OptimConfig, TrainRecipe
from vit.input.config import AugmentConfig, InputConfig
from vit.models.config import AnyNetworkConfig, NetworkConfig, network_config
from vit.models.flops import forward_flops
from vit.vtab.evaluate import EvaluationSpec, TaskSweep, plan_task_sweeps, stored_score
from vit.vtab.frozen.features import missing_parts
from vit.vtab.frozen.probe_trials import ProbeTrial, feature_splits, plan_probe_trials, stored_probe_score
from vit.vtab.probes import Probe
from vit.vtab.trained.packing import micro_batch_size, trials_per_gpu
from vit.vtab.trained.trials import finished_result


@dataclass(frozen=True)
class TaskPlan:
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
    """Operations still to be done: three forward passes for a trained image, one for an evaluated one."""
    network: AnyNetworkConfig
    average: bool = False
    """Whether averaged weights are kept, too."""


def plan_tasks(root: str, plan: EvaluationPlan) -> list[TaskPlan]:
    """One entry for every task, model and seed; for a probe, one for every task and model. Raises ValueError for a task or
    model that the protocol cannot use."""
    spec = EvaluationSpec(
        run_key="plan", tasks=plan.tasks, models=plan.models, architecture=plan.architecture,
        protocol=plan.protocol, seed=plan.seed, num_seeds=plan.num_seeds, root=root,
    )  # fmt: skip
    store = open_store(root)
    if isinstance(plan.protocol, Probe):
        return [
            probe_plan(store, list(probe_trials), plan)
            for _, probe_trials in groupby(plan_probe_trials(spec), key=lambda probe_trial: probe_trial.source)
        ]
    return [task_plan(store, task_sweep) for task_sweep in plan_task_sweeps(spec)]


def task_plan(root: Store, task_sweep: TaskSweep) -> TaskPlan:
    """The plan of a task sweep, without the trials whose results are in the store."""
    splits = load_manifest(open_store(task_sweep.task.corpus)).splits
    results = [finished_result(root.child("trials"), trial) for trial in task_sweep.select_trials()]
    todo = [recipe for recipe, result in zip(task_sweep.settings, results, strict=True) if result is None]
    scored = stored_score(root, task_sweep) is not None
    finals = [] if scored else [_longest(task_sweep.settings)]
    if scored:
        todo = []
    trained = sum(recipe.total_steps * recipe.input.global_batch_size for recipe in (*todo, *finals))
    evaluated = (
        len(todo) * splits[task_sweep.splits.val].num_rows + len(finals) * splits[task_sweep.splits.test].num_rows
    )
    recipe = task_sweep.settings[0]
    total = len(task_sweep.settings) + 1
    return TaskPlan(
        task=task_sweep.task.name,
        start=console.init_text(task_sweep.model),
        seed=task_sweep.seed,
        trainings=total,
        finished=total - len(todo) - len(finals),
        trained_images=trained,
        scored_images=evaluated,
        flop=forward_flops(recipe.model, task_sweep.num_classes) * (3 * trained + evaluated),
        network=recipe.model,
        average=recipe.average_decay is not None,
    )


def probe_plan(root: Store, probe_trials: Sequence[ProbeTrial], plan: EvaluationPlan) -> TaskPlan:
    """The plan of the probe trials that share features: one forward pass over their splits, without stored features."""
    todo = [probe_trial for probe_trial in probe_trials if stored_probe_score(root, probe_trial) is None]
    parts = {part.key: part for _, planned in feature_splits(todo) for part in planned}
    folder = root.child(probe_trials[0].source.folder)
    images = sum(len(part.rows) for part in missing_parts(folder, list(parts.values())))
    return TaskPlan(
        task=probe_trials[0].task.name,
        start="pre-trained",
        seed=probe_trials[0].seed,
        trainings=0,
        finished=0,
        trained_images=0,
        scored_images=images,
        flop=forward_flops(plan.architecture, probe_trials[0].num_classes) * images,
        network=plan.architecture,
    )


def plan_and_show(
    settings: Settings, request: EvaluateRequest, *, tflops: float | None, usd_per_hour: float | None, as_json: bool
) -> None:
    """Prints the plan. `tflops` is the sustained TFLOP/s of a device; without it, a few updates are timed on this machine."""
    plan = resolve_evaluate(settings.root, request)
    if missing := tasks_text(settings.root, request.tasks):
        console.say(missing)
    tasks = plan_tasks(settings.root, plan)
    rate = 1e12 * tflops if tflops else measured_flops([task.network for task in tasks if task.flop])
    total: dict[str, Any] = {
        "protocol": plan.protocol.name,
        "trainings": sum(task.trainings for task in tasks),
        "finished": sum(task.finished for task in tasks),
        "trained_images": sum(task.trained_images for task in tasks),
        "scored_images": sum(task.scored_images for task in tasks),
        "exaflop": sum(task.flop for task in tasks) / 1e18,
        "device_hours": sum(task.flop for task in tasks) / rate / 3600 if rate else 0.0,
        "trials_per_gpu": min(trials_per_gpu(task.network, average=task.average) for task in tasks),
    }
    if usd_per_hour is not None:
        total["usd"] = total["device_hours"] * usd_per_hour
    if as_json:
        shown = [{name: value for name, value in vars(task).items() if name != "network"} for task in tasks]
        console.emit({"total": total, "tasks": shown})
        return
    hours = [task.flop / rate / 3600 if rate else 0.0 for task in tasks]
    console.table(f"Protocol {plan.protocol.name}", _COLUMNS, _cells(tasks, hours), right=(2, 3, 4, 5, 6, 7))
    console.tell(_sentence(total, rate, measured=tflops is None))


def measured_flops(networks: Sequence[NetworkConfig]) -> float:
    """FLOP/s of a training on one device of this machine (a GPU or a core), from a few updates of the first network."""
    from vit.speed.step_time import seconds_per_step
    from vit.training.world import World

    if not networks:
        return 0.0
    network = network_config(networks[0])
    size = micro_batch_size(network, World.current().device.type)
    augment = AugmentConfig(image_size_px=network.image_size_px)
    recipe = TrainRecipe(
        model=network,
        input=InputConfig(global_batch_size=size, num_lanes=1, augment=augment),
        optim=OptimConfig(optimizer="sgd", warmup_steps=0),
        total_steps=1,
    )
    seconds = seconds_per_step(recipe, ExecutionConfig(micro_batch_size=size), _CLASSES)
    return 3 * forward_flops(network, _CLASSES) * size / seconds


_CLASSES = 1000
_COLUMNS = ["task", "init", "seed", "trainings", "finished", "images to train on", "to evaluate", "device hours"]


def _cells(tasks: Sequence[TaskPlan], hours: Sequence[float]) -> list[list[str]]:
    return [
        [
            t.task,
            t.start,
            f"{t.seed}",
            f"{t.trainings}",
            f"{t.finished}",
            f"{t.trained_images:,}",
            f"{t.scored_images:,}",
            f"{h:.2f}",
        ]
        for t, h in zip(tasks, hours, strict=True)
    ]


def _sentence(total: dict[str, Any], rate: float, *, measured: bool) -> str:
    left = total["trainings"] - total["finished"]
    text = (
        f"{left} trainings of {total['trainings']} are left: {total['trained_images']:,} images to train on, "
        f"{total['scored_images']:,} to evaluate, {total['exaflop']:.3g} exaFLOP"
    )
    if rate:
        source = "as measured on this machine" if measured else "as given"
        text += f"; {total['device_hours']:.2f} device hours at {rate / 1e12:.3g} TFLOP/s, {source}"
    if "usd" in total:
        text += f", {total['usd']:,.2f} USD"
    packed = f" A GPU runs up to {total['trials_per_gpu']} of these trainings at a time." if left else ""
    return f"{text}.{packed} Decoding is not counted."


def _longest(recipes: Sequence[TrainRecipe]) -> TrainRecipe:
    """The final trial uses the chosen setting, which is not known yet; the longest gives an upper bound."""
    return max(recipes, key=lambda recipe: recipe.total_steps)
