"""Batches that are absurd at some steps: their targets, and with them loss and gradient, are many times too large."""

import os
import signal
import traceback

import torch
import torch.distributed as dist

import vitline.vit.training.loop as loop
from vitline.infra.storage import open_store
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.guard.spike_guard import SpikeGuard
from vitline.vit.training.world import World

FACTOR = 1_000.0
_targets = loop.batch_targets


def plant(steps, on_step=lambda step: None):
    """A `batch_targets` that multiplies the targets of these steps, for batches that state their position."""

    def planted(batch, recipe, num_classes):
        step = batch.first_slot // recipe.input.global_batch_size + 1
        on_step(step)
        return _targets(batch, recipe, num_classes) * (FACTOR if step in steps else 1.0)

    return planted


def train_together(rank, world_size, sync, uri, killed_at, left_out):
    """One rank of a training, as a process of its own, whose step 25 is planted. With `left_out` the updates of these steps are left
    out beforehand, as in a training that never saw them. The last rank kills itself at step `killed_at`. Exits with 0 if the
    run has finished."""

    def kill(step):
        if step == killed_at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    loop.batch_targets = plant({25}, kill)
    if left_out:
        SpikeGuard.skips = lambda self, step: step in left_out
    ended = "failed"
    try:
        dist.init_process_group("gloo", init_method=f"file://{sync}", rank=rank, world_size=world_size)
        ended = TrainingRun(open_store(uri), 1, World(rank, world_size)).execute()
    except BaseException:
        traceback.print_exc()
    # Not by a shutdown of Python, which would wait for a rank that is gone; Ray ends its workers without one, too.
    os._exit(0 if ended == "finished" else 1)
