"""Named sizes of the Vision Transformer: the paper's B, L, H (Table 1), and Ti, S of DeiT and AugReg."""

import re
from typing import Any

from vit.config import ViTConfig

SIZES: dict[str, dict[str, Any]] = {
    "ti": {"embed_dim": 192, "depth": 12, "num_heads": 3, "mlp_dim": 768},
    "s": {"embed_dim": 384, "depth": 12, "num_heads": 6, "mlp_dim": 1536},
    "b": {"embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_dim": 3072},
    "l": {"embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_dim": 4096},
    "h": {"embed_dim": 1280, "depth": 32, "num_heads": 16, "mlp_dim": 5120},
}


def vit_config(variant: str, **settings: Any) -> ViTConfig:
    """The config of `<size><patch>`, such as "b16"; further fields of ViTConfig by name. Raises ValueError otherwise."""
    match = re.fullmatch(r"([a-z]+)(\d+)", variant)
    if match is None or match[1] not in SIZES:
        raise ValueError(
            f"{variant!r} is no variant; a variant is a size ({', '.join(SIZES)}) and a patch side, as in 'b16'."
        )
    return ViTConfig(patch_size_px=int(match[2]), **SIZES[match[1]], **settings)


def forward_flops(config: ViTConfig, num_classes: int) -> int:
    """Floating-point operations of one image's forward pass (2 per multiply-add); matrix products only.

    Training is three times that. Norms, GELU, softmax and biases are left out, as in the usual MFU accounting.
    """
    dim, patches = config.embed_dim, config.num_patches
    tokens = patches + (config.pool == "token")
    embed = patches * 3 * config.patch_size_px**2 * dim
    projections = tokens * (4 * dim * dim + 2 * dim * config.mlp_dim)
    attention = 2 * tokens * tokens * dim
    head = dim * num_classes + (dim * dim if config.pre_logits else 0)
    return 2 * (embed + config.depth * (projections + attention) + head)
