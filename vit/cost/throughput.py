"""Images per second, MFU and the largest batch of named networks on this device, as in the paper's Figure 12."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from vitline.vit.config import ExecutionConfig, OptimConfig, Precision, TrainRecipe
from vitline.vit.cost.step_time import Step, seconds_of, synthetic_batch
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.config import NetworkConfig
from vitline.vit.models.flops import forward_flops, training_flops
from vitline.vit.training.loop import TrainState, forward, initial_state, train_step
from vitline.vit.training.parallel import set_tf32, wrap
from vitline.vit.training.to_device.prefetcher import DevicePrefetcher
from vitline.vit.training.world import World

MAX_BATCH = 8192
NUM_CLASSES = 1000


@dataclass(frozen=True)
class Speed:
    """The speed of one network at one resolution."""

    variant: str
    image_size_px: int
    mode: str
    precision: str
    batch_size: int
    images_per_s: float | None
    """None if not even one image fits into memory."""
    mfu: float | None
    """Model FLOPs utilisation: forward FLOPs (three times as many in training) per second, divided by the device's peak.
    None if the peak is unknown."""
    largest_batch: int | None
    """Largest power of two of images that fits into the device's memory without compilation; None on a CPU."""


@dataclass(frozen=True)
class BenchSetup:
    """How every network of a table is measured."""

    device: torch.device
    precision: Precision
    batch_size: int | None
    """None: a quarter of the largest batch that fits, at most 256; 8 on a CPU."""
    steps: int
    compiled: bool
    peak: float | None
    """FLOP/s of the device; None if unknown."""


def recipe_of(config: NetworkConfig, precision: Precision, batch_size: int) -> TrainRecipe:
    """A recipe with the optimizer and clipping of a pre-training, for the whole batch on one device."""
    return TrainRecipe(
        model=config,
        input=InputConfig(
            global_batch_size=batch_size, num_lanes=1, augment=AugmentConfig(image_size_px=config.image_size_px)
        ),
        optim=OptimConfig(peak_lr=1e-3, weight_decay=0.1, clip_norm=1.0),
        total_steps=10**6,
        precision=precision,
    )


def step_of(state: TrainState, mode: str, precision: Precision, batch_size: int, device: torch.device) -> Step:
    """A function that queues one forward pass, or one update as the training loop does it: copy, both passes, clipping, AdamW."""
    recipe, world = recipe_of(state.model.config, precision, batch_size), World(device=device)
    batch = synthetic_batch(recipe, NUM_CLASSES, batch_size)
    if mode == "training":
        on_device = DevicePrefetcher(itertools.repeat([batch]), device, lambda: True)

        def update() -> Tensor:
            done = train_step(state, state.model, next(on_device), recipe, world, on_device.copy_ahead)
            on_device.limit_queue()
            return done.grad_norm

        return update
    images = batch.images.to(device)

    def forward_pass() -> Tensor:
        with torch.inference_mode():
            return forward(state.model, images, precision)[0, 0]

    return forward_pass


def largest_batch(state: TrainState, mode: str, precision: Precision, device: torch.device) -> int | None:
    """The largest power of two whose step fits into the GPU's memory; None on a CPU."""
    if device.type != "cuda":
        return None
    fits, size = 0, 1
    while size <= MAX_BATCH:
        try:
            float(step_of(state, mode, precision, size, device)())
            fits, size = size, 2 * size
        except torch.OutOfMemoryError:
            state.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            break
    return fits


def measure(variant: str, config: NetworkConfig, mode: str, setup: BenchSetup) -> Speed:
    """One line of the table. TF32 as in a training."""
    device, precision, side = setup.device, setup.precision, config.image_size_px
    set_tf32(precision == "bfloat16")
    state = initial_state(recipe_of(config, precision, 1), NUM_CLASSES, device)
    state.model.train(mode == "training")
    largest = largest_batch(state, mode, precision, device)
    if largest == 0:
        return Speed(variant, side, mode, precision, 0, None, None, 0)
    batch = setup.batch_size or (min(256, max(1, largest // 4)) if largest else 8)
    wrap(state.model, ExecutionConfig(compile=setup.compiled), World(device=device))
    seconds = seconds_of(step_of(state, mode, precision, batch, device), device, setup.steps, warmups=2)
    per_image = (training_flops if mode == "training" else forward_flops)(config, NUM_CLASSES)
    rate = batch / seconds
    mfu = rate * per_image / setup.peak if setup.peak else None
    return Speed(variant, side, mode, precision, batch, rate, mfu, largest)
