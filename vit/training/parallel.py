"""A network as the processes of a training compute it together: copied or split, compiled, its gradients summed."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitline.vit.config import ExecutionConfig
from vitline.vit.models.recompute import blocks_of, recompute_blocks
from vitline.vit.models.vit import VisionTransformer
from vitline.vit.training.sharding.fsdp import is_sharded
from vitline.vit.training.world import World

BUCKET_BYTES = 32 * 2**20
"""Size of the messages in which CPU ranks sum their gradients."""


def wrap(model: nn.Module, execution: ExecutionConfig, world: World) -> nn.Module:
    """The model as this world trains it: with activation checkpointing and compiled as `execution` says, and with the weights of
    rank 0.

    Several GPU ranks train under DDP, unless `shard` has split the network over them. On CPU ranks `train_step` sums the gradients with
    `sum_gradients` instead.
    """
    recompute_blocks(model, execution.activation_checkpointing)
    if execution.compile:
        compile_parts(model)
    if is_sharded(model):
        return model
    if world.size == 1:
        return model
    if world.device.type != "cpu":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for value in model.state_dict().values():
        dist.broadcast(value, 0)
    return model


def set_tf32(allowed: bool) -> None:
    """Whether a GPU may compute products of float32 matrices, and convolutions alike, with 10 bits of mantissa: float32 means float32;
    beside bfloat16 it is what remains in float32, such as the head."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def compile_parts(model: nn.Module) -> None:
    """Compiles a network in place; the names of its tensors do not change.

    Of a Vision Transformer some blocks together: all such parts are alike and the compiler works for one or two of them only, however
    many there are, and DDP sends the gradients of one while the next is computed. Besides them the stem, from bytes to embeddings.
    Each block by itself where its weights are gathered outside of it, or its activations computed again. Any other network as a whole:
    its blocks differ.
    """
    blocks = blocks_of(model)
    if not is_sharded(model) and not any(isinstance(part, VisionTransformer) for part in model.modules()):
        model.compile()
        return
    # It cuts large graphs into the messages of DDP; a few blocks are not worth cutting.
    torch._dynamo.config.optimize_ddp = False
    alone = is_sharded(model) or any("forward" in vars(block) for block in blocks)
    if alone:
        for block in blocks:
            vars(block)["forward"] = torch.compile(block.forward)
    for part in model.modules():
        if isinstance(part, VisionTransformer):
            vars(part)["stem"] = torch.compile(partial(VisionTransformer.stem, part))
            vars(part)["through"] = VisionTransformer.through if alone else torch.compile(VisionTransformer.through)


def sum_gradients(model: nn.Module, world: World) -> None:
    """Replaces each gradient by its sum over all ranks, bit for bit the same on each rank, in the order of the parameters.

    DDP reorders its buckets after the first step unless it searches for unused parameters, and that search warns at
    every start. After a reordering, a resumed run would add gradients in another order than the uninterrupted run; on
    the CPU their losses must agree bit for bit (`vit/README.md`). Which parameters have
    gradients depends on the recipe and the step only.
    """
    bucket: list[Tensor] = []
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for index, gradient in enumerate(gradients):
        bucket.append(gradient)
        if sum(g.nbytes for g in bucket) < BUCKET_BYTES and index < len(gradients) - 1:
            continue
        summed = world.sum(torch.cat([g.flatten() for g in bucket])).split([g.numel() for g in bucket])
        for target, values in zip(bucket, summed, strict=True):
            target.copy_(values.view_as(target))
        bucket = []
