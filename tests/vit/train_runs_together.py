"""One rank of a test: `python train_runs_together.py RANK WORLD_SIZE FILE RUN...` executes attempt 1 of each run, one after the
other."""

import os
import sys

import torch
import torch.distributed as dist

from vitline.infra.storage import open_store
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.world import World

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)
    for uri in sys.argv[4:]:
        print(TrainingRun(open_store(uri), 1, World(rank, world_size)).execute(), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # as `train_together.py`, for the reason that it gives
