"""The largest micro-batch that fits into a GPU, measured with the network itself before the first step."""

import logging

import torch

from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.cost.step_time import synthetic_batch
from vitline.vit.cost.training_memory import FRACTION, moment_bytes
from vitline.vit.models.recompute import recompute_blocks
from vitline.vit.training.loop import TrainState, example_losses_of
from vitline.vit.training.optim import is_built_in
from vitline.vit.training.to_device.prefetcher import DevicePrefetcher
from vitline.vit.training.world import World

log = logging.getLogger(__name__)

_SMALL, _LARGE = 4, 8


def micro_batch_that_fits(state: TrainState, recipe: TrainRecipe, execution: ExecutionConfig, world: World) -> int:
    """The micro-batch of `execution`. For `auto` on GPUs the most examples whose passes fit beside weights, gradients and moments, at
    most a worker's share of the batch. Every rank must call it, and gets the same number.

    Passes with 4 and with 8 random images tell what an example takes; neither weights nor moments change. Raises ValueError if not
    one example fits.
    """
    if execution.micro_batch_size != "auto" or world.device.type == "cpu":
        return execution.planned_micro_batch
    recompute_blocks(state.model, execution.activation_checkpointing)
    peaks = [peak_bytes(state, recipe, world, number) for number in (_SMALL, _LARGE)]
    per_example = max(1, (peaks[1] - peaks[0]) // (_LARGE - _SMALL))
    fixed = peaks[0] - _SMALL * per_example
    memory = memory_bytes(world.device) - moments_to_come(state, recipe)
    fits = min(int(text) for text in world.gather(str(int((FRACTION * memory - fixed) // per_example))))
    sizes = f"{per_example / 1e9:.3f} GB for each, {fixed / 1e9:.1f} GB besides, of {memory / 1e9:.1f} GB"
    if fits < 1:
        sharded = " or execution.sharding=fsdp" if is_built_in(state.optimizer) else ""
        raise ValueError(
            f"Not one example fits into the memory of a GPU ({sizes}). Set execution.activation_checkpointing=full{sharded}, or choose "
            "a smaller network."
        )
    chosen = min(fits, -(-recipe.input.global_batch_size // world.size))
    log.info("micro-batches of %d examples: %s", chosen, sizes)
    return chosen


def moments_to_come(state: TrainState, recipe: TrainRecipe) -> int:
    """Bytes of what a user-defined optimizer makes at its first steps only."""
    if is_built_in(state.optimizer):
        return 0
    made = sum(v.nbytes for of in state.optimizer.state.values() for v in of.values() if isinstance(v, torch.Tensor))
    return max(0, moment_bytes(recipe, sum(value.numel() for value in state.model.parameters())) - made)


def peak_bytes(state: TrainState, recipe: TrainRecipe, world: World, number: int) -> int:
    """Most memory that torch has allocated on the GPU during the passes of so many examples."""
    torch.cuda.reset_peak_memory_stats(world.device)
    images = synthetic_batch(recipe, state.model.num_classes, number)
    (batch,) = next(DevicePrefetcher(iter([[images]]), world.device))
    losses, _ = example_losses_of(state.model, batch, recipe, state.model.num_classes, step=1)
    losses.sum().backward()
    state.optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(world.device)


def memory_bytes(device: torch.device) -> int:
    """Memory of the GPU that is free, or that torch has reserved for this process."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)
