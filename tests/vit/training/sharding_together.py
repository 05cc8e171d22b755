"""One rank of `test_sharding.py`: `python sharding_together.py RANK WORLD_SIZE FILE FOLDER` prints, as JSON, the losses of a training by
how it is split, those of one that changes the splitting on the way, by checkpoints in the folder, how a split network goes back before
a spike, and the losses of a split masked patch prediction and of a split network with frozen layers."""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist

from tests.vit.training.train_together import LAYERED, NUM_CLASSES, RECIPE, STEPS, part
from tests.vit.unleased import Unleased
from vitline.infra.config import replace
from vitline.infra.storage import open_store
from vitline.vit.checkpoints import read
from vitline.vit.checkpoints.names import Retention
from vitline.vit.checkpoints.restore import resume, rewind
from vitline.vit.checkpoints.save import CheckpointSaver
from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.published.models import content_digest
from vitline.vit.training.loop import TrainState, initial_state, train
from vitline.vit.training.sharding.fsdp import shard
from vitline.vit.training.sharding.slices import local_shard
from vitline.vit.training.world import World

AVERAGED = replace(RECIPE, average_decay=0.9)
MASKED = replace(RECIPE, masked_patches={"target": "mean-color-3bit"})
META = {"run_key": "sharded", "recipe": {}, "config_digest": "", "corpus_digest": "", "class_map_digest": ""}
SPLITS = ("none", "fsdp", "hsdp")
CHANGES = (("fsdp", 4), ("none", 6), ("hsdp", 8), ("fsdp", STEPS))
"""How the network is split up to which step."""


def losses(
    world: World, sharding: str, state=None, stop: int = STEPS, recipe: TrainRecipe = AVERAGED
) -> tuple[list[float], TrainState]:
    execution = ExecutionConfig(log_every_steps=1, sharding=sharding)
    state = state or begun(world, execution, recipe)
    found: list[float] = []
    train(
        state,
        (part(step, world.rank, world.size) for step in range(state.step, STEPS)),
        recipe,
        execution,
        world,
        report=lambda step, metrics: found.append(metrics["train/loss"]),
        stop_requested=lambda: "preempted" if state.step == stop else None,
    )
    return found, state


def begun(world: World, execution: ExecutionConfig, recipe: TrainRecipe = AVERAGED) -> TrainState:
    return initial_state(recipe, NUM_CLASSES, world.device, partial(shard, execution=execution, world=world))


def digest(state: TrainState) -> str:
    return content_digest(state.evaluation_model().state_dict())


def changing(world: World, folder: str) -> tuple[list[float], dict[int, str]]:
    """The losses of a run that is split anew at each checkpoint, and the digests of its network there."""
    run, found, digests = open_store(folder), [], {}
    for sharding, stop in CHANGES:
        execution = ExecutionConfig(sharding=sharding)
        state = begun(world, execution)
        resume(run, state, META, world)
        part_of_it, state = losses(world, sharding, state, stop)
        found += part_of_it
        saver = CheckpointSaver(Unleased(run, 1), world, Retention(9))
        saver.save(state, {**META, "save_id": f"{stop}", "images_seen": 0})
        saver.wait()
        world.broadcast_int(0)
        digests[stop] = digest(state)
    return found, digests


def going_back(world: World, folder: str) -> tuple[int, str, int]:
    """Step and digest of the network after a spike that leaves out step 5 and later, and the bytes that this rank has read for it."""
    state, run = begun(world, ExecutionConfig(sharding="fsdp")), open_store(folder)
    limits = {"loss": 9.0, "loss_limit": 1.0, "grad_norm": 1.0, "grad_norm_limit": 2.0}
    state.guard.spikes.append({"step": 9, "first": 5, "last": 9, **limits})
    num_bytes = list[int]()

    def counted(store, key, pieces, read=read.read_tensors):
        num_bytes.extend(piece["end"] - piece["start"] for piece in pieces)
        return read(store, key, pieces)

    read.read_tensors = counted
    rewind(run, state, lambda: begun(world, ExecutionConfig(sharding="fsdp")), world)
    return state.step, digest(state), sum(num_bytes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)
    group = World(rank, world_size, node_rank=rank // 2)
    told, held = {}, {}
    for each in SPLITS:
        told[each], state = losses(group, each)
        held[each] = sum(local_shard(value)[0].numel() for value in state.model.state_dict().values())
    changed = changing(group, sys.argv[4])
    back = going_back(group, sys.argv[4])
    masked = [losses(group, each, recipe=MASKED)[0] for each in ("none", "fsdp")]
    layered = [losses(group, each, recipe=LAYERED)[0] for each in SPLITS]
    print(json.dumps([told, held, changed, back, masked, layered]), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # see train_together.py
