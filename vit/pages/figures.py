"""Computes the paper's figures of a network: filters, position embeddings, attention distance, attention rollout.

Source: arXiv:2010.11929, Sec. 4.5, Fig. 6, 7, 10, 11 and 14. `vitline.vit.pages.page` draws the figures.
"""

import functools
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitline.vit.models.bit import BiTResNet
from vitline.vit.models.config import HybridConfig, TransformerConfig, ViTConfig
from vitline.vit.models.hybrid import HybridTransformer
from vitline.vit.models.network import Network
from vitline.vit.models.std_conv import StdConv2d
from vitline.vit.models.vit import Transformer

# The paper shows 28 components and averages attention distances over 128 images.
NUM_FILTERS, MAX_IMAGES = 28, 128


@dataclass(frozen=True, eq=False)
class Inspection:
    """The numbers of the paper's four figures. Fields that a network does not have are None, and `notes` gives the reason."""

    network: str
    """A phrase that describes the network."""
    image_size_px: int
    """Side of the network's input."""
    filter_source: Literal["patch embedding", "root convolution"]
    """The layer that takes the pixels."""
    num_kernels: int
    """Number of kernels of that layer."""
    filters: Float[np.ndarray, "F k k 3"]
    """Principal components of the kernels, each of length 1, by decreasing variance."""
    filter_variance_fractions: Float[np.ndarray, " F"]
    """Share of the kernels' variance along each component."""
    num_images: int = 0
    """Number of images whose attention was measured."""
    has_class_token: bool = False
    """True if the rollout is that of a class token."""
    patch_px: int | None = None
    """Distance between neighbouring patches, in pixels of the image."""
    position_similarity: Float[np.ndarray, "N N"] | None = None
    """Cosine similarity of the position embeddings of the patches, in raster order."""
    attention_distance_px: Float[np.ndarray, "L H"] | None = None
    """Mean attention distance of each layer and head."""
    uniform_distance_px: float | None = None
    """The distance of uniform attention over all patches."""
    rollout: Float[np.ndarray, "n g g"] | None = None
    """Share of each patch in the representation of each image. With the share of the class token they sum to 1."""
    notes: tuple[str, ...] = ()
    """What is left out or computed differently, one sentence each."""


def inspect_network(network: Network, images: Float[Tensor, "n 3 H W"], batch_size: int = 8) -> Inspection:
    """The numbers of all four figures, on the first 128 images in [-1, 1]. A BiT ResNet needs no images.

    - Filters: `principal_components` of the patch embedding's kernels, or of the standardised root kernels of a ResNet.
    - Position similarity: `position_similarity`, of the first table if layers have their own.
    - Attention distance: the mean of `mean_distances` over the images, for patches that are `patch_px` apart.
    - Rollout: `rollout_step` through all layers, then the class token's row over the patches. Without a class token, the
      mean over all rows, which corresponds to average pooling.

    Attention weights are computed for one layer and `batch_size` images at a time, and summed in float64. The network runs
    on its device in evaluation mode and is not changed. Raises ValueError if the images do not fit the network, or if
    weights or attention are not finite.
    """
    layer = _first_layer(network)
    kernels = _kernels(layer)
    if not np.isfinite(kernels).all():
        raise ValueError(
            f"The {len(kernels)} kernels of the first layer are not all finite: the training diverged. Use another model."
        )
    filters, fractions = principal_components(kernels)
    inspection = Inspection(
        network=network.config.summary,
        image_size_px=network.config.image_size_px,
        filter_source="root convolution" if isinstance(layer, StdConv2d) else "patch embedding",
        num_kernels=len(kernels),
        filters=filters,
        filter_variance_fractions=fractions,
        notes=tuple(_notes(network)),
    )
    if not isinstance(network, Transformer):
        return inspection
    _check_images(images, network.config.image_size_px, batch_size)
    distances = grid_distances(network.config.grid_side, _patch_px(network.config))
    attention, rollout = _watch_attention(network, images[:MAX_IMAGES], batch_size, distances)
    return replace(
        inspection,
        num_images=len(rollout),
        has_class_token=network.cls_token is not None,
        patch_px=_patch_px(network.config),
        position_similarity=position_similarity(network),
        attention_distance_px=attention,
        uniform_distance_px=float(distances.mean()),
        rollout=rollout,
    )


