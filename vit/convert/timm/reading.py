"""Reads timm's networks. Entries show most sizes; arguments and the architecture's name give the rest."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitline.vit.convert.folder import read_folder
from vitline.vit.convert.report import ConversionError, ConversionReport, Converted, finish, refusing
from vitline.vit.convert.shapes import Entries
from vitline.vit.convert.timm.mapping import (
    ACT_LAYER,
    BACKBONE,
    BIT,
    DROPOUT,
    GLOBAL_POOL,
    HYBRID,
    NORM_EPS,
    STEM_ONLY,
    kernel_from_timm,
    rescale,
)
from vitline.vit.models.config import BiTConfig, HybridConfig
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
            return _bit_from_timm(Entries(state, BIT, report, "a BiT ResNet of timm"), args, num_classes)
        if "patch_embed.proj.weight" in state:
            table = STEM_ONLY if f"{BACKBONE}.conv.weight" in state else HYBRID
            return _transformer_from_timm(Entries(state, table, report, "a transformer of timm"), args, num_classes)
    shown = ", ".join(sorted(state)[:5])
    raise ConversionError(
        f"{source} is not a Vision Transformer, hybrid or BiT ResNet of timm: it has neither patch_embed.proj.weight nor "
        f"stem.conv.weight. Its first entries: {shown or 'none'}."
    )


def _transformer_from_timm(entries: Entries, args: Mapping[str, Any], num_classes: int | None) -> Converted:
    report = entries.report
    _check_args(args, _OF_TRANSFORMERS, report)
    _check_pool(entries, args)
    config = entries.transformer(
        _asked_size(args, report),
        num_heads=_num_heads(entries, args),
        pos_embed="learned-1d" if entries.has("pos_embed") else "none",
        dropout_rate=_dropout(args, report),
        gelu=_gelu(args, report),
        norm_eps=NORM_EPS,
    )
    hybrid = isinstance(config, HybridConfig)
    report.family = "timm, hybrid" if hybrid else "timm, Vision Transformer"
    classes = entries.classes(num_classes)
    weights, unused = entries.take(config, classes)
    entries.add_class_position(weights, config)
    if hybrid:
        rescale(weights, "resnet.", kernel_from_timm)
        report.adapted.append(
            "resnet kernels: rescaled, so that our division by std + 1e-5 gives the same as timm's by sqrt(var + 1e-8); "
            "GroupNorm's epsilon is 1e-6 here and 1e-5 in timm, which changes logits by less than 1e-5 of the largest"
        )
    return finish(config, classes, weights, report, unused)


def _bit_from_timm(entries: Entries, args: Mapping[str, Any], num_classes: int | None) -> Converted:
    report = entries.report
    report.family = "timm, BiT ResNet"
    _check_args(args, _OF_BIT, report)
    if not re.fullmatch(r"resnetv2_\d+x\d_bit", name := _architecture(args) or "resnetv2_50x1_bit"):
        raise ConversionError(
            f"{report.source}: not supported: {name}. It is not a BiT ResNet; its padding, pooling or epsilons differ."
        )
    if (pool := args.get("global_pool", "avg")) != "avg":
        raise ConversionError(f"{report.source}: not supported: global_pool={pool!r}; a BiT ResNet has avg.")
    config = BiTConfig(image_size_px=_asked_size(args, report) or 224, **entries.resnet(""))
    if not config.stages:
        raise ConversionError(f"{report.source} has a stem (stem.conv.weight), but no stages.")
    classes = entries.classes(num_classes)
    weights, unused = entries.take(config, classes)
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


def _num_heads(entries: Entries, args: Mapping[str, Any]) -> int:
    if "num_heads" in args:
        return int(args["num_heads"])
    name = _architecture(args)
    for pattern, heads in _HEADS:
        if name and re.fullmatch(pattern, name):
            return heads
    if heads_found := heads_of(entries.embed_dim, entries.depth):
        return heads_found
    raise ConversionError(
        f"{entries.report.source}: the number of attention heads is unknown. No entry shows it, and neither "
        f"{name or 'a missing architecture'} nor width {entries.embed_dim} at depth {entries.depth} is known. "
        "Set num_heads in model_args of config.json."
    )


def _gelu(args: Mapping[str, Any], report: ConversionReport) -> str:
    default = "gelu_tanh" if _TANH.fullmatch(_architecture(args) or "") else "gelu"
    act = args.get("act_layer", default)
    for ours, theirs in ACT_LAYER.items():
        if act == theirs:
            return ours
    supported = " and ".join(ACT_LAYER.values())
    raise ConversionError(f"{report.source}: not supported: act_layer={act!r}; supported: {supported}.")


def _check_pool(entries: Entries, args: Mapping[str, Any]) -> None:
    """Raises ConversionError if timm pools over other tokens, or normalises after pooling."""
    shown = GLOBAL_POOL[entries.pool]
    asked = args.get("global_pool", shown)
    refused = f"{entries.report.source}: not supported: "
    if any(name.startswith("fc_norm.") for name in entries.state):
        raise ConversionError(
            f"{refused}fc_norm, a norm after the average pool. Our networks have the final norm before it, as in the "
            "paper's code, and the mean of normalised tokens differs from the normalised mean of tokens."
        )
    class_token = entries.has("cls_token")
    if asked != shown or (class_token and shown != "token"):
        token = "with a class token" if class_token else "without a class token"
        raise ConversionError(f"{refused}global_pool={asked!r} {token}. token needs one; avg and map must have none.")


def _dropout(args: Mapping[str, Any], report: ConversionReport) -> float:
    rates = {float(args.get(name, 0.0)) for name in DROPOUT}
    if len(rates) == 1:
        return rates.pop()
    shown = ", ".join(f"{name}={args.get(name, 0.0):g}" for name in DROPOUT)
    report.adapted.append(
        f"dropout_rate: set to 0, because it is one rate here and two in timm (in training only): {shown}"
    )
    return 0.0


def _asked_size(args: Mapping[str, Any], report: ConversionReport) -> int | None:
    size = args.get("img_size", args.get("input_size"))
    sides = [size] if isinstance(size, int) else list(size or [])[-2:]
    if len(set(sides)) > 1:
        raise ConversionError(f"{report.source}: not supported: images of {sides} pixels; only squares are supported.")
    return int(sides[0]) if sides else None
