"""The layers of a network from its embeddings to its head: which weights are trained, and at which share of the learning rate.

Layer 0 is all that is before the first block: patch and position embeddings, learned tokens, and the ResNet of a hybrid. Layers 1 to L
are the blocks, of a BiT ResNet those of all stages. Layer L + 1 is the final norm, pooling and the head, as in the code of BEiT
(arXiv:2106.08254, `get_num_layer_for_vit`) and MAE (arXiv:2111.06377, `lr_decay.py`).
"""

from torch import Tensor, nn

from vitline.vit.models.config import BiTConfig, Frozen, NetworkConfig
from vitline.vit.models.network import Network

_HEAD = ("head", "pre_logits", "prediction_head")
_LAST = (*_HEAD, "norm", "pool")


def _path(name: str) -> list[str]:
    """The parts of the name of a weight; masked patches are predicted by a network within another one."""
    return name.removeprefix("network.").split(".")


def is_head(name: str) -> bool:
    """Whether a weight is of the head, with its pre-logits layer, or of that which predicts patches."""
    return _path(name)[0] in _HEAD


def layer_of(name: str, config: NetworkConfig) -> int:
    """The layer of a weight of a network whose blocks are known."""
    part, *below = _path(name)
    if part in _LAST:
        return config.num_blocks + 1
    if part == "blocks":
        return int(below[0]) + 1
    if part == "stages" and isinstance(config, BiTConfig):
        return sum(config.stages[: int(below[0])]) + int(below[1]) + 1
    return 0


def is_hidden_matrix(name: str, parameter: Tensor, config: NetworkConfig) -> bool:
    """Whether a weight is a matrix of a block, for which optimizers such as Muon are made; tables of positions are not told apart."""
    return parameter.ndim == 2 and 0 < layer_of(name, config) <= config.num_blocks


def lr_share(name: str, model: nn.Module, decay: float) -> float:
    """The share of the learning rate at which a weight is trained, for the factor `decay` from each layer to the one below it."""
    if decay == 1:
        return 1.0
    assert isinstance(model, Network)
    return decay ** (model.config.num_blocks + 1 - layer_of(name, model.config))


def is_frozen(name: str, config: NetworkConfig, frozen: Frozen) -> bool:
    """Whether a recipe freezes a weight."""
    if frozen == "none":
        return False
    if frozen == "backbone":
        return not is_head(name)
    return layer_of(name, config) <= (0 if frozen == "embeddings" else frozen)


def freeze(model: Network, frozen: Frozen) -> None:
    """Lets the weights that a recipe freezes have no gradients, in place."""
    for name, parameter in model.named_parameters():
        if is_frozen(name, model.config, frozen):
            parameter.requires_grad_(False)


def head_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the head."""
    return [parameter for name, parameter in model.named_parameters() if is_head(name)]


def drop_gradients_below_head(model: nn.Module) -> None:
    """Leaves gradients to the head only: clipping does not count the others, and the optimizer neither changes their weights nor their
    moments. Of a network that is split over ranks; any other computes none."""
    for name, parameter in model.named_parameters():
        if not is_head(name):
            parameter.grad = None