def principal_components(
    kernels: Float[np.ndarray, "K C k k"], num_components: int = NUM_FILTERS
) -> tuple[Float[np.ndarray, "F k k C"], Float[np.ndarray, " F"]]:
    """The principal components of the kernels, and the share of their variance along each (Fig. 7, left).

    Each kernel is one observation of C * k * k numbers, centred by the mean kernel. There are at most K - 1 components. The
    sign of a component is arbitrary; here its largest entry is positive, so that equal kernels give equal figures.
    """
    flat = kernels.reshape(len(kernels), -1).astype(np.float64)
    _, scale, rows = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    rows = rows[: min(num_components, max(len(kernels) - 1, 1))]
    variance = scale**2 / max(float((scale**2).sum()), np.finfo(np.float64).tiny)
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
    components = (rows * np.sign(largest)).reshape(len(rows), *kernels.shape[1:])
    return components.transpose(0, 2, 3, 1), variance[: len(rows)]


@torch.no_grad()
def position_similarity(network: Transformer) -> Float[np.ndarray, "N N"] | None:
    """Cosine similarity of the position embeddings of all pairs of patches (Fig. 7, centre; Fig. 10).

    Without the class token; with one table per layer, of the first table. None if no embeddings are added to the tokens.
    """
    tables = network.positions()
    if tables is None:
        return None
    patches = tables[0, -network.config.num_patches :].double().cpu().numpy()
    length = np.linalg.norm(patches, axis=1, keepdims=True)
    unit = patches / np.maximum(length, np.finfo(np.float64).tiny)
    similarity: np.ndarray = unit @ unit.T
    return similarity


def grid_distances(side: int, patch_px: float) -> Float[np.ndarray, "N N"]:
    """Euclidean distance in pixels between the patches of a side * side grid, in raster order."""
    place = np.arange(side) * float(patch_px)
    y, x = np.repeat(place, side), np.tile(place, side)
    distances: np.ndarray = np.hypot(y[:, None] - y, x[:, None] - x)
    return distances


def mean_distances(weights: Float[Tensor, "B H T T"], distances: Float[Tensor, "N N"]) -> Float[Tensor, "B H"]:
    """Mean attention distance of each head: distance from query to key, weighted by attention, mean over the queries.

    T = N, or N + 1 with a class token at the front. The paper does not specify how to treat the class token, which is not
    part of the grid. Here it is dropped as query and as key, and the remaining rows are renormalised to sum to 1, so that
    attention to the class token does not reduce the distance. The query's own patch counts with distance 0. Fig. 7, right.
    """
    among_patches = weights[:, :, -len(distances) :, -len(distances) :].double()
    total = among_patches.sum(dim=3)
    weighted = torch.einsum("bhqk,qk->bhq", among_patches, distances.double())
    # A row without any attention to patches counts with distance 0.
    return (weighted / total.clamp_min(torch.finfo(torch.float64).tiny)).mean(dim=2)


def rollout_step(rollout: Float[Tensor, "B T T"] | None, weights: Float[Tensor, "B H T T"]) -> Float[Tensor, "B T T"]:
    """Rollout after one more layer (`rollout` is None before the first). Row t gives the share of each input token in token t.

    The layer's weights are averaged over heads, the identity is added for the residual connection, and rows are
    renormalised to sum to 1. Source: Abnar and Zuidema, arXiv:2005.00928; arXiv:2010.11929, App. D.8.
    """
    mixed = weights.double().mean(dim=1)
    mixed = mixed + torch.eye(mixed.shape[1], dtype=mixed.dtype, device=mixed.device)
    mixed = mixed / mixed.sum(dim=2, keepdim=True)
    return mixed if rollout is None else mixed @ rollout


