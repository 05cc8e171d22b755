"""One rank of `test_sharding.py`: `python sharding_together.py RANK WORLD_SIZE FILE FOLDER` prints, as JSON, the losses of a training by
how it is split, and those of one that changes the splitting on the way, by checkpoints in the folder."""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist

from infra.config import replace
from infra.storage import open_store
from tests.vit.training.train_together import NUM_CLASSES, RECIPE, STEPS, part
from vit.config import ExecutionConfig
from vit.published import content_digest
from vit.training.checkpoints.resume import resume
from vit.training.checkpoints.save import CheckpointSaver
from vit.training.sharding.fsdp import shard
from vit.training.sharding.slices import own_slice
from vit.training.train import initial_state, train
from vit.training.world import World

AVERAGED = replace(RECIPE, average_decay=0.9)
META = {"run_key": "sharded", "recipe": {}, "config_digest": "", "corpus_digest": "", "class_map_digest": ""}
SPLITS = ("none", "fsdp", "hsdp")
CHANGES = (("fsdp", 4), ("none", 6), ("hsdp", 8), ("fsdp", STEPS))
"""How the network is split up to which step."""


def losses(world: World, sharding: str, state=None, stop: int = STEPS) -> tuple[list[float], object]:
    execution = ExecutionConfig(log_every_steps=1, sharding=sharding)
    state = state or begun(world, execution)
    found: list[float] = []
    train(
        state,
        (part(step, world.rank, world.size) for step in range(state.step, STEPS)),
        AVERAGED,
        execution,
        world,
        report=lambda step, metrics: found.append(metrics["train/loss"]),
        stop_requested=lambda: "preempted" if state.step == stop else None,
    )
    return found, state


def begun(world: World, execution: ExecutionConfig):
    return initial_state(AVERAGED, NUM_CLASSES, world.device, partial(shard, execution=execution, world=world))


def changing(world: World, folder: str) -> tuple[list[float], str]:
    """The losses of a run that is split anew at each checkpoint, and the digest of its final network."""
    run, found = open_store(folder), []
    for sharding, stop in CHANGES:
        execution = ExecutionConfig(sharding=sharding)
        state = begun(world, execution)
        resume(run, state, META, world)
        part_of_it, state = losses(world, sharding, state, stop)
        found += part_of_it
        saver = CheckpointSaver(run, attempt=1, rank=world.rank, world_size=world.size, keep=9)
        saver.save(state, {**META, "save_id": f"{stop}", "images_seen": 0})
        saver.wait()
        world.agree(0)
    return found, content_digest(state.evaluation_model().state_dict())


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)
    group = World(rank, world_size, node_rank=rank // 2)
    told, held = {}, {}
    for each in SPLITS:
        told[each], state = losses(group, each)
        held[each] = sum(own_slice(value)[0].numel() for value in state.model.state_dict().values())
    print(json.dumps([told, held, changing(group, sys.argv[4])]), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # see train_together.py
