"""Position embeddings: the fixed ones, and the resampling for fine-tuning, conversion and evaluation."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitline.vit.models.config import ResampleMethod, TransformerConfig

# Arguments of F.interpolate. The first equals the scipy zoom of order 1 in the paper's code; ports use the others.
METHODS: dict[str, dict[str, object]] = {
    "bilinear-align-corners": {"mode": "bilinear", "align_corners": True},
    "bilinear": {"mode": "bilinear", "align_corners": False},
    "bicubic": {"mode": "bicubic", "align_corners": False},
    "bicubic-antialias": {"mode": "bicubic", "align_corners": False, "antialias": True},
}


def resample_pos_embed(
    pos_embed: Float[Tensor, "n T D"], num_patches: int, method: ResampleMethod = "bilinear-align-corners"
) -> Float[Tensor, "n U D"]:
    """Position tables resampled to `num_patches` patches in raster order; the entry of a class token is kept.

    A table has side * side entries for patches, and one more at the front if the model has a class token. The default,
    bilinear with aligned corners and without antialiasing, equals the scipy zoom of order 1 in the paper's code
    (arXiv:2010.11929, Sec. 3.2). Raises ValueError if either grid is not a square.
    """
    side, prefix = grid_side(pos_embed.shape[1])
    new_side = math.isqrt(num_patches)
    if new_side**2 != num_patches:
        raise ValueError(f"{num_patches} patches do not form a square grid. Use square images.")
    if new_side == side:
        return pos_embed
    tokens, grid = pos_embed[:, :prefix], pos_embed[:, prefix:]
    grid = grid.transpose(1, 2).unflatten(2, (side, side))
    grid = F.interpolate(_float(grid), size=(new_side, new_side), **METHODS[method])  # type: ignore[arg-type]
    grid = grid.flatten(2).transpose(1, 2).to(pos_embed.dtype)
    return torch.cat([tokens, grid], dim=1)


def resample_positions(weights: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """The weights with their position tables resampled to the grid of `config`, by its method.

    Raises ValueError for relative position embeddings of another grid, whose offsets cannot be resampled.
    """
    moved = dict(weights)
    for name, table in weights.items():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "pos_embed":
            moved[name] = resample_pos_embed(table, config.num_patches, config.pos_embed_resample)
        elif leaf in ("pos_embed_x", "pos_embed_y"):
            moved[name] = resample_axis(table, config.grid_side, config.pos_embed_resample)
        elif leaf == "pos_embed_offsets" and len(table) != 2 * config.num_tokens - 1:
            raise ValueError(
                f"not supported: relative position embeddings at another resolution. {name} has {len(table)} offsets, but "
                f"images of {config.image_size_px} px need {2 * config.num_tokens - 1}. Keep the resolution."
            )
    return moved


def resample_axis(
    table: Float[Tensor, "n S D"], side: int, method: ResampleMethod = "bilinear-align-corners"
) -> Float[Tensor, "n U D"]:
    """One axis of a 2-D embedding, resampled to `side` entries like `resample_pos_embed` along that axis."""
    if table.shape[1] == side:
        return table
    grid = _float(table).transpose(1, 2)[:, :, None, :].expand(-1, -1, 2, -1)  # two equal rows: only x is resampled
    grid = F.interpolate(grid, size=(2, side), **METHODS[method])  # type: ignore[arg-type]
    return grid[:, :, 0].transpose(1, 2).to(table.dtype)


def grid_side(num_entries: int) -> tuple[int, int]:
    """(side of the patch grid, number of prefix tokens: 0 or 1) of a position table. ValueError if the grid is no square."""
    for prefix in (0, 1):
        side = math.isqrt(num_entries - prefix)
        if side > 0 and side**2 == num_entries - prefix:
            return side, prefix
    raise ValueError(
        f"A position table has {num_entries} entries, expected n * n or n * n + 1: only square grids are supported."
    )


def sincos_2d(side: int, embed_dim: int) -> Float[Tensor, "1 P D"]:
    """Fixed embeddings sin(x), cos(x), sin(y), cos(y), each with D/4 frequencies from 1 to 1/10000; float64.

    Source: arXiv:2205.01580, Sec. 2.1, as big_vision computes them.
    """
    num = embed_dim // 4
    omega = 10_000.0 ** (-torch.arange(num, dtype=torch.float64) / max(num - 1, 1))
    at = torch.arange(side, dtype=torch.float64)[:, None] * omega
    x, y = at.repeat(side, 1), at.repeat_interleave(side, dim=0)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)[None]


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
