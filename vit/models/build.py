"""Builds networks from their configs."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitline.infra.config import replace
from vitline.vit.models.bit import BiTResNet
from vitline.vit.models.config import (
    BiTConfig,
    HybridConfig,
    NetworkConfig,
    TransformerConfig,
    UserNetworkConfig,
    ViTConfig,
)
from vitline.vit.models.hybrid import HybridTransformer
from vitline.vit.models.limits import check_limits
from vitline.vit.models.masked_patches import MaskedPatchModel
from vitline.vit.models.network import Network
from vitline.vit.models.pos_embed import resample_positions, sincos_2d
from vitline.vit.models.user_code import imported_where_allowed, source_digest
from vitline.vit.models.vit import Transformer, VisionTransformer

log = logging.getLogger(__name__)


def build_network(config: NetworkConfig, num_classes: int) -> Network:
    """The network of a config, with initial weights drawn from torch's global generator."""
    if isinstance(config, HybridConfig):
        return HybridTransformer(config, num_classes)
    if isinstance(config, BiTConfig):
        return BiTResNet(config, num_classes)
    if isinstance(config, UserNetworkConfig):
        return user_network(config, num_classes)
    assert isinstance(config, ViTConfig), config
    return VisionTransformer(config, num_classes)


def user_network(config: UserNetworkConfig, num_classes: int) -> Network:
    """A user-defined network. Raises ValueError for code that may not be imported, fails, or makes no `Network` with a head of
    `num_classes`. Code that has changed since is a warning; a training compares it before (`vitline.vit.models.user_code.check_source`)."""
    make = imported_where_allowed(config.network, "network")
    if config.source and (found := source_digest(config.network)) != config.source:
        log.warning("the code of %s has changed: %s, was %s", config.network, found[:12], config.source[:12])
    try:
        network = make(config, num_classes)
    except Exception as error:
        raise ValueError(f"The network {config.network!r} failed: {type(error).__name__}: {error}") from error
    head = getattr(network, "head", None)
    if not isinstance(network, Network) or not isinstance(head, nn.Linear) or head.out_features != num_classes:
        raise ValueError(
            f"{config.network} returned {type(network).__name__}. It must return a subclass of vitline.vit.models.network.Network whose "
            f"`head` is a torch.nn.Linear of {num_classes:,} classes."
        )
    network.config, network.num_classes = config, num_classes
    return network


def like(network: Network) -> Network:
    """Another network of the same kind, on the same device, with initial weights."""
    if isinstance(network, MaskedPatchModel):
        return MaskedPatchModel(like(network.network), network.target).to(network.mask_token.device)
    return build_network(network.config, network.num_classes).to(next(network.parameters()).device)


class Undrawn(TorchFunctionMode):
    """Leaves out the drawing of weights: without memory there is none, and torch loads its compiler for it, 1.7 CPU-seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def meta_network(config: NetworkConfig, num_classes: int) -> Network:
    """The network on the meta device: names and shapes of its weights, without memory.

    Raises ValueError for sizes beyond `limits.py`, which even without memory take too long or overflow.
    """
    check_limits(config)
    with torch.device("meta"), Undrawn():
        return build_network(config, num_classes)


def network_with(config: NetworkConfig, num_classes: int, weights: Mapping[str, Tensor]) -> Network:
    """The network with these weights, in evaluation mode. The weights are not copied.

    Raises torch's RuntimeError if names or shapes do not match, and ValueError like `meta_network`.
    """
    # User code may compute buffers that are not among the weights.
    own = isinstance(config, UserNetworkConfig)
    network = build_network(config, num_classes) if own else meta_network(config, num_classes)
    network.load_state_dict(dict(weights), strict=True, assign=True)
    if isinstance(network, Transformer) and network.config.pos_embed == "sincos-2d":
        network.pos_embed_fixed = sincos_2d(network.config.grid_side, network.config.embed_dim)
    return network.eval()


def at_resolution(network: Network, image_size_px: int) -> Network:
    """The same network for images of another size. Position embeddings are resampled, all other weights are shared.

    Raises ValueError for relative position embeddings, which cannot be resampled, and for sizes beyond `limits.py`.
    """
    if image_size_px == network.config.image_size_px:
        return network
    config = replace(network.config, image_size_px=image_size_px)
    check_limits(config)
    weights: dict[str, Tensor] = dict(network.state_dict())
    if isinstance(config, TransformerConfig):
        weights = resample_positions(weights, config)
    return network_with(config, network.num_classes, weights)
