"""Estimates how long a training takes on this machine, from a few real steps on random images."""

import itertools
import time

import torch

from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.input.batches import Batch
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.parallel import wrap
from vitline.vit.training.to_device.prefetcher import DevicePrefetcher
from vitline.vit.training.world import World

TIMED_STEPS = 3


def seconds_per_step(recipe: TrainRecipe, execution: ExecutionConfig, num_classes: int) -> float:
    """Median seconds of one update on one worker's share of the batch.

    Runs on the device of `execution`, compiled if it says so, with one arithmetic thread on a CPU. Decoding is not
    included. Changes torch's random generator, but no other state of the caller.
    """
    world = World.current(device_type=None if execution.device == "auto" else execution.device)
    threads = torch.get_num_threads()
    if world.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        share = max(1, recipe.input.global_batch_size // execution.num_workers)
        size = min(share, execution.planned_micro_batch)
        state = initial_state(recipe, num_classes, world.device)
        network = wrap(state.model, execution, world)
        batches = [synthetic_batch(recipe, num_classes, size)] * -(-share // size)
        on_device, times = DevicePrefetcher(itertools.repeat(batches), world.device), list[float]()
        for _ in range(TIMED_STEPS + 1):
            start = time.perf_counter()
            float(train_step(state, network, next(on_device), recipe, world).grad_norm)  # waits for the device
            times.append(time.perf_counter() - start)
        return sorted(times[1:])[TIMED_STEPS // 2]
    finally:
        torch.set_num_threads(threads)


def synthetic_batch(recipe: TrainRecipe, num_classes: int, size: int) -> Batch:
    """Random pixels and labels with the shapes of real ones."""
    side = recipe.model.image_size_px
    return Batch(
        images=torch.randint(0, 256, (size, side, side, 3), dtype=torch.uint8),
        labels=torch.randint(0, num_classes, (size,)),
        valid=torch.ones(size, dtype=torch.bool),
        first_slot=0,
        num_examples=size,
    )
