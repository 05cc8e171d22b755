"""What a training will take, in full: beside its cost the batch, the schedule, weight decay, memory, checkpoints and days, and where each
setting comes from. `training_plan` loads torch, to count weights and activations of a network without computing anything."""

from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from vitline.data_prep.shard_format import load_manifest
from vitline.flows.forms.self_training_plan import SelfTrainingPlan
from vitline.flows.forms.training_config import resolve_pretrain
from vitline.flows.plans.measured_speed import measured_speeds
from vitline.flows.plans.training_cost import TrainingCost, training_cost
from vitline.infra.html.text import clock, num_bytes, short
from vitline.infra.storage import open_store
from vitline.vit.config import TrainConfig
from vitline.vit.cost.estimate import ASSUMED, PlanGpus, demand_of, hours_of
from vitline.vit.models.config import UserNetworkConfig
from vitline.vit.models.user_code import is_reference
from vitline.vit.recipes import recipe_named
from vitline.vit.run.resolved import ResolvedTraining
from vitline.vit.training.schedule import lr_at
from vitline.vit.training.timing.gpus import Gpu

if TYPE_CHECKING:
    from vitline.vit.cost.training_memory import PlannedMemory

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 48
_EARLIER = 3


class TrainingPlan(TrainingCost):
    """The cost of a training, and how it will go."""

    batch: str
    """How workers share a step."""
    schedule: str
    """Warmup, decay and cooldown, in steps and images."""
    learning_rate: str
    """The schedule as a picture of one line, from the first step to the last."""
    weight_decay: str
    """What is decayed, and what is not."""
    memory: str
    """What a worker holds."""
    memory_verdict: str
    """Whether that fits into the memory of a GPU."""
    checkpoints: str
    """Their size, number and traffic."""
    days: str
    """How long it takes on GPUs of the kind that is asked for, and its price."""
    earlier_runs: list[str]
    """What the newest trainings of the same network, batch and precision reached, beside what a plan would have said of them."""


def training_plan(training: ResolvedTraining, gpus: PlanGpus = ASSUMED) -> TrainingPlan:
    """The plan of a training, beside the trainings below its root. Raises ValueError like `training_cost`."""
    from vitline.vit.cost.training_memory import worker_memory
    from vitline.vit.models.build import meta_network
    from vitline.vit.training.layers import is_frozen

    config, recipe, cost = training.config, training.config.recipe, training_cost(training, gpus)
    classes, images_per_s = cost["corpus"]["classes"], None
    days = "not known for CPUs; `vitline model bench` measures a step"
    if config.execution.device != "cpu":
        images_per_s = config.execution.num_workers * demand_of(recipe, classes, gpus).images_per_s
        days = days_text(cost["images"], config.execution.num_workers, images_per_s, gpus)
    parameters = dict(meta_network(recipe.model, classes).named_parameters())
    weights = sum(each.numel() for each in parameters.values())
    trained = {n: p for n, p in parameters.items() if not is_frozen(n, recipe.model, recipe.optim.frozen)}
    memory = worker_memory(config, weights)
    return {
        **cost,
        "batch": batch_text(config),
        "schedule": schedule_text(config),
        "learning_rate": lr_picture(config),
        "weight_decay": decay_text(config, trained),
        "memory": memory_text(config, weights, memory),
        "memory_verdict": verdict_text(config, memory, gpus.gpu),
        "checkpoints": checkpoints_text(config, weights, images_per_s),
        "days": days,
        "earlier_runs": [speed.text(classes) for speed in islice(measured_speeds(training.root, config), _EARLIER)],
    }


def self_training_cost(root: str, plan: SelfTrainingPlan, gpus: PlanGpus) -> dict[str, Any]:
    """What a self-training will take: the images to label, and the plan of the student."""
    unlabelled = load_manifest(open_store(plan.prediction.corpus))
    return {
        "teacher": plan.prediction.model,
        "images_to_label": sum(unlabelled.splits[name].num_rows for name in plan.prediction.splits),
        "student": training_plan(resolve_pretrain(root, plan.training), gpus),
        "note": "the epochs of the student count its labelled corpus only: how many other images it gets is known once they have labels",
    }


def plan_rows(config: TrainConfig, cost: TrainingCost) -> list[list[str]]:
    """What a plan says that needs no torch, as rows of a table: for the page of a flow run, before anything is spent. What GPUs and the
    store have to do is left out of trainings that take GPUs less than a minute."""
    total = cost["training_exaflop"]
    rows = {
        "images": f"{cost['images']:,} in {cost['steps']:,} steps, {cost['epochs']:.1f} epochs of {cost['corpus']['name']}",
        "loss": cost["loss"],
        "held-out images": cost["held_out"],
        "batch": batch_text(config),
        "schedule": schedule_text(config),
        "learning rate": lr_picture(config),
        "compute": f"{cost['forward_gflop_per_image']:.3g} GFLOP forward per image, "
        f"{f'{total:.3g} EFLOP' if total > 0.001 else short(1e18 * total, 'FLOP')} in all",
        "device": cost["device"],
        "start": cost.get("start", "random weights"),
        "config digest": cost["config_digest"][:12],
    }
    if config.execution.device != "cpu":
        workers = config.execution.num_workers
        rate = workers * demand_of(config.recipe, cost["corpus"]["classes"], ASSUMED).images_per_s
        if cost["images"] > 60 * rate:
            rows["on GPUs"] = days_text(cost["images"], workers, rate, ASSUMED)
            rows["store"] = cost["bandwidth"]
    return [[name, value] for name, value in rows.items()]


