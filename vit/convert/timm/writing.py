"""Writes our networks for timm: as its arguments and state dict, or as a folder that it loads."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitline.vit.convert.folder import CONFIG, check_class_names, write_folder
from vitline.vit.convert.preprocessing import mean_and_std
from vitline.vit.convert.tables import Table, give, position_table
from vitline.vit.convert.timm.mapping import (
    ACT_LAYER,
    BIT,
    DROPOUT,
    GLOBAL_POOL,
    HYBRID,
    NORM_EPS,
    STEM_ONLY,
    TRANSFORMER,
    kernel_to_timm,
    rescale,
)
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.config import BiTConfig, HybridConfig, TransformerConfig, ViTConfig
from vitline.vit.models.network import Network
from vitline.vit.models.variants import BIT_STAGES
from vitline.vit.models.vit import Transformer

# Names of timm by (width, depth, heads), with their patch sizes. Any other network uses `_ANY_VIT` with all its arguments.
_NAMES = {
    (192, 12, 3): ("vit_tiny_patch{}_224", (16,)),
    (384, 12, 6): ("vit_small_patch{}_224", (8, 16, 32)),
    (768, 12, 12): ("vit_base_patch{}_224", (8, 16, 32)),
    (1024, 24, 16): ("vit_large_patch{}_224", (14, 16, 32)),
    (1280, 32, 16): ("vit_huge_patch{}_224", (14,)),
    (1408, 40, 16): ("vit_giant_patch{}_224", (14,)),
    (1664, 48, 16): ("vit_gigantic_patch{}_224", (14,)),
}
_ANY_VIT = "vit_base_patch16_224"
_HYBRID_NAMES = {
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (): "vit_tiny_r_s16_p8_224",
}
_BIT_NAMES = {(50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4)}


def to_timm(network: Network) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(arguments of `timm.create_model` including `model_name`, state dict) with which timm computes the same logits.

    Computed position embeddings become a table. Kernels of a ResNet are rescaled (see `from_timm`). Stochastic depth is
    left out, because timm rescales the remaining branches and vitline does not. Raises ValueError, "not supported: ...",
    for what timm cannot compute: a pre-logits layer, relative or every-layer position embeddings, another epsilon,
    ResNets without a name in timm, user-defined networks.
    """
    if isinstance(network, Transformer):
        return _transformer_to_timm(network, network.config)
    config = network.config
    if not isinstance(config, BiTConfig):
        raise ValueError(f"not supported: {config.summary} in timm, which has no such network.")
    depth = next((depth for depth, stages in BIT_STAGES.items() if stages == config.stages), 0)
    if (depth, config.width_factor) not in _BIT_NAMES:
        names = ", ".join(f"bit_r{d}x{w}" for d, w in sorted(_BIT_NAMES))
        raise ValueError(f"not supported: {config.summary} in timm, which has {names}.")
    weights = dict(network.state_dict())
    rescale(weights, "", lambda kernel: kernel * 10)
    weights["head.weight"] = weights["head.weight"][:, :, None, None]
    name = f"resnetv2_{depth}x{config.width_factor}_bit"
    return {"model_name": name, "num_classes": network.num_classes}, give(weights, BIT)


