"""FSDP and HSDP: weights, gradients and optimizer moments are split over the ranks, for networks that one GPU cannot hold.

Zhao et al., "PyTorch FSDP", arXiv:2304.11277, in torch's second form (`fully_shard`). Each block is gathered before it computes, and
freed behind it. Losses are those of DDP up to the order of sums. Gradients are reduced after every micro-batch, so that no rank holds
those of the whole network.
"""

from torch import nn

from vitline.vit.config import ExecutionConfig
from vitline.vit.models.recompute import blocks_of
from vitline.vit.training.world import World


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has split the network."""
    return hasattr(model, "set_requires_gradient_sync")


def shard(model: nn.Module, execution: ExecutionConfig, world: World) -> None:
    """Splits the network of every rank as `execution.sharding` says, with the weights of rank 0; call it before the optimizer is
    built. One rank has nothing to split. Raises ValueError for HSDP on machines with different numbers of ranks."""
    if execution.sharding == "none" or world.size == 1:
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for value in model.state_dict().values():
        dist.broadcast(value, 0)
    if execution.sharding == "fsdp":
        mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    else:
        machines = machines_of(world)
        mesh = init_device_mesh(
            world.device.type, (machines, world.size // machines), mesh_dim_names=("replicate", "shard")
        )
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def machines_of(world: World) -> int:
    """The number of machines, on each of which are equally many ranks in a row. Every rank must call it."""
    where = [int(text) for text in world.gather(str(world.node_rank))]
    per_machine = [where.count(machine) for machine in dict.fromkeys(where)]
    if len({*per_machine}) > 1 or where != sorted(where):
        raise ValueError(
            f"execution.sharding=hsdp splits within each machine, so all need equally many workers; here they have {per_machine}. "
            "Choose execution.num_workers accordingly, or execution.sharding=fsdp."
        )
    return len(per_machine)
