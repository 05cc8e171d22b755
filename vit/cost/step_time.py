"""Measures seconds of steps on this machine, on random images."""

import itertools
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.input.batches import Batch
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.parallel import wrap
from vitline.vit.training.to_device.prefetcher import DevicePrefetcher
from vitline.vit.training.world import World

TIMED_STEPS = 3
Step = Callable[[], Tensor]
"""Queues the work of a step and returns a number of it, 0-d on the device."""


def seconds_per_step(recipe: TrainRecipe, execution: ExecutionConfig, num_classes: int) -> float:
    """Seconds of one update on one worker's share of the batch.

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
        on_device = DevicePrefetcher(itertools.repeat(batches), world.device)

        def update() -> Tensor:
            return train_step(state, network, next(on_device), recipe, world).grad_norm

        return seconds_of(update, world.device, TIMED_STEPS, warmups=1)
    finally:
        torch.set_num_threads(threads)


def seconds_of(step: Step, device: torch.device, steps: int, *, warmups: int) -> float:
    """Seconds of a step: the median on a CPU; on a GPU, which works on while the host queues more, the mean."""
    waited = steps if device.type == "cuda" else 1
    for _ in range(warmups):
        float(step())
    times = []
    for _ in range(steps // waited):
        start = time.perf_counter()
        for _ in range(waited):
            last = step()
        float(last)  # waits for the device
        times.append((time.perf_counter() - start) / waited)
    return median(times)


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
