"""Masked patch prediction as the objective of a training: which patches are corrupted, and how well they are predicted.

Source: arXiv:2010.11929, Sec. 4.6 and App. B.1.2. The network is a `MaskedPatchModel`; labels play no part.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitline.vit.config import MaskedPatchConfig, TrainRecipe
from vitline.vit.input.batches import Batch
from vitline.vit.input.permutation import derive_key, uniforms
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.masked_patches import (
    Corruption,
    MaskedPatchModel,
    draw_corruption,
    masked_patch_accuracy,
    masked_patch_losses,
    patch_targets,
)
from vitline.vit.models.network import Network, normalised


class PatchScores(NamedTuple):
    """Of n images."""

    losses: Float[Tensor, " n"]
    accuracy: Float[Tensor, " n"]
    """Fraction of the corrupted patches whose 3-bit colour is right."""


def with_patch_head(network: Network, config: MaskedPatchConfig) -> MaskedPatchModel:
    """The network that predicts patches, on the same device. Mask token and head are drawn by torch's global generator."""
    return MaskedPatchModel(network, config.target).to(next(network.parameters()).device)


def batch_corruption(batch: Batch, recipe: TrainRecipe, *purpose: str | int) -> Corruption:
    """The corruption of a batch, on its device: a function of the recipe's seed, the purpose and the position of each image (of an
    evaluation, its row). Does not wait for the device."""
    assert recipe.masked_patches is not None
    assert isinstance(recipe.model, ViTConfig)
    num_images, num_patches = len(batch.images), recipe.model.grid_side**2
    key, places = derive_key(recipe.seed, "patches", *purpose), batch.first_slot + np.arange(num_images)
    draws = torch.from_numpy(uniforms(key, places, count=2 * num_patches))
    return draw_corruption(draws, recipe.masked_patches.rate, batch.images.device)


def patch_scores(predictions: Tensor, batch: Batch, corruption: Corruption, recipe: TrainRecipe) -> PatchScores:
    """The predictions of a batch against its patches."""
    assert recipe.masked_patches is not None
    assert isinstance(recipe.model, ViTConfig)
    with torch.no_grad():
        targets = patch_targets(normalised(batch.images), recipe.model.patch_size_px, recipe.masked_patches.target)
        accuracy = masked_patch_accuracy(predictions.detach(), targets, corruption)
    return PatchScores(masked_patch_losses(predictions, targets, corruption), accuracy)
