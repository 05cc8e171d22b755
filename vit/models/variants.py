"""Named networks: the sizes of the paper (Table 1), of AugReg and big_vision, the hybrids and the BiT ResNets."""

import re
from typing import Any

from vitline.vit.models.config import BiTConfig, HybridConfig, NetworkConfig, ViTConfig

# Ti and S are from DeiT and AugReg; mu, M, So400m, g and G from big_vision (arXiv:2106.04560, Table 2).
SIZES: dict[str, dict[str, Any]] = {
    "mu": {"embed_dim": 32, "depth": 1, "num_heads": 2, "mlp_dim": 128},
    "ti": {"embed_dim": 192, "depth": 12, "num_heads": 3, "mlp_dim": 768},
    "s": {"embed_dim": 384, "depth": 12, "num_heads": 6, "mlp_dim": 1536},
    "m": {"embed_dim": 512, "depth": 12, "num_heads": 8, "mlp_dim": 2048},
    "b": {"embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_dim": 3072},
    "l": {"embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_dim": 4096},
    "so400m": {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_dim": 4304},
    "h": {"embed_dim": 1280, "depth": 32, "num_heads": 16, "mlp_dim": 5120},
    "g": {"embed_dim": 1408, "depth": 40, "num_heads": 16, "mlp_dim": 6144},
    "G": {"embed_dim": 1664, "depth": 48, "num_heads": 16, "mlp_dim": 8192},
}
# (stages, patch on the feature map) by the parts of the name before and after the transformer's size. R+Ti/16 is the stem
# with patches of 8, so its stride is 32 in spite of its name (the authors' vit.md counts 49 tokens at 224 px).
HYBRIDS: dict[tuple[str, int], tuple[tuple[int, ...], int]] = {
    ("r50", 16): ((3, 4, 9), 1),
    ("r50", 32): ((3, 4, 6, 3), 1),
    ("r26", 32): ((2, 2, 2, 2), 1),
    ("r", 16): ((), 8),
}
BIT_STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
BIT_WIDTHS = (1, 2, 3, 4)
PATCHES = {"ti": (16,), "s": (16, 32), "b": (8, 16, 32), "l": (16, 32), "h": (14,)}
"""Patch sides in the paper and AugReg; other sides are valid variants too."""

REGISTERED: tuple[str, ...] = (
    *(f"{size}{patch}" for size, patches in PATCHES.items() for patch in patches),
    "so400m14",
    "g14",
    "G14",
    *("r50_b16", "r50_b32", "r50_l16", "r50_l32", "r26_s32", "r26_b32", "r26_ti32", "r_ti16"),
    *("bit_r50x1", "bit_r50x2", "bit_r50x3", "bit_r101x1", "bit_r101x3"),
    *("bit_r152x1", "bit_r152x2", "bit_r152x4", "bit_r200x3"),
)
"""The variants that `vitline model variants` lists."""


def network_variant(variant: str, **settings: Any) -> NetworkConfig:
    """The config of a variant such as `b16`, `r50_b16` or `bit_r50x1`, or `ViT-B/16`, `R50+ViT-B/16`, `BiT-R50x1`.

    `settings` are further fields of its config. Raises ValueError that describes the names of variants.
    """
    name = _plain(variant)
    if match := re.fullmatch(r"bit_r(\d+)x(\d+)", name):
        depth, width = int(match[1]), int(match[2])
        if depth in BIT_STAGES and width in BIT_WIDTHS:
            return BiTConfig(stages=BIT_STAGES[depth], width_factor=width, **settings)
    if match := re.fullmatch(rf"(?:(r\d*)_)?({'|'.join(SIZES)})(\d+)", name):
        resnet, size, patch = match[1], match[2], int(match[3])
        if resnet is None:
            return ViTConfig(patch_size_px=patch, **SIZES[size], **settings)
        if (resnet, patch) in HYBRIDS:
            stages, side = HYBRIDS[resnet, patch]
            return HybridConfig(stages=stages, patch_size=side, **SIZES[size], **settings)
    hybrids = ", ".join(f"{resnet}_<size>{patch}" for resnet, patch in HYBRIDS)
    raise ValueError(
        f"{variant!r} is not a network variant. Give a size ({', '.join(SIZES)}) and a patch side, such as b16; a hybrid "
        f"({hybrids}); or a BiT ResNet (bit_r50x1: depth {', '.join(map(str, BIT_STAGES))}, width 1 to 4)."
    )


def spelled(variant: str) -> str:
    """The name in the paper: `b16` -> `ViT-B/16`, `r50_b16` -> `R50+ViT-B/16`, `bit_r50x1` -> `BiT-R50x1`."""
    if variant.startswith("bit_"):
        return f"BiT-{variant[4:].replace('r', 'R')}"
    resnet, _, rest = variant.rpartition("_")
    size, patch = re.fullmatch(r"(\D+|so400m)(\d+)", rest).groups()  # type: ignore[union-attr]
    return f"{f'{resnet.upper()}+' if resnet else ''}ViT-{size if size == 'g' else size[0].upper() + size[1:]}/{patch}"


def is_variant(name: str) -> bool:
    """True if `network_variant` knows the name."""
    try:
        network_variant(name)
    except ValueError:
        return False
    return True


def vit_config(variant: str, **settings: Any) -> ViTConfig:
    """The config of a plain Vision Transformer such as `b16`, with further fields of ViTConfig. Raises ValueError for others."""
    config = network_variant(variant, **settings)
    if not isinstance(config, ViTConfig):
        raise ValueError(f"{variant!r} is not a plain Vision Transformer. Give a size and a patch side, such as b16.")
    return config


def heads_of(embed_dim: int, depth: int) -> int | None:
    """Number of attention heads of the named size with this width and depth; None if there is none. Some files lack it."""
    found = {s["num_heads"] for s in SIZES.values() if (s["embed_dim"], s["depth"]) == (embed_dim, depth)}
    return found.pop() if len(found) == 1 else None


def _plain(variant: str) -> str:
    """`ViT-B/16` -> `b16`, `R50+ViT-B/16` -> `r50_b16`, `BiT-R50x1` -> `bit_r50x1`. Sizes g and G stay different."""
    name = variant.strip().replace("+", "_").replace("/", "").replace("-", "_")
    name = re.sub(r"(?i)vit_", "", name)
    return re.sub(r"[A-FH-Z]|G(?!\d)", lambda match: match[0].lower(), name)
