"""The training loop and one update. Knows neither Ray nor MLflow: the caller passes in the reporter and the hooks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitline.infra.runs.run_state import RunState
from vitline.vit.config import ExecutionConfig, SpikeGuardConfig, TrainRecipe
from vitline.vit.input.batches import Batch
from vitline.vit.input.permutation import derive_key
from vitline.vit.input.prefetch import WaitTimes
from vitline.vit.models.build import build_network, like
from vitline.vit.models.network import Network
from vitline.vit.training.bad_examples import BadExamples
from vitline.vit.training.guard.nonfinite_steps import NonfiniteSteps
from vitline.vit.training.guard.spike_guard import Spike, SpikeGuard
from vitline.vit.training.layers import drop_gradients_below_head, freeze, head_weights
from vitline.vit.training.loss import loss_named, mixed_targets, num_correct, targets_of
from vitline.vit.training.masked_patches.objective import batch_corruption, patch_scores, with_patch_head
from vitline.vit.training.metrics import (
    Clock,
    Metrics,
    StepResult,
    guard_metrics,
    ideal_seconds,
    measure,
    spike_metrics,
)
from vitline.vit.training.optim import build_optimizer, set_lr, step_where_finite
from vitline.vit.training.parallel import set_tf32, sum_gradients, wrap
from vitline.vit.training.schedule import lr_at
from vitline.vit.training.sharding.fsdp import is_sharded
from vitline.vit.training.sharding.slices import local_shard, whole
from vitline.vit.training.sync_points import SyncPoints
from vitline.vit.training.timing.slow_ranks import SlowRanks
from vitline.vit.training.to_device.prefetcher import DevicePrefetcher
from vitline.vit.training.world import World


@dataclass
class TrainState:
    """What a checkpoint stores beside the recipe: the state after `step` updates."""

    model: Network
    optimizer: torch.optim.Optimizer
    step: int = 0
    average: dict[str, Tensor] | None = None
    guard: SpikeGuard = field(default_factory=lambda: SpikeGuard(SpikeGuardConfig()))

    def evaluation_model(self) -> Network:
        """The network to score and publish, whole: the averaged weights where the recipe keeps an average. Every rank must call it."""
        if self.average is None and not is_sharded(self.model):
            return self.model
        copy = like(self.model)
        copy.load_state_dict({name: whole(value) for name, value in (self.average or self.model.state_dict()).items()})
        return copy


def initial_state(
    recipe: TrainRecipe, num_classes: int, device: torch.device, split: Callable[[Network], None] = lambda model: None
) -> TrainState:
    """Step 0: weights from the paper's initial distribution; they depend on the seed only. `split` is that of `with_optimizer`."""
    torch.manual_seed(torch_seed(recipe.seed, "init"))
    model = build_network(recipe.model, num_classes).to(device)
    return with_optimizer(model, recipe, split)


def with_optimizer(
    model: Network, recipe: TrainRecipe, split: Callable[[Network], None] = lambda model: None
) -> TrainState:
    """Step 0 of a run that starts from the weights of `model`. `split(model)` splits it over the ranks, where that is wanted: the
    moments and the average are split like the weights."""
    if recipe.masked_patches is not None:
        model = with_patch_head(model, recipe.masked_patches)
    freeze(model, recipe.optim.frozen)
    split(model)
    average = {n: p.detach().clone() for n, p in model.state_dict().items()} if recipe.average_decay else None
    optimizer = build_optimizer(model, recipe.optim)
    return TrainState(model, optimizer, average=average, guard=SpikeGuard(recipe.spike_guard))


def torch_seed(seed: int, *purpose: str | int) -> int:
    """A seed for torch's generator, derived from seed and purpose."""
    return int(derive_key(seed, *purpose)) & (2**63 - 1)


