"""What reading and writing share: timm's names of our modules and settings, and the factors of its kernels."""

from collections.abc import Callable

from torch import Tensor

from vitline.vit.convert.tables import Table

TRANSFORMER: Table = {
    "patch_embed": "patch_embed.proj",
    "cls_token": "cls_token",
    "pos_embed": "pos_embed",
    "blocks.#.norm1": "blocks.#.norm1",
    "blocks.#.attention.qkv": "blocks.#.attn.qkv",
    "blocks.#.attention.out": "blocks.#.attn.proj",
    "blocks.#.norm2": "blocks.#.norm2",
    "blocks.#.fc1": "blocks.#.mlp.fc1",
    "blocks.#.fc2": "blocks.#.mlp.fc2",
    "norm": "norm",
    "pool.probe": "attn_pool.latent",
    "pool.query": "attn_pool.q",
    "pool.key_value": "attn_pool.kv",
    "pool.out": "attn_pool.proj",
    "pool.norm": "attn_pool.norm",
    "pool.fc1": "attn_pool.mlp.fc1",
    "pool.fc2": "attn_pool.mlp.fc2",
    "head": "head",
}
BACKBONE = "patch_embed.backbone"
HYBRID: Table = TRANSFORMER | {
    "resnet.conv_root": f"{BACKBONE}.stem.conv",
    "resnet.norm_root": f"{BACKBONE}.stem.norm",
    **{f"resnet.stages.#.#.{kind}{n}": f"{BACKBONE}.stages.#.blocks.#.{kind}{n}" for kind in ("conv", "norm") for n in (1, 2, 3)},
    "resnet.stages.#.#.conv_proj": f"{BACKBONE}.stages.#.blocks.#.downsample.conv",
    "resnet.stages.#.#.norm_proj": f"{BACKBONE}.stages.#.blocks.#.downsample.norm",
}  # fmt: skip
STEM_ONLY: Table = HYBRID | {"resnet.conv_root": f"{BACKBONE}.conv", "resnet.norm_root": f"{BACKBONE}.norm"}
BIT: Table = {
    "conv_root": "stem.conv",
    **{f"stages.#.#.{kind}{n}": f"stages.#.blocks.#.{kind}{n}" for kind in ("conv", "norm") for n in (1, 2, 3)},
    "stages.#.#.conv_proj": "stages.#.blocks.#.downsample.conv",
    "norm": "norm",
    "head": "head.fc",
}

NORM_EPS = 1e-6  # of timm's LayerNorm; a config.json cannot set another one
ACT_LAYER = {"erf": "gelu", "tanh": "gelu_tanh"}
GLOBAL_POOL = {"token": "token", "gap": "avg", "map": "map"}
DROPOUT = ("pos_drop_rate", "proj_drop_rate")


def rescale(weights: dict[str, Tensor], prefix: str, change: Callable[[Tensor], Tensor]) -> None:
    """Changes all convolution kernels whose names start with `prefix`, in place."""
    for name, value in weights.items():
        if name.startswith(prefix) and value.ndim == 4:
            weights[name] = change(value.detach())


def kernel_from_timm(kernel: Tensor) -> Tensor:
    """The kernel a k for which a k / (a std + 1e-5) = k / sqrt(var + 1e-8)."""
    std = _std(kernel)
    return (kernel * (1e3 * ((std.square() + 1e-8).sqrt() + std))).to(kernel.dtype)


def kernel_to_timm(kernel: Tensor) -> Tensor:
    """The kernel b k for which b k / sqrt(b^2 var + 1e-8) = k / (std + 1e-5)."""
    std = _std(kernel)
    return (kernel * (1e-8 / (2e-5 * std + 1e-10)).sqrt()).to(kernel.dtype)


def _std(kernel: Tensor) -> Tensor:
    """Biased standard deviation per output channel, in float64."""
    return kernel.double().std(dim=(1, 2, 3), correction=0, keepdim=True)
