"""Tries a user-defined optimizer on weights without memory, and counts the bytes of its state; as a program in a process of its own,
because its code is imported anew.

python -m vitline.vit.cost.user_optimizer < {"model": ..., "optim": ...}
"""

import copy
import functools
import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.models.build import meta_network
from vitline.vit.models.config import NetworkConfig, network_config
from vitline.vit.training.layers import freeze
from vitline.vit.training.optim import one_line, parameters_of, split_groups, user_optimizer

_CLASSES = 1000


def user_state_bytes(recipe: TrainRecipe, weights: int) -> int:
    """Bytes of the state of a user-defined optimizer, and of AdamW beside it, for a network of so many weights, which depend on the number
    of classes. Raises ValueError like `tried`."""
    given = recipe.model.model_dump_json(), recipe.optim.model_dump_json()
    few, more = (_counted(*given, num_classes) for num_classes in (_CLASSES, _CLASSES + 1))
    return few[1] + (weights - few[0]) * (more[1] - few[1]) // (more[0] - few[0])


@functools.cache
def _counted(model: str, optim: str, num_classes: int) -> tuple[int, int]:
    """`tried` of configs as JSON; plans ask for the same ones several times."""
    return tried(network_config(json.loads(model)), OptimConfig.model_validate_json(optim), num_classes)


def tried(model: NetworkConfig, optim: OptimConfig, num_classes: int) -> tuple[int, int]:
    """The weights of a network, and the bytes of the state after a step of a user-defined optimizer.

    Raises ValueError for one that cannot be made or take a step, or has a state that checkpoints cannot hold.
    """
    network = meta_network(model, num_classes)
    freeze(network, optim.frozen)
    groups, others = split_groups(network, optim)
    optimizer, parameters = user_optimizer(groups, optim), parameters_of(groups)
    before = _options(optimizer)
    try:
        with _Ones():  # type: ignore[no-untyped-call]
            optimizer.step()  # of weights without gradients, as in steps of the head alone
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
    except Exception as error:
        raise ValueError(
            f"not supported: the optimizer {optim.optimizer!r} cannot take a step on torch's device `meta`, where it is tried: "
            f"{one_line(error)}. Use another one."
        ) from error
    kept = [*_unsaved_state(optimizer, parameters), *_changed(before, _options(optimizer))]
    if kept:
        raise ValueError(
            f"not supported: the optimizer {optim.optimizer!r} keeps {kept[0]}, which checkpoints would not hold. They hold tensors "
            "and numbers in `state[weight]`. Use another one, or change its code."
        )
    of_class = sum(v.nbytes for of in optimizer.state.values() for v in of.values() if isinstance(v, Tensor))
    of_adamw = 2 * sum(parameter.nbytes for parameter in parameters_of(others))
    return sum(parameter.numel() for parameter in network.parameters()), of_class + of_adamw


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def _changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """Options that a step has changed."""
    pairs = zip(before, after, strict=True)
    return [f"{name!r} in its parameter groups" for old, new in pairs for name in new if new[name] != old.get(name)]


def _unsaved_state(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[str]:
    """What of the state is neither tensor nor number of a weight."""
    named = [(name, value) for of in optimizer.state.values() for name, value in of.items()]
    odd = [f"{type(value).__name__} {name!r}" for name, value in named if not isinstance(value, Tensor | int | float)]
    return odd + [f"state[{key!r:.40}]" for key in optimizer.state.keys() - set(parameters)]


class _Ones(TorchDispatchMode):
    """A number that is read from a tensor without memory, such as the norm of weights, is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    try:
        given = json.load(sys.stdin)
        tried(network_config(given["model"]), OptimConfig.model_validate(given["optim"]), _CLASSES)
        print("{}")
    except ValueError as refusal:
        sys.exit(str(refusal))