def batch_text(config: TrainConfig) -> str:
    """`4,096 images a step: 8 workers x 2 micro-batches of at most 256`"""
    execution, batch = config.execution, config.recipe.input.global_batch_size

    def shared(workers: int) -> str:
        rounds = ceil(batch / workers / execution.planned_micro_batch)
        plural = "micro-batch" if rounds == 1 else "micro-batches"
        return f"{workers} {'worker' if workers == 1 else 'workers'} x {rounds} {plural} of at most {execution.planned_micro_batch}"

    measured = "; a GPU may take another number, found at its start" if execution.micro_batch_size == "auto" else ""
    fewest = execution.fewest_workers
    fewer = f"; with the fewest workers, {shared(fewest)}" if fewest < execution.num_workers else ""
    return f"{batch:,} images a step: {shared(execution.num_workers)}{fewer}{measured}"


def schedule_text(config: TrainConfig) -> str:
    """`10,000 steps of warmup (41.0 M images) to 0.001, then linear to 1e-05 at step 310,825`"""
    optim, steps, batch = config.recipe.optim, config.recipe.total_steps, config.recipe.input.global_batch_size
    end, first = optim.decay_steps or steps, optim.head_first_steps
    decay = f"{optim.schedule} to {optim.end_lr:g} at step {end:,}"
    if optim.schedule == "staircase":
        falls = (f"{first + round(at * (end - first)):,}" for at in optim.milestones)
        decay = f"divided by ten at steps {', '.join(falls)}"
    images = optim.warmup_steps * batch
    shown = f"{images / 1e6:,.1f} M" if images >= 1_000_000 else f"{images:,}"
    begun = [f"{first:,} steps of the head alone at {optim.peak_lr:g}"] if first else []
    if optim.warmup_steps:
        begun.append(f"{optim.warmup_steps:,} steps of warmup ({shown} images) to {optim.peak_lr:g}")
    cooldown = f"; linear to 0 in the last {optim.cooldown_steps:,} steps" if optim.cooldown_steps else ""
    return f"{', then '.join(begun) or f'{optim.peak_lr:g} from the start'}, then {decay}{cooldown}"


def lr_picture(config: TrainConfig) -> str:
    """The learning rate over the training, as bars from 0 to its peak."""
    optim, steps = config.recipe.optim, config.recipe.total_steps
    at = [max(1, round(steps * (i + 0.5) / _WIDTH)) for i in range(_WIDTH)]
    heights = [lr_at(step, optim, steps) / optim.peak_lr for step in at]
    return "".join(_BARS[min(len(_BARS) - 1, int(height * len(_BARS)))] for height in heights)


def decay_text(config: TrainConfig, parameters: dict[str, Any]) -> str:
    """`0.03 on 86.2 M weights in 50 tensors; none on 0.2 M in 102: biases, norms, tokens and position embeddings`,
    of the weights that are trained."""
    from vitline.vit.training.optim import is_decayed

    decayed = [each.numel() for name, each in parameters.items() if is_decayed(name, each)]
    others = [each.numel() for name, each in parameters.items() if not is_decayed(name, each)]
    rate = config.recipe.optim.weight_decay
    if not rate:
        return f"none on all {sum(decayed + others) / 1e6:,.1f} M weights"
    return (
        f"{rate:g} on {sum(decayed) / 1e6:,.1f} M weights in {len(decayed)} tensors; none on {sum(others) / 1e6:,.2f} M in {len(others)}: "
        "biases, norms, tokens and position embeddings"
    )


def verdict_text(config: TrainConfig, plan: "PlannedMemory", gpu: Gpu) -> str:
    """`fits: 12.3 GB of the 141 GB of H200 (9%)`; of a micro-batch that the GPU finds at its start, with one example."""
    from vitline.vit.cost.training_memory import fit_of

    if config.execution.device == "cpu":
        return "not known for CPUs"
    if gpu.memory_bytes is None:
        return f"not known: the memory of {gpu.name} was not given; add it, as in {gpu.name}-48GB"
    needed = plan.least if config.execution.micro_batch_size == "auto" else plan.total
    found = fit_of(needed, gpu.memory_bytes)
    text = f"{found}: {num_bytes(needed)} of the {num_bytes(gpu.memory_bytes)} of {gpu.name} ({needed / gpu.memory_bytes:.0%})"
    if config.execution.micro_batch_size == "auto":
        text += ", with a micro-batch of 1; the largest that fits is found at the start"
    fitting = plan.examples_that_fit(gpu.memory_bytes)
    changes = {
        f"execution.micro_batch_size={fitting}": 0 < fitting < plan.micro_batch,
        "execution.activation_checkpointing=full": config.execution.activation_checkpointing != "full",
        "execution.sharding=fsdp": config.execution.sharding == "none"
        and config.execution.fewest_workers > 1
        and not is_reference(config.recipe.optim.optimizer),
        "a GPU with more memory": True,
    }
    return text if found == "fits" else f"{text}; take {' or '.join(name for name, helps in changes.items() if helps)}"


