"""Reads timm's networks. Entries show most sizes; arguments and the architecture's name give the rest."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitline.vit.convert.folder import read_folder
from vitline.vit.convert.report import ConversionError, ConversionReport, Converted, finish, refusing
from vitline.vit.convert.tables import head_classes, numbered, take, zero_head
from vitline.vit.convert.timm.kernels import kernel_from_timm, rescale
from vitline.vit.convert.timm.names import BACKBONE, BIT, DROPOUT, GELU, HYBRID, NORM_EPS, POOL, STEM_ONLY, TRANSFORMER
from vitline.vit.models.build import meta_network
from vitline.vit.models.config import BiTConfig, HybridConfig, NetworkConfig, TransformerConfig, ViTConfig
from vitline.vit.models.limits import MAX_STAGES
from vitline.vit.models.pos_embed import grid_side
from vitline.vit.models.variants import heads_of

# The number of heads by the architecture's name, as no entry shows it. The first match counts, also if an argument changes
# the width. A test compares all architectures of timm with these lines.
_HEADS: tuple[tuple[str, int], ...] = (
    (r"vit_base_patch16_gap_\d+", 16),
    (r"test_vit", 2),
    (r"(?:vit|deit|flexivit)_tiny(_.*)?", 3),
    (r"(?:vit|deit|flexivit)_small(_.*)?", 6),
    (r"(?:vit|deit|flexivit)_base(_.*)?", 12),
    (r"(?:vit|deit|flexivit)_(large|huge|giant|giantopt|gigantic|so400m)(_.*)?", 16),
)
_TANH = re.compile(
    r"vit_((base_patch32|so400m_patch16|giantopt_patch16)_siglip(_gap)?_\d+|large_patch16_siglip(_gap)?_512)"
)

# Arguments that are ignored: entries show their effect, or they matter in training only.
_SHOWN = {
    "num_classes",
    "in_chans",
    "embed_dim",
    "depth",
    "mlp_ratio",
    "qkv_bias",
    "proj_bias",
    "patch_size",
    "pos_embed",
}
_SHOWN |= {"class_token", "no_embed_class", "reg_tokens", "init_values", "qk_norm", "pre_norm", "final_norm", "fc_norm"}
_SHOWN |= {"scale_attn_norm", "scale_mlp_norm", "dynamic_img_size", "strict_img_size", "weight_init", "fix_init"}
_READ = {"architecture", "img_size", "input_size", "num_heads", "act_layer", "norm_layer", "global_pool"}
_UNUSED_RATES = ("drop_rate", "patch_drop_rate", "attn_drop_rate", "drop_path_rate")
_OF_TRANSFORMERS = _SHOWN | _READ | {*DROPOUT, *_UNUSED_RATES}
_OF_BIT = {"architecture", "img_size", "input_size", "global_pool", "num_classes", "in_chans", "zero_init_last"}
_OF_BIT |= {"drop_rate", "drop_path_rate"}


def read_timm(path: str | Path, *, num_classes: int | None = None) -> Converted:
    """The network in a folder that timm's `save_for_hf` or `push_to_hf_hub` wrote, or in a .safetensors file.

    `config.json` beside the weights names the architecture; without it timm's defaults are assumed and the report says so.
    `num_classes` is needed for files without a head, which get a head of zeros. Raises ConversionError like `from_timm`,
    for pickles, and for folders of transformers.
    """
    state, config = read_folder(path)
    config = config or {}
    if "model_type" in config:
        raise ConversionError(f"{path} was written by transformers (model_type {config['model_type']}), not by timm.")
    about = config.get("pretrained_cfg") or config
    args = {"architecture": config.get("architecture"), "input_size": about.get("input_size")}
    args |= {"global_pool": config.get("global_pool")} | (config.get("model_args") or {})
    return from_timm(state, args, str(path), num_classes=num_classes)


def from_timm(
    state: Mapping[str, Tensor], args: Mapping[str, Any], source: str, *, num_classes: int | None = None
) -> Converted:
    """The network from timm's state dict, with a report of every entry.

    `args` are the `architecture`, `input_size` and `model_args` of its `config.json`, all optional. No entry shows
    `num_heads`, so it must follow from them or from a known width and depth. GELU is exact unless they say gelu_tanh, and
    epsilons are timm's. Kernels of a ResNet are rescaled, because timm standardises them with another epsilon. Raises
    ConversionError naming entries or arguments with which our network would compute another function.
    """
    report = ConversionReport(source=source, family="timm")
    args = {name: value for name, value in args.items() if value is not None}
    with refusing(source):
        if "stem.conv.weight" in state:
            return _bit_from_timm(state, args, report, num_classes)
        if "patch_embed.proj.weight" in state:
            return _transformer_from_timm(state, args, report, num_classes)
    shown = ", ".join(sorted(state)[:5])
    raise ConversionError(
        f"{source} is not a Vision Transformer, hybrid or BiT ResNet of timm: it has neither patch_embed.proj.weight nor "
        f"stem.conv.weight. Its first entries: {shown or 'none'}."
    )


def _transformer_from_timm(
    state: Mapping[str, Tensor], args: Mapping[str, Any], report: ConversionReport, num_classes: int | None
) -> Converted:
    kernel = _need(state, "patch_embed.proj.weight", 4, report)
    hidden = _need(state, "blocks.0.mlp.fc1.weight", 2, report)
    hybrid = any(name.startswith(f"{BACKBONE}.") for name in state)
    report.family = "timm, hybrid" if hybrid else "timm, Vision Transformer"
    _check_args(args, _OF_TRANSFORMERS, report)
    depth = numbered(state, r"blocks\.(\d+)\.", report)
    table = TRANSFORMER
    common: dict[str, Any] = {
        "embed_dim": kernel.shape[0],
        "depth": depth,
        "num_heads": _num_heads(args, kernel.shape[0], depth, report),
        "mlp_dim": hidden.shape[0],
        "pool": _pool(state, args, report),
        "pos_embed": "learned-1d" if "pos_embed" in state else "none",
        "dropout_rate": _dropout(args, report),
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "gelu": _gelu(args, report),
        "norm_eps": NORM_EPS,
    }
    side = _side(state, common, report)
    stride = kernel.shape[2]
    if hybrid:
        stages = _stages(state, rf"{re.escape(BACKBONE)}\.stages\.", report)
        table = HYBRID if stages else STEM_ONLY
        root = _need(state, f"{BACKBONE}.{'stem.' if stages else ''}conv.weight", 4, report)
        common |= {"stages": stages, "width_factor": max(1, root.shape[0] // 64), "patch_size": kernel.shape[2]}
        stride *= 4 * 2 ** max(0, len(stages) - 1)
    else:
        common["patch_size_px"] = kernel.shape[2]
    kind: type[TransformerConfig] = HybridConfig if hybrid else ViTConfig
    config = _sized(kind, common, side, stride, args, report)
    classes = head_classes(state, "head.weight", num_classes, report)
    weights, unused = take(_wanted(config, classes), table, state, report)
    if "head.weight" not in state:
        zero_head(weights, config.embed_dim, classes, report)
    _settle_positions(config, weights, report)
    if hybrid:
        rescale(weights, "resnet.", kernel_from_timm)
        report.adapted.append(
            "resnet kernels: rescaled, so that our division by std + 1e-5 gives the same as timm's by sqrt(var + 1e-8); "
            "GroupNorm's epsilon is 1e-6 here and 1e-5 in timm, which changes logits by less than 1e-5 of the largest"
        )
    return finish(config, classes, weights, report, unused)


def _bit_from_timm(
    state: Mapping[str, Tensor], args: Mapping[str, Any], report: ConversionReport, num_classes: int | None
) -> Converted:
    report.family = "timm, BiT ResNet"
    _check_args(args, _OF_BIT, report)
    if not re.fullmatch(r"resnetv2_\d+x\d_bit", name := _architecture(args) or "resnetv2_50x1_bit"):
        raise ConversionError(
            f"{report.source}: not supported: {name}. It is not a BiT ResNet; its padding, pooling or epsilons differ."
        )
    if (pool := args.get("global_pool", "avg")) != "avg":
        raise ConversionError(f"{report.source}: not supported: global_pool={pool!r}; a BiT ResNet has avg.")
    root = _need(state, "stem.conv.weight", 4, report)
    size = _asked_size(args, report)
    stages = _stages(state, r"stages\.", report)
    if not stages:
        raise ConversionError(f"{report.source} has a stem (stem.conv.weight), but no stages.")
    config = BiTConfig(stages=stages, width_factor=max(1, root.shape[0] // 64), image_size_px=size or 224)
    classes = head_classes(state, "head.fc.weight", num_classes, report)
    weights, unused = take(_wanted(config, classes), BIT, state, report)
    if "head.fc.weight" not in state:
        zero_head(weights, 2 ** (len(stages) - 1) * 256 * config.width_factor, classes, report)
    elif weights["head.weight"].ndim == 4:
        weights["head.weight"] = weights["head.weight"].flatten(1)
    rescale(weights, "", lambda kernel: kernel / 10)
    report.adapted.append(
        "kernels: divided by ten, so that our division by sqrt(var + 1e-10) gives the same as timm's by sqrt(var + 1e-8)"
    )
    return finish(config, classes, weights, report, unused)


# Settings that no entry shows.


def _architecture(args: Mapping[str, Any]) -> str | None:
    """The architecture without its tag: `vit_base_patch16_224.augreg_in21k` -> `vit_base_patch16_224`."""
    name = args.get("architecture")
    return str(name).split(".")[0] if name else None


def _check_args(args: Mapping[str, Any], known: set[str], report: ConversionReport) -> None:
    """Refuses arguments that may change the function, and reports those that change training only."""
    odd = {name: value for name, value in args.items() if name not in known and value is not False}
    if args.get("norm_layer", "layernorm") != "layernorm":
        odd["norm_layer"] = args["norm_layer"]
    if odd:
        shown = ", ".join(f"{name}={value!r}" for name, value in sorted(odd.items()))
        raise ConversionError(f"{report.source}: not supported: {shown}. It may change what the network computes.")
    if "architecture" not in args:
        report.adapted.append("no architecture is named: assumed timm's default GELU, epsilons and heads")
    if rates := [f"{name}={args[name]:g}" for name in _UNUSED_RATES if args.get(name)]:
        report.adapted.append(f"left out, because it differs or is absent here (in training only): {', '.join(rates)}")


def _num_heads(args: Mapping[str, Any], embed_dim: int, depth: int, report: ConversionReport) -> int:
    if "num_heads" in args:
        return int(args["num_heads"])
    name = _architecture(args)
    for pattern, heads in _HEADS:
        if name and re.fullmatch(pattern, name):
            return heads
    if heads_found := heads_of(embed_dim, depth):
        return heads_found
    raise ConversionError(
        f"{report.source}: the number of attention heads is unknown. No entry shows it, and neither "
        f"{name or 'a missing architecture'} nor width {embed_dim} at depth {depth} is known. "
        "Set num_heads in model_args of config.json."
    )


def _gelu(args: Mapping[str, Any], report: ConversionReport) -> str:
    default = "gelu_tanh" if _TANH.fullmatch(_architecture(args) or "") else "gelu"
    if (act := args.get("act_layer", default)) not in GELU:
        raise ConversionError(f"{report.source}: not supported: act_layer={act!r}; supported: {' and '.join(GELU)}.")
    return GELU[act]


def _pool(state: Mapping[str, Tensor], args: Mapping[str, Any], report: ConversionReport) -> str:
    """Our kind of pooling. Raises ConversionError if timm pools over other tokens, or normalises after pooling."""
    shown = "map" if "attn_pool.latent" in state else "token" if "cls_token" in state else "avg"
    asked = args.get("global_pool", shown)
    refused = f"{report.source}: not supported: "
    if any(name.startswith("fc_norm.") for name in state):
        raise ConversionError(
            f"{refused}fc_norm, a norm after the average pool. Our networks have the final norm before it, as in the "
            "paper's code, and the mean of normalised tokens differs from the normalised mean of tokens."
        )
    if asked != shown or ("cls_token" in state and shown != "token"):
        token = "with a class token" if "cls_token" in state else "without a class token"
        raise ConversionError(f"{refused}global_pool={asked!r} {token}. token needs one; avg and map must have none.")
    return POOL[shown]


def _dropout(args: Mapping[str, Any], report: ConversionReport) -> float:
    rates = {float(args.get(name, 0.0)) for name in DROPOUT}
    if len(rates) == 1:
        return rates.pop()
    shown = ", ".join(f"{name}={args.get(name, 0.0):g}" for name in DROPOUT)
    report.adapted.append(
        f"dropout_rate: set to 0, because it is one rate here and two in timm (in training only): {shown}"
    )
    return 0.0


def _side(state: Mapping[str, Tensor], common: Mapping[str, Any], report: ConversionReport) -> int | None:
    """Number of patches along one side; None without position embeddings."""
    if "pos_embed" not in state:
        return None
    entries = _need(state, "pos_embed", 3, report).shape[1]
    try:
        side, prefix = grid_side(entries)
    except ValueError as error:
        raise ConversionError(f"{report.source}: pos_embed: {error}") from error
    if prefix and common["pool"] != "token":
        raise ConversionError(f"{report.source}: pos_embed has an entry for a class token, but there is no cls_token.")
    return side


def _sized(
    kind: type[TransformerConfig],
    common: Mapping[str, Any],
    side: int | None,
    stride: int,
    args: Mapping[str, Any],
    report: ConversionReport,
) -> TransformerConfig:
    """The config at the resolution of the arguments if the position embeddings fit it, else at that of the embeddings."""
    asked = _asked_size(args, report)
    try:
        config = kind(image_size_px=asked or (side * stride if side else 224), **common)
        if side is not None and config.grid_side != side:
            report.adapted.append(
                f"image_size_px: {side * stride}, which the position embeddings are for, instead of {asked} in the config"
            )
            config = kind(image_size_px=side * stride, **common)
    except ValueError as error:
        raise ConversionError(f"{report.source} does not describe a network: {error}") from error
    return config


def _asked_size(args: Mapping[str, Any], report: ConversionReport) -> int | None:
    size = args.get("img_size", args.get("input_size"))
    sides = [size] if isinstance(size, int) else list(size or [])[-2:]
    if len(set(sides)) > 1:
        raise ConversionError(f"{report.source}: not supported: images of {sides} pixels; only squares are supported.")
    return int(sides[0]) if sides else None


def _settle_positions(config: TransformerConfig, weights: dict[str, Tensor], report: ConversionReport) -> None:
    table = weights.get("pos_embed")
    if table is not None and config.pool == "token" and table.shape[1] == config.num_patches:
        report.adapted.append("pos_embed: a zero entry for the class token was added at the front")
        weights["pos_embed"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)


def _stages(state: Mapping[str, Tensor], prefix: str, report: ConversionReport) -> tuple[int, ...]:
    count = numbered(state, rf"{prefix}(\d+)\.", report)
    return tuple(numbered(state, rf"{prefix}{i}\.blocks\.(\d+)\.", report) for i in range(min(count, MAX_STAGES + 1)))


def _need(state: Mapping[str, Tensor], name: str, dims: int, report: ConversionReport) -> Tensor:
    if name not in state:
        raise ConversionError(f"{report.source} has no {name}, which every such network of timm has. It is incomplete.")
    if state[name].ndim != dims:
        raise ConversionError(f"{report.source}: {name} has shape {tuple(state[name].shape)}, expected {dims} axes.")
    return state[name]


def _wanted(config: NetworkConfig, num_classes: int) -> list[str]:
    return list(meta_network(config, num_classes).state_dict())
