"""One rank of `test_train_together.py`: `python train_together.py RANK WORLD_SIZE FILE` prints, as JSON, the losses of an
uninterrupted run, those of a run that was stopped and resumed, both also with frozen layers and by Muon, how a run with too many bad
examples ends, and what the comparison of ranks finds where the last one is slow, in its forward passes or in its batches."""

import json
import os
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from vitline.vit.checkpoints.state_tensors import load_state_tensors, state_tensors
from vitline.vit.config import ExecutionConfig, OptimConfig, TrainRecipe
from vitline.vit.input.batches import Batch
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.config import ViTConfig
from vitline.vit.training.bad_examples import BadExamples
from vitline.vit.training.loop import initial_state, train
from vitline.vit.training.timing import slow_ranks
from vitline.vit.training.world import World

NUM_CLASSES, BATCH, STEPS = 5, 8, 12
RECIPE = TrainRecipe(
    model=ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=2, num_heads=2, mlp_dim=32),
    input=InputConfig(global_batch_size=BATCH, num_lanes=2, augment=AugmentConfig(image_size_px=8)),
    optim=OptimConfig(peak_lr=1e-3, warmup_steps=2, weight_decay=0.1),
    total_steps=STEPS,
)

LAYERED = TrainRecipe(
    **{**dict(RECIPE), "optim": OptimConfig(warmup_steps=2, layer_decay=0.5, frozen=1, head_first_steps=4)}
)
OF_TORCH = {"optimizer": "torch.optim:Muon", "optimizer_scope": "hidden-matrices"}
MUON = TrainRecipe(**{**dict(RECIPE), "optim": OptimConfig(peak_lr=1e-3, warmup_steps=2, weight_decay=0.1, **OF_TORCH)})


def part(step: int, rank: int, world_size: int) -> list[Batch]:
    """This rank's share of a step, in two micro-batches."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (BATCH, 8, 8, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (BATCH,), generator=generator)
    share = torch.arange(BATCH)[rank::world_size]
    return [
        Batch(images=images[rows], labels=labels[rows], valid=torch.ones(len(rows), dtype=torch.bool), first_slot=0,
              num_examples=len(rows))
        for rows in share.chunk(2)
    ]  # fmt: skip


def losses(world: World, cut: int | None = None, recipe: TrainRecipe = RECIPE) -> list[float]:
    """The losses of all steps; with `cut`, of a run that stops after that step and is resumed by another one."""
    found: list[float] = []

    def run(state, stop_at):
        train(
            state,
            (part(step, world.rank, world.size) for step in range(state.step, STEPS)),
            recipe,
            ExecutionConfig(log_every_steps=1),
            world,
            report=lambda step, metrics: found.append(metrics["train/loss"]),
            stop_requested=lambda: "preempted" if state.step == stop_at else None,
        )

    state = initial_state(recipe, NUM_CLASSES, world.device)
    run(state, cut)
    if cut:
        resumed = initial_state(recipe, NUM_CLASSES, world.device)
        load_state_tensors(resumed, {name: value.clone() for name, value in state_tensors(state).items()})
        resumed.step = cut
        run(resumed, None)
    return found


def end_by_bad_examples(world: World) -> list[object]:
    """State, step and reason of a run in which only the last rank has bad examples, one in each step."""

    def batches():
        for step in range(STEPS):
            first, *others = part(step, world.rank, world.size)
            text = f"shard, row {step}: corrupt"
            yield [replace(first, bad=[(0, text)] if world.rank == world.size - 1 else []), *others]

    state, bad = initial_state(RECIPE, NUM_CLASSES, world.device), BadExamples(0.1, num_rows=1000)
    outcome = train(state, batches(), RECIPE, ExecutionConfig(), world, report=lambda step, metrics: None, bad=bad)
    return [outcome, state.step, bad.reason(world)]


def slow_rank(world: World, batch_s: float, forward_s: float) -> list[list[float]]:
    """Rank and fraction of each comparison, where batches or forward passes of the last rank take so many seconds more."""
    is_slow, found = world.rank == world.size - 1, list[list[float]]()
    slow_ranks.EVERY_S = 0.0

    def batches():
        for step in range(STEPS):
            time.sleep(batch_s * is_slow)
            yield part(step, world.rank, world.size)

    state = initial_state(RECIPE, NUM_CLASSES, world.device)
    state.model.register_forward_pre_hook(lambda *_: time.sleep(forward_s * is_slow))
    names = ("time/slowest_rank", "time/slowest_rank_wait_fraction")
    train(
        state, batches(), RECIPE, ExecutionConfig(log_every_steps=4), world,
        report=lambda step, metrics: found.append([metrics[name] for name in names]),
    )  # fmt: skip
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)
    group = World(rank, world_size)
    print(json.dumps([losses(group), losses(group, cut=5), losses(group, recipe=LAYERED), losses(group, 3, LAYERED),
                      losses(group, recipe=MUON), losses(group, 3, MUON),
                      end_by_bad_examples(group),
                      slow_rank(group, 0.2, 0), slow_rank(group, 0, 0.2)]), flush=True)  # fmt: skip
    dist.destroy_process_group()
    # A thread of gloo may still have to free the last tensor, which needs the GIL. If Python is shutting down by then, the
    # process aborts (6 of 25 runs here). Ray ends its workers without a shutdown of Python, too.
    os._exit(0)