def train_step(
    state: TrainState,
    network: nn.Module,
    micro_batches: Sequence[Batch],
    recipe: TrainRecipe,
    world: World,
    queued: Callable[[], None] = lambda: None,
    forward_pass: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepResult:
    """One update with the clipped gradient of (sum of example losses / global batch), of micro-batches on the device.

    Does not wait for the device, except where `state.guard` is on: it must know loss and gradient norm. `queued()` is called before that,
    when the passes are queued on the device. Each forward pass is within a `forward_pass()`.

    `network` is `state.model` as `wrap` returns it. Padding is masked, so the split into micro-batches and workers
    changes the result by rounding only. A bad example is masked, too: it has no loss, and each other keeps its weight of
    1 / global batch. A non-finite gradient is not applied, nor is one that `state.guard` finds to be a spike.
    """
    step = state.step + 1
    head_alone = step <= recipe.optim.head_first_steps
    if head_alone and isinstance(network, DistributedDataParallel):
        network = state.model  # DDP would wait for the gradients of all weights
    overlapped = isinstance(network, DistributedDataParallel) or is_sharded(network)
    # The backward pass ends at these weights. A network that is split computes with copies of its weights, so it needs the whole pass.
    ends_at = head_weights(state.model) if head_alone and not is_sharded(network) else None
    # The loss is the sum over examples divided by B for every number of workers; DDP and FSDP average over ranks.
    scale = (world.size if overlapped else 1) / recipe.input.global_batch_size
    loss_sum = torch.zeros((), device=world.device)
    correct = torch.zeros((), dtype=torch.int64, device=world.device)
    example_losses: list[Tensor] = []
    for index, batch in enumerate(micro_batches):
        # no_sync must cover both the forward and the backward pass; otherwise ranks diverge without an error.
        last = index == len(micro_batches) - 1
        sync = network.no_sync() if isinstance(network, DistributedDataParallel) and not last else nullcontext()
        with sync:
            if recipe.model.is_stochastic:
                torch.manual_seed(torch_seed(recipe.seed, "dropout", step, batch.first_slot))
            with forward_pass():
                losses, right = example_losses_of(network, batch, recipe, state.model.num_classes, step)
            of_examples = losses * batch.valid
            loss = of_examples.sum()
            (loss * scale).backward(inputs=ends_at)
        loss_sum += loss.detach()
        if state.guard.is_on:
            example_losses.append(of_examples.detach())
        correct = correct + right

    if head_alone:
        drop_gradients_below_head(state.model)
    queued()
    if world.size > 1 and not overlapped:
        sum_gradients(state.model, world)
    clip = recipe.optim.clip_norm or math.inf
    grad_norm = whole(nn.utils.clip_grad_norm_(state.model.parameters(), clip))
    num_valid = sum(b.num_valid for b in micro_batches)
    spike = judged(state.guard, step, loss_sum, num_valid, grad_norm, world) if state.guard.is_on else None
    if spike is None:
        set_lr(state.optimizer, learning_rate(step, state, recipe))
        step_where_finite(state.optimizer, finite := grad_norm.isfinite())
        update_average(state, recipe, finite)
    state.optimizer.zero_grad(set_to_none=True)
    state.step = step
    return StepResult(loss_sum, correct, num_valid, grad_norm, spike, example_losses if spike else ())


def judged(
    guard: SpikeGuard, step: int, loss_sum: Tensor, num_valid: int, grad_norm: Tensor, world: World
) -> Spike | None:
    """The spike that a step is, if it is one. Waits for the device; several ranks add one message of 16 bytes."""
    if not math.isfinite(norm := float(grad_norm)):
        return None
    of_rank = torch.tensor([float(loss_sum), num_valid], dtype=torch.float64)
    all_losses, all_valid = world.sum(of_rank).tolist()
    return guard.judge(step, all_losses / (all_valid or math.nan), norm)


def learning_rate(step: int, state: TrainState, recipe: TrainRecipe) -> float:
    """That of the schedule, lowered for some steps after a spike where the recipe says so."""
    return lr_at(step, recipe.optim, recipe.total_steps) * state.guard.lr_factor(step)


def example_losses_of(
    network: nn.Module, batch: Batch, recipe: TrainRecipe, num_classes: int, step: int
) -> tuple[Tensor, Tensor]:
    """The loss of each example, float32 (n,), of classes or of masked patches, and what is right of the valid ones, as a 0-d sum."""
    if recipe.masked_patches is not None:
        corruption = batch_corruption(batch, recipe, step)
        predictions = forward(network, batch.images, recipe.precision, corruption)
        losses, accuracy = patch_scores(predictions, batch, corruption, recipe)
        return losses, (accuracy * batch.valid).sum()
    logits = forward(network, batch.images, recipe.precision)
    targets = batch_targets(batch, recipe, num_classes)
    return loss_named(recipe.loss)(logits, targets), num_correct(logits.detach(), batch.labels, batch.valid)


def batch_targets(batch: Batch, recipe: TrainRecipe, num_classes: int) -> Tensor:
    """float32 targets (n, K); shares of two labels where images were mixed."""
    own = targets_of(batch.labels, num_classes, recipe.label_smoothing)
    if batch.mixed_labels is None or batch.lam is None:
        return own
    partner = targets_of(batch.mixed_labels, num_classes, recipe.label_smoothing)
    return mixed_targets(own, partner, batch.lam)


def forward(network: nn.Module, images: Tensor, precision: str, *more: Any) -> Tensor:
    """Logits of uint8 images (n, H, W, 3), which the network normalises to [-1, 1]. It gets what else it takes as `more`."""
    autocast = torch.autocast(images.device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()
    with autocast:
        logits: Tensor = network(images, *more)
    return logits


@torch.no_grad()
def update_average(state: TrainState, recipe: TrainRecipe, finite: Tensor) -> None:
    """Polyak averaging: average += (1 - decay) * (weights - average), where the step was finite."""
    if state.average is not None and recipe.average_decay:
        share = finite * (1 - recipe.average_decay)
        for name, value in state.model.state_dict().items():
            local_shard(state.average[name])[0].lerp_(local_shard(value)[0], share)


def due(step: int, *, every: int, total: int) -> bool:
    """True every `every` steps and at the last one."""
    return step % every == 0 or step == total


@dataclass(frozen=True)
class Hook:
    """An action that the loop runs on every rank, every `every_steps` steps and after the last one."""

    every_steps: int
    action: Callable[[TrainState], None]
    on_stop: Literal["run", "skip", "if_due"] = "if_due"
    """At an early stop: `run` it, unless the stop discards the work; `skip` it, because it takes long, and make up for it on
    resuming; or run it only `if_due`."""

    def is_due(self, step: int, total: int, stopping: bool) -> bool:
        if stopping and self.on_stop != "if_due":
            return self.on_stop == "run"
        return due(step, every=self.every_steps, total=total)

    def make_up(self, state: TrainState) -> None:
        """Runs the action if the training may have stopped at this step without it."""
        if self.on_stop == "skip" and state.step % self.every_steps == 0:
            self.action(state)


def train(
    state: TrainState,
    batches: Iterator[Sequence[Batch]],
    recipe: TrainRecipe,
    execution: ExecutionConfig,
    world: World,
    *,
    report: Callable[[int, Metrics], None],
    hooks: Sequence[Hook] = (),
    stop_requested: Callable[[], RunState | None] = lambda: None,
    bad: BadExamples | None = None,
    input_waits: Callable[[], WaitTimes] = WaitTimes,
    input_ready: Callable[[], bool] = lambda: False,
    seen_spike: Callable[[Spike, Sequence[Batch], Sequence[Tensor]], None] = lambda *_: None,
    pause_at_step: int | None = None,
) -> RunState | Literal["rewind"]:
    """Trains from `state.step` to the last step. Returns finished, paused, diverged, preempted, out_of_time or cancelled; failed if
    `bad` has counted too many bad examples, at once and without the hooks. `rewind` where the spike guard wants to go back:
    the caller restores a state from before the first update that the last spike leaves out, and calls again.

    `batches` yields this rank's micro-batches of each step after `state.step`, in memory. `input_waits()` returns for what it has waited
    so far, and `input_ready()` whether it has the next step. Every rank calls `report(step, metrics)`
    with the same numbers: the training metrics every `log_every_steps`, and each skipped step. Every rank calls `seen_spike` with
    its micro-batches and the losses of their examples. Where the ranks meet (`SyncPoints`: on a CPU after every step, on GPUs about once a
    second, before each hook and logged step, and after `pause_at_step`) rank 0 calls `stop_requested`, which must return immediately,
    and all ranks follow its answer. Then the due hooks run, in the order given. Between two meetings the host does not wait for a GPU.
    Evaluation, checkpoints and other periodic work are hooks; only the training metrics are not, because the loop measures them.
    """
    set_tf32(recipe.precision == "bfloat16")
    network = wrap(state.model, execution, world)
    on_device = DevicePrefetcher(batches, world.device, input_ready)
    bad, nonfinite, num_bad = bad or BadExamples(), NonfiniteSteps(), 0
    clock, ranks, total, waits = Clock(), SlowRanks(world), recipe.total_steps, input_waits()
    every_step = world.device.type == "cpu" or state.guard.is_on
    meetings = SyncPoints(state.step, world, every_step=every_step, stop_requested=stop_requested)
    while state.step < total:
        micro_batches = next(on_device)
        num_bad += bad.name(micro_batches)
        result = None
        if state.guard.skips(state.step + 1):
            state.step += 1
        else:
            result = train_step(state, network, micro_batches, recipe, world, on_device.copy_ahead, ranks.forward)
            on_device.limit_queue()
            clock.steps += 1
            nonfinite.add(state.step, result.grad_norm)
            if (spike := result.spike) is not None:
                report(state.step, spike_metrics(state.guard, spike))
                seen_spike(spike, micro_batches, result.example_losses)
                if state.guard.too_many(state.step):
                    return "diverged"
                if state.guard.config.action == "rewind":
                    return "rewind"
        step, logs = state.step, due(state.step, every=execution.log_every_steps, total=total)
        acts = logs or step == pause_at_step or any(hook.is_due(step, total, stopping=False) for hook in hooks)
        if not acts and not meetings.due(step):
            continue
        if nonfinite.read(report) > execution.max_nonfinite_steps:
            return "diverged"
        stop, num_bad, steps = meetings.sync(step, num_bad)
        bad.add(num_bad, steps * recipe.input.global_batch_size)
        num_bad = 0
        if result is not None and logs:
            lr = learning_rate(step, state, recipe)
            ideal_s = ideal_seconds(state.model, recipe, step, world.device)
            waited_s = on_device.waited_s - clock.waited_before_s
            measured = measure(step, result, recipe, lr, world, clock, waited_s, ideal_s, input_waits().since(waits))
            elapsed_s = clock.steps * recipe.input.global_batch_size / measured["throughput/images_per_s"]
            measured |= ranks.compare(clock.steps, waited_s, elapsed_s)
            report(step, measured | guard_metrics(state.guard) | {"input/bad_examples": float(bad.count)})
            clock, waits = Clock(on_device.waited_s), input_waits()
        if bad.too_many:
            return "failed"
        if stop == "cancelled" and execution.on_cancel == "discard":
            return stop
        for hook in hooks:
            if hook.is_due(step, total, stopping=stop is not None):
                hook.action(state)
        if stop is not None and step < total:
            return stop
    return "finished"
