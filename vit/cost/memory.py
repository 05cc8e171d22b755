"""Memory of a training step: numbers of weights, and the activations that a network keeps for its gradient.

Both come from the network itself, run on tensors without data, so that they hold for every network and mode.
"""

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitline.vit.models.build import meta_network
from vitline.vit.models.config import ActivationCheckpointing, Frozen, NetworkConfig
from vitline.vit.models.recompute import kept_operators, recompute_blocks
from vitline.vit.training.layers import freeze, is_frozen

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
    frozen: Frozen = "none",
) -> int:
    """Bytes of activations that a training step keeps for `num_examples` until its backward pass.

    Frozen layers keep nothing, but hold what they compute with: where there are any, it is the most that the forward pass holds at a time.
    """
    one = _forward_bytes(config, 1, bfloat16, checkpointing, frozen)
    return _forward_bytes(config, num_examples + 1, bfloat16, checkpointing, frozen) - one


def _forward_bytes(
    config: NetworkConfig, num_examples: int, bfloat16: bool, checkpointing: ActivationCheckpointing, frozen: Frozen
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
        freeze(network, frozen)
        recompute_blocks(network, checkpointing)
        held = _Held(network.parameters())
        with (
            nullcontext() if frozen == "none" else held,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            _Results(keep) if checkpointing == "selective" else nullcontext(),
            torch.autocast("cpu", torch.bfloat16, enabled=bfloat16),
        ):
            network(torch.empty(num_examples, 3, side, side))
        if frozen != "none":
            return held.most_bytes
        weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    return sum(storage.nbytes() for where, storage in kept.items() if where not in weights)


class _Held(TorchDispatchMode):
    """Counts the most bytes of results of operators that there are at a time, besides the weights."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there = {weight.untyped_storage()._cdata for weight in weights}
        self._num_bytes = self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for result in tree_leaves(found):
            if isinstance(result, Tensor) and (storage := result.untyped_storage())._cdata not in self._there:
                self._there.add(storage._cdata)
                self._num_bytes += storage.nbytes()
                self.most_bytes = max(self.most_bytes, self._num_bytes)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return found

    def _gone(self, where: int, num_bytes: int) -> None:
        self._there.remove(where)
        self._num_bytes -= num_bytes


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
