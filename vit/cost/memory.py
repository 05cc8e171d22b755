"""Memory of a training step: numbers of weights, and the activations that a network keeps for its gradient.

Both come from the network itself, run on tensors without data, so that they hold for every network and mode.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitline.vit.config import Frozen
from vitline.vit.models.build import meta_network
from vitline.vit.models.config import ActivationCheckpointing, NetworkConfig
from vitline.vit.models.recompute import kept_operators, recompute_blocks
from vitline.vit.training.layers import is_frozen

_CLASSES = 1000


def num_weights(config: NetworkConfig, num_classes: int) -> int:
    """Number of weights and biases."""
    return sum(parameter.numel() for parameter in meta_network(config, num_classes).parameters())


def num_frozen_weights(config: NetworkConfig, frozen: Frozen) -> int:
    """Number of weights and biases that a recipe freezes, for any number of classes."""
    named = [] if frozen == "none" else meta_network(config, _CLASSES).named_parameters()
    return sum(parameter.numel() for name, parameter in named if is_frozen(name, config, frozen))


def activation_bytes(
    config: NetworkConfig,
    num_examples: int = 1,
    *,
    bfloat16: bool = False,
    checkpointing: ActivationCheckpointing = "none",
) -> int:
    """Bytes of activations that a training step keeps for `num_examples` until its backward pass."""
    one = _kept_bytes(config, 1, bfloat16, checkpointing)
    return _kept_bytes(config, num_examples + 1, bfloat16, checkpointing) - one


def _kept_bytes(
    config: NetworkConfig, num_examples: int, bfloat16: bool, checkpointing: ActivationCheckpointing
) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    network, side = meta_network(config, _CLASSES), config.image_size_px
    with FakeTensorMode(allow_non_fake_inputs=True):
        network.to_empty(device="cpu").train()
        recompute_blocks(network, checkpointing)
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            _Results(keep) if checkpointing == "selective" else nullcontext(),
            torch.autocast("cpu", torch.bfloat16, enabled=bfloat16),
        ):
            network(torch.empty(num_examples, 3, side, side))
        weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    return sum(storage.nbytes() for where, storage in kept.items() if where not in weights)


class _Results(TorchDispatchMode):
    """Keeps the results of the operators that selective activation checkpointing keeps; autograd's hooks do not see them."""

    def __init__(self, keep: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keep, self._operators = keep, kept_operators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in self._operators:
            for result in found if isinstance(found, tuple) else (found,):
                if isinstance(result, Tensor):
                    self._keep(result)
        return found