def _transformer_to_timm(network: Transformer, config: TransformerConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if config.pre_logits:
        raise ValueError(
            "not supported: pre_logits in timm, which has no tanh layer before the head. Fine-tune the model first, which "
            "drops the layer."
        )
    if config.norm_eps != NORM_EPS:
        raise ValueError(f"not supported: norm_eps={config.norm_eps:g} in timm, whose configs always use {NORM_EPS:g}.")
    positions = position_table(network, "timm")
    weights = {name: value for name, value in network.state_dict().items() if not name.startswith("pos_embed")}
    if positions is not None:
        weights["pos_embed"] = positions
    patch, name, table = _place(config)
    if isinstance(config, HybridConfig):
        rescale(weights, "resnet.", kernel_to_timm)
    args: dict[str, Any] = {
        "model_name": name,
        "num_classes": network.num_classes,
        "img_size": config.image_size_px,
        "patch_size": patch,
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": _mlp_ratio(config),
        "qkv_bias": config.qkv_bias,
        "class_token": config.pool == "token",
        "global_pool": GLOBAL_POOL[config.pool],
        "fc_norm": False,  # the final norm comes before the pool
        "pos_embed": "none" if positions is None else "learn",
        "act_layer": ACT_LAYER[config.gelu],
    }
    return args | {rate: config.dropout_rate for rate in DROPOUT if config.dropout_rate}, give(weights, table)


def write_timm(
    network: Network, directory: str | Path, classes: Sequence[str], contract: ImageContract | None = None
) -> None:
    """Writes a folder that `timm.create_model(f"local-dir:{directory}", pretrained=True)` loads, with the same logits.

    `contract` becomes timm's data config. Without it the config is: resize to the square, bilinear, values from -1 to 1.
    Raises ValueError like `to_timm`, and for a wrong number of class names.
    """
    check_class_names(classes, network.num_classes)
    args, state = to_timm(network)
    name = args.pop("model_name")
    config, size = network.config, network.config.image_size_px
    table = _place(config)[2] if isinstance(config, TransformerConfig) else BIT
    about = {
        "tag": "vitline",
        "custom_load": False,
        "input_size": [3, size, size],
        "fixed_input_size": isinstance(config, TransformerConfig),
        **_data_config(contract),
        "num_classes": network.num_classes,
        "pool_size": None,
        "first_conv": next(table[n] for n in ("conv_root", "resnet.conv_root", "patch_embed") if n in table),
        "classifier": table["head"],
    }
    about_model = {
        "architecture": name,
        "num_classes": network.num_classes,
        "num_features": network.head.in_features,
        "global_pool": args.get("global_pool", "avg"),
        "label_names": list(classes),
        "model_args": args,
        "pretrained_cfg": about,
    }
    write_folder(directory, state, {CONFIG: about_model})


def _place(config: TransformerConfig) -> tuple[int, str, Table]:
    """(patch size, name in timm, table of names). Raises ValueError for hybrids that timm has no name for."""
    if isinstance(config, ViTConfig):
        name, patches = _NAMES.get((config.embed_dim, config.depth, config.num_heads), (_ANY_VIT, ()))
        patch = config.patch_size_px
        return patch, name.format(patch) if patch in patches else _ANY_VIT, TRANSFORMER
    assert isinstance(config, HybridConfig), config
    if config.width_factor != 1 or config.stages not in _HYBRID_NAMES:
        known = ", ".join("-".join(map(str, stages)) or "the stem alone" for stages in _HYBRID_NAMES)
        raise ValueError(
            f"not supported: {config.summary}, width x{config.width_factor}, in timm, which has x1 with {known}."
        )
    if config.feature_side % config.patch_size:
        raise ValueError(
            f"not supported: patches of {config.patch_size} on a feature map of {config.feature_side} pixels in timm, "
            "where patches must divide the feature map."
        )
    return config.patch_size, _HYBRID_NAMES[config.stages], HYBRID if config.stages else STEM_ONLY


def _mlp_ratio(config: TransformerConfig) -> float:
    """The ratio by which timm multiplies the width before it truncates to an integer."""
    ratio = config.mlp_dim / config.embed_dim
    return ratio if int(config.embed_dim * ratio) == config.mlp_dim else math.nextafter(ratio, math.inf)


def _data_config(contract: ImageContract | None) -> dict[str, Any]:
    mean, std = mean_and_std(contract.low, contract.high) if contract else mean_and_std()
    evaluation = contract.evaluation if contract else None
    cut = evaluation.eval_resize_px if evaluation else None
    return {
        "mean": mean,
        "std": std,
        "interpolation": "bilinear",
        "crop_mode": "center" if cut else "squash",
        "crop_pct": evaluation.image_size_px / cut if evaluation and cut else 1.0,
    }