@torch.no_grad()
def _watch_attention(
    network: Transformer, images: Tensor, batch_size: int, distances: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean distances (L, H) over the images, and the rollout (n, g, g) of each."""
    parameter = next(network.parameters())
    side, blocks = network.config.grid_side, network.encoder()
    between = torch.from_numpy(distances).to(parameter.device)
    sums = torch.zeros(len(blocks), network.config.num_heads, dtype=torch.float64, device=parameter.device)
    rollout: Tensor | None = None
    shares: list[np.ndarray] = []

    def look(layer: int, _: nn.Module, inputs: tuple[Tensor]) -> None:
        nonlocal rollout
        weights = blocks[layer].attention.weights(inputs[0])
        sums[layer] += mean_distances(weights, between).sum(dim=0)
        rollout = rollout_step(rollout, weights)

    was_training = network.training
    with ExitStack() as stack:
        stack.callback(network.train, was_training)
        network.eval()
        for i, block in enumerate(blocks):
            stack.enter_context(block.attention.register_forward_pre_hook(functools.partial(look, i)))
        for batch in images.split(batch_size):
            rollout = None
            network.encode(network.tokens(batch.to(parameter.device, parameter.dtype)))
            assert rollout is not None
            rows = rollout[:, 0, 1:] if network.cls_token is not None else rollout.mean(dim=1)
            shares.append(rows.unflatten(1, (side, side)).cpu().numpy())
    attention = (sums / len(images)).cpu().numpy()
    if not np.isfinite(attention).all():
        layer = int(np.flatnonzero(~np.isfinite(attention).all(axis=1))[0])
        raise ValueError(f"The attention of blocks.{layer} is not finite on these images. Check its weights.")
    return attention, np.concatenate(shares)


def _first_layer(network: Network) -> nn.Conv2d:
    """The convolution that takes the pixels."""
    if isinstance(network, BiTResNet):
        return network.conv_root
    assert isinstance(network, Transformer), network
    return network.resnet.conv_root if isinstance(network, HybridTransformer) else network.patch_embed


@torch.no_grad()
def _kernels(layer: nn.Conv2d) -> Float[np.ndarray, "K 3 k k"]:
    weight = layer.standardize(layer.weight) if isinstance(layer, StdConv2d) else layer.weight
    return weight.double().cpu().numpy()


def _patch_px(config: TransformerConfig) -> int:
    """Distance between neighbouring patches in pixels. image_size_px / grid_side is larger if a remainder is dropped."""
    if isinstance(config, HybridConfig):
        return config.stride * config.patch_size
    assert isinstance(config, ViTConfig), config
    return config.patch_size_px


def _notes(network: Network) -> list[str]:
    if not isinstance(network, Transformer):
        return ["A BiT ResNet has neither position embeddings nor attention; only its filters are shown."]
    notes, config = [], network.config
    if isinstance(network, HybridTransformer):
        notes.append(
            "The patch embedding of a hybrid takes feature maps, not colours; the filters are those of the ResNet's root."
        )
    if config.pos_embed == "none":
        notes.append("This network has no position embeddings, so there is no position similarity.")
    if config.pos_embed == "relative":
        notes.append(
            "Relative position embeddings belong to offsets, not to patches, so there is no position similarity."
        )
    if config.pos_embed_at == "every-layer" and config.depth > 1 and config.pos_embed != "sincos-2d":
        notes.append("Every layer has its own position embeddings; the similarity is that of the first layer.")
    if network.cls_token is None:
        notes.append("This network has no class token; the rollout is the mean over the rows of all patches.")
    return notes


def _check_images(images: Tensor, side: int, batch_size: int) -> None:
    if images.ndim != 4 or images.shape[1:] != (3, side, side) or not len(images):
        raise ValueError(
            f"The images have shape {tuple(images.shape)}, expected (n, 3, {side}, {side}) with n of 1 or more."
        )
    if not images.is_floating_point():
        raise ValueError(
            f"The images have dtype {images.dtype}, expected floats from -1 (black) to 1 (white): pixels / 127.5 - 1."
        )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be 1 or more.")
