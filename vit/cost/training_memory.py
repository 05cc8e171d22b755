"""The memory of a worker of a training, as a plan has it before anything runs, and as a GPU has had it."""

from typing import Literal, NamedTuple

import torch
from torch import nn

from vitline.infra.runs.run_state import StateDetail
from vitline.vit.config import ExecutionConfig, TrainConfig, TrainRecipe
from vitline.vit.cost.estimate import GPUS_PER_NODE
from vitline.vit.cost.memory import activation_bytes, num_frozen_weights
from vitline.vit.cost.user_optimizer import user_state_bytes
from vitline.vit.models.user_code import is_reference
from vitline.vit.training.world import World

FRACTION = 0.85
"""Share of a GPU's memory that a step may take; the rest is for compiled code, messages of the ranks, scores, and gaps between blocks."""
Fit = Literal["fits", "tight", "does not fit"]


class PlannedMemory(NamedTuple):
    """Bytes of a worker; torch needs more to compute."""

    parts: dict[str, int]
    """Weights and what is kept of each, by what it is, in float32."""
    held: int
    """All of them, before they are split over workers."""
    split: int
    """What one worker holds of them."""
    activations: int
    """Kept for the backward pass of a micro-batch."""
    micro_batch: int

    @property
    def total(self) -> int:
        return self.split + self.activations

    @property
    def least(self) -> int:
        """With a micro-batch of one example."""
        return self.split + self.activations // self.micro_batch

    def examples_that_fit(self, gpu_bytes: int) -> int:
        """The largest micro-batch of a GPU with so much memory; less than 1 if there is none."""
        return int((FRACTION * gpu_bytes - self.split) / self.activations * self.micro_batch)


def fit_of(num_bytes: int, gpu_bytes: int) -> Fit:
    """Whether what a plan counts fits into the memory of a GPU; `tight` if it leaves less than a step needs besides."""
    if num_bytes <= FRACTION * gpu_bytes:
        return "fits"
    return "tight" if num_bytes <= gpu_bytes else "does not fit"


def kept_bytes(recipe: TrainRecipe, weights: int) -> dict[str, int]:
    """Bytes of what checkpoints hold of a network of so many weights, by what it is."""
    average = 4 * weights if recipe.average_decay is not None else 0
    return {"weights": 4 * weights, "moments": moment_bytes(recipe, weights), "average": average}


def moment_bytes(recipe: TrainRecipe, weights: int) -> int:
    """Bytes of the state of the optimizer; of a user-defined one as after a step that tries it."""
    optim = recipe.optim
    if is_reference(optim.optimizer):
        return user_state_bytes(recipe, weights)
    moments = 2 if optim.optimizer == "adamw" else int(optim.beta1 > 0)
    return 4 * moments * trained_weights(recipe, weights)


def trained_weights(recipe: TrainRecipe, weights: int) -> int:
    """Those of so many weights that have gradients and moments."""
    return weights - num_frozen_weights(recipe.model, recipe.optim.frozen)


def planned_memory(
    recipe: TrainRecipe, execution: ExecutionConfig, weights: int, micro_batch: int, sharers: int
) -> PlannedMemory:
    """Weights, gradients, moments and average of a network of so many weights, shared by `sharers` workers, and the activations of a
    micro-batch."""
    parts = {**kept_bytes(recipe, weights), "gradients": 4 * trained_weights(recipe, weights)}
    held = sum(parts.values())
    activations = activation_bytes(
        recipe.model,
        micro_batch,
        bfloat16=recipe.precision == "bfloat16",
        checkpointing=execution.activation_checkpointing,
        frozen=recipe.optim.frozen,
    )
    return PlannedMemory(parts, held, held // sharers, activations, micro_batch)


def worker_memory(config: TrainConfig, weights: int) -> PlannedMemory:
    """Of a worker, one of the fewest."""
    recipe, execution, workers = config.recipe, config.execution, config.execution.fewest_workers
    largest = max(1, min(execution.planned_micro_batch, -(-recipe.input.global_batch_size // workers)))
    sharers = {"none": 1, "fsdp": workers, "hsdp": min(workers, GPUS_PER_NODE)}[execution.sharding]
    return planned_memory(recipe, execution, weights, largest, sharers)


def reset_peak_memory(world: World) -> None:
    """The peak of a GPU counts from here: the search for a micro-batch has tried larger ones."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)


def peak_of_workers(world: World) -> int | None:
    """Most bytes of tensors that a worker has had on its GPU; None on CPUs. Every rank must call it."""
    if world.device.type != "cuda":
        return None
    return max(map(int, world.gather(str(torch.cuda.max_memory_allocated(world.device)))))


def memory_record(
    model: nn.Module, recipe: TrainRecipe, execution: ExecutionConfig, micro_batch: int, world: World
) -> StateDetail:
    """What `state.json` has of the memory of a worker: the peak and the plan. Nothing on CPUs, nor where the share of a worker depends on
    the machines. Every rank must call it."""
    peak = peak_of_workers(world)
    if peak is None or execution.sharding == "hsdp":
        return {}
    weights = sum(value.numel() for value in model.parameters())  # of a network that is split, too, those of all ranks
    sharers = world.size if execution.sharding == "fsdp" else 1
    plan = planned_memory(recipe, execution, weights, micro_batch, sharers)
    return {"peak_memory_bytes": peak, "planned_memory_bytes": plan.total}
