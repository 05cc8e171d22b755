"""The metrics of a step, over all ranks."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitline.vit.config import TrainRecipe
from vitline.vit.input.prefetch import WaitTimes
from vitline.vit.models.flops import training_flops
from vitline.vit.models.network import Network
from vitline.vit.training.guard.spike_guard import Spike, SpikeGuard
from vitline.vit.training.timing.device_peak import maker_peak
from vitline.vit.training.timing.input_waits import wait_fractions
from vitline.vit.training.world import World

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class StepResult:
    """Sums over this rank's examples, on the device: reading them waits for it. `correct` are examples whose top-1 class is right, or
    shares of their masked patches."""

    loss_sum: Tensor
    correct: Tensor
    num_valid: int
    grad_norm: Tensor
    """Over all ranks and before clipping. Where it is not finite, the update was not applied."""
    spike: Spike | None = None
    """The update was not applied, either."""
    example_losses: Sequence[Tensor] = ()
    """With a spike: the loss of each example of each micro-batch, float32 (n,), 0 where it is masked."""


@dataclass
class Clock:
    """Steps done since the last logged step, and seconds. Where the host queues work for a device, only the whole time says how fast that
    is."""

    waited_before_s: float = 0.0
    """Seconds that the device had waited for data until then."""
    steps: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started


def spike_metrics(guard: SpikeGuard, spike: Spike) -> dict[str, float]:
    """The metrics of a spike, at its step."""
    return {"guard/loss": spike["loss"], "guard/grad_norm": spike["grad_norm"]} | guard_metrics(guard)


def guard_metrics(guard: SpikeGuard) -> dict[str, float]:
    """The number of spikes so far and, once there are some, the limits for the next step; none without a guard."""
    if not guard.is_on:
        return {}
    loss, grad_norm = guard.limits()
    limits = {"guard/loss_limit": loss, "guard/grad_norm_limit": grad_norm} if math.isfinite(loss) else {}
    return {"guard/spikes": float(len(guard.spikes)), **limits}


def ideal_seconds(model: Network, recipe: TrainRecipe, step: int, device: torch.device) -> float | None:
    """Seconds that training on one image of a step would take at the device's peak FLOP/s; None for a device of unknown peak."""
    peak = maker_peak(device, recipe.precision)
    return training_flops(recipe.model, model.num_classes, recipe.optim.frozen_at(step)) / peak if peak else None


def measure(
    step: int,
    result: StepResult,
    recipe: TrainRecipe,
    lr: float,
    world: World,
    clock: Clock,
    waited_s: float,
    ideal_s: float | None,
    waits: WaitTimes,
) -> dict[str, float]:
    """The metrics of one step over all ranks, by one all-reduce."""
    counts = [float(result.loss_sum), float(result.correct), float(result.num_valid)]
    local = [*counts, waited_s, waits.store_s, waits.decode_s, clock.elapsed_s]
    loss, correct, valid, waited, store, decode, elapsed = world.sum(torch.tensor(local, dtype=torch.float64)).tolist()
    valid = valid or math.nan  # a step of bad examples only has no loss
    batch = recipe.input.global_batch_size
    images_per_s = batch * clock.steps * world.size / elapsed
    some = {} if ideal_s is None else {"throughput/mfu": images_per_s * ideal_s / world.size}
    if recipe.masked_patches is not None:
        some["train/patch_accuracy"] = correct / valid
    elif not recipe.input.augment.mixes:  # a mixed image has two classes, and top-1 against either would mean little
        some["train/top1"] = correct / valid
    return some | {
        "train/loss": loss / valid,
        "optim/lr": lr,
        "optim/grad_norm": float(result.grad_norm),
        "progress/images_seen": float(step * batch),
        **wait_fractions(waited, store, decode, elapsed),
        "throughput/images_per_s": images_per_s,
    }