def memory_text(config: TrainConfig, weights: int, plan: "PlannedMemory") -> str:
    """What a worker holds: weights, gradients, moments and average in float32, and the activations of a micro-batch."""
    recipe, execution, workers = config.recipe, config.execution, config.execution.fewest_workers
    parts = ", ".join(f"{name} {num_bytes(size)}" for name, size in plan.parts.items() if size)
    split = {
        "none": "",
        "fsdp": f", split over {workers} workers: {num_bytes(plan.split)}",
        "hsdp": ", split over the workers of a machine",
    }[execution.sharding if workers > 1 else "none"]
    again = execution.activation_checkpointing
    mode = "" if again == "none" else f", activation checkpointing {again}"
    return (
        f"{num_bytes(plan.held)} for {weights / 1e6:,.1f} M weights ({parts}){split}; {num_bytes(plan.activations)} of activations "
        f"for a micro-batch of {plan.micro_batch} ({recipe.precision}{mode}); to which torch adds what it needs to compute"
    )


def checkpoint_bytes(config: TrainConfig, weights: int) -> int:
    """Bytes of a checkpoint: weights, moments and average in float32."""
    from vitline.vit.cost.training_memory import kept_bytes

    return sum(kept_bytes(config.recipe, weights).values())


def checkpoints_text(config: TrainConfig, weights: int, images_per_s: float | None) -> str:
    """`1.04 GB each, every 2,000 steps (38 min), 156 in all: 162 GB to the store; the newest 2 are kept`"""
    execution, batch, steps = config.execution, config.recipe.input.global_batch_size, config.recipe.total_steps
    size, number = checkpoint_bytes(config, weights), ceil(steps / execution.save_every_steps)
    pause = "" if images_per_s is None else f" ({clock(execution.save_every_steps * batch / images_per_s)})"
    kept = f"the newest {execution.keep_checkpoints} are kept"
    if execution.keep_every_images is not None:
        permanent = steps * batch // execution.keep_every_images
        kept += f", and one every {execution.keep_every_images:,} images: {num_bytes(size * permanent)} at the end"
    if execution.keep_best:
        kept += ", and the best"
    return (
        f"{num_bytes(size)} each, every {execution.save_every_steps:,} steps{pause}, {number:,} in all: {num_bytes(size * number)} to the "
        f"store; {kept}"
    )


def days_text(images: int, workers: int, images_per_s: float, gpus: PlanGpus) -> str:
    """`2.1 days on 8 H200 at 35 % of their peak (26,280 images/s): 403 GPU-hours, 1,008 at 2.5 each`"""
    hours, price = hours_of(images, images_per_s), gpus.hour_price
    time = f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min"
    gpu_hours = hours * workers
    cost = "" if price is None else f", {gpu_hours * price:,.2f} at {price:g} each"
    spent = f"{gpu_hours:,.0f}" if gpu_hours >= 10 else f"{gpu_hours:.2g}"
    return (
        f"{time} on {workers} {gpus.gpu.name} at {gpus.mfu:.0%} of their peak ({images_per_s:,.0f} images/s): "
        f"{spent} GPU-hours{cost}"
    )


def settings_of(config: TrainConfig, recipe: str) -> dict[str, dict[str, Any]]:
    """Each field of recipe and execution by its dotted name, with its value and origin: `default`, `recipe NAME`, `command line`, or
    `the code itself` for what is measured of user-defined networks, losses and optimizers."""
    found = dict[str, dict[str, Any]]()
    measured = {"recipe.loss_source", "recipe.optim.optimizer_source"}
    if isinstance(config.recipe.model, UserNetworkConfig):
        measured |= {f"recipe.model.{name}" for name in ("source", "embed_dim", "feature_flop")}

    def walk(group: BaseModel, own: BaseModel | None, prefix: str) -> None:
        for name, field in type(group).model_fields.items():
            path, value, planned = f"{prefix}.{name}", getattr(group, name), getattr(own, name, None)
            if isinstance(value, BaseModel):
                walk(value, planned, path)
                continue
            is_default = field.default is not PydanticUndefined and value == field.default
            origin = "default" if is_default else f"recipe {recipe}"
            if path in measured and not is_default:
                origin = "the code itself"
            elif value != planned:
                origin = "command line"
            found[path] = {"value": value, "origin": origin}

    own_recipe, own_execution = recipe_named(recipe).make()
    walk(config.recipe, own_recipe, "recipe")
    walk(config.execution, own_execution, "execution")
    return found
