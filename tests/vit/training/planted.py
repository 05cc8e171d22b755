"""Batches that are absurd at some steps: their targets, and with them loss and gradient, are many times too large.

`python -m tests.vit.training.planted RANK WORLD_SIZE FILE RUN KILLED_AT LEFT_OUT` is one rank of `test_spike_guard_together.py`: it
trains the run RUN with the planted steps; or, where LEFT_OUT (`first-last`) is not empty, without them, as a training that never
saw these steps. KILLED_AT is the step at which the process kills itself; 0 for none.
"""

import os
import signal
import sys
import traceback

import vit.training.train as loop
from vit.training.spike_guard import SpikeGuard

FACTOR = 1_000.0


def plant(steps, on_step=lambda step: None, factor=FACTOR):
    """A `batch_targets` that multiplies the targets of these steps, for batches that state their position."""

    def planted(batch, recipe, num_classes):
        step = batch.first_slot // recipe.input.global_batch_size + 1
        on_step(step)
        return _targets(batch, recipe, num_classes) * (factor if step in steps else 1.0)

    return planted


_targets = loop.batch_targets


def main(rank, world_size, meet, uri, killed_at, left_out):
    import torch
    import torch.distributed as dist

    from infra.storage import open_store
    from vit.run import TrainingRun
    from vit.training.world import World

    def kill(step):
        if step == killed_at and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size)
    loop.batch_targets = plant({25}, kill)
    if left_out:
        first, last = map(int, left_out.split("-"))
        SpikeGuard.leaves_out = lambda self, step: first <= step <= last
    try:
        print(TrainingRun(open_store(uri), 1, World(rank, world_size)).execute(), flush=True)
        os._exit(0)  # as in `train_together.py`
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # as Ray ends a worker: a shutdown of Python would wait for the rank that is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6])
