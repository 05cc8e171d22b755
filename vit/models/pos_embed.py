"""Position embeddings for another patch grid: one resampler for fine-tuning, conversion and evaluation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# What a published model records, so that two scores can be told apart by it.
RESAMPLE_METHOD = "bilinear-align-corners"


def resample_pos_embed(pos_embed: Tensor, num_patches: int) -> Tensor:
    """A position table (1, T, D) resampled to `num_patches` patches, raster order; a class token's entry is kept.

    The table holds side * side patch entries, and one more in front if the model has a class token. Bilinear with
    aligned corners and without antialiasing: equal to the original's scipy zoom of order 1 (arXiv:2010.11929,
    Sec. 3.2 and the official code). Raises ValueError if either grid is not a square.
    """
    side, prefix = grid_side(pos_embed.shape[1])
    new_side = math.isqrt(num_patches)
    if new_side**2 != num_patches:
        raise ValueError(f"{num_patches} patches are no square grid; only square inputs can be fine-tuned.")
    if new_side == side:
        return pos_embed
    tokens, grid = pos_embed[:, :prefix], pos_embed[:, prefix:]
    grid = grid.transpose(1, 2).unflatten(2, (side, side))
    grid = F.interpolate(grid.float(), size=(new_side, new_side), mode="bilinear", align_corners=True)
    grid = grid.flatten(2).transpose(1, 2).to(pos_embed.dtype)
    return torch.cat([tokens, grid], dim=1)


def grid_side(num_entries: int) -> tuple[int, int]:
    """(side of the patch grid, number of prefix tokens: 0 or 1) of a position table. ValueError if neither fits."""
    for prefix in (0, 1):
        side = math.isqrt(num_entries - prefix)
        if side > 0 and side**2 == num_entries - prefix:
            return side, prefix
    raise ValueError(f"{num_entries} position embeddings are neither n*n nor n*n + 1; the grid is not a square.")
