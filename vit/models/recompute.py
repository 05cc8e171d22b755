"""Activation checkpointing: blocks whose activations are computed again in the backward pass, for networks that need the memory.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174. Losses and gradients are those without it bit for bit,
dropout included: the state of torch's generator is restored before a block is computed again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from vitline.vit.models.bit import PreActBottleneck
from vitline.vit.models.config import ActivationCheckpointing
from vitline.vit.models.hybrid import Bottleneck
from vitline.vit.models.vit import Block

_ATTENTION = "_scaled_dot_product_"
_KEPT = (
    *("mm", "addmm", "bmm", "convolution"),
    *(f"{_ATTENTION}{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    f"{_ATTENTION}flash_attention_for_cpu",
)
_BLOCKS = (Block, Bottleneck, PreActBottleneck)


def recompute_blocks(model: nn.Module, mode: ActivationCheckpointing) -> None:
    """Lets each block of the network keep only its input (`full`), or that and the results of its matrix products, convolutions
    and attention (`selective`), for the backward pass. In place; names of parameters stay, and without gradients nothing changes."""
    for block in blocks_of(model):
        vars(block).pop("forward", None)
        if mode != "none":
            vars(block)["forward"] = partial(_recomputed, block.forward, _contexts(mode))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a network, in their order: those of transformers and of ResNets, and of others by their `block_types`."""
    types = (*_BLOCKS, *getattr(model, "block_types", ()))
    return [module for module in model.modules() if isinstance(module, types)]


def _contexts(mode: ActivationCheckpointing) -> dict[str, Any]:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    if mode == "full":
        return {}
    return {"context_fn": partial(create_selective_checkpoint_contexts, kept_operators())}


def kept_operators() -> list[Any]:
    """The operators whose results `selective` keeps."""
    return [getattr(torch.ops.aten, name).default for name in _KEPT]


def _recomputed(forward: Callable[..., Any], contexts: dict[str, Any], *inputs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, **contexts)
