"""timm's Vision Transformers, hybrids and BiT ResNets <-> ours, by their names and their functions; timm is not imported.

What is not the same function is refused, with the reason. Checked against timm 1.0.31.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.models.build import meta_network
from vit.models.config import BiTConfig, HybridConfig, NetworkConfig, TransformerConfig, ViTConfig
from vit.models.convert.folder import CONFIG, read_folder, write_folder
from vit.models.convert.report import ConversionError, ConversionReport, Converted, finish
from vit.models.convert.tables import Table, give, head_classes, numbered, position_table, take, zero_head
from vit.models.network import Network
from vit.models.pos_embed import grid_side
from vit.models.variants import BIT_STAGES, heads_of
from vit.models.vit import Transformer
from vit.published import ImageContract

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
_BACKBONE = "patch_embed.backbone"
HYBRID: Table = TRANSFORMER | {
    "resnet.conv_root": f"{_BACKBONE}.stem.conv",
    "resnet.norm_root": f"{_BACKBONE}.stem.norm",
    **{f"resnet.stages.#.#.{kind}{n}": f"{_BACKBONE}.stages.#.blocks.#.{kind}{n}" for kind in ("conv", "norm") for n in (1, 2, 3)},
    "resnet.stages.#.#.conv_proj": f"{_BACKBONE}.stages.#.blocks.#.downsample.conv",
    "resnet.stages.#.#.norm_proj": f"{_BACKBONE}.stages.#.blocks.#.downsample.norm",
}  # fmt: skip
STEM_ONLY: Table = HYBRID | {"resnet.conv_root": f"{_BACKBONE}.conv", "resnet.norm_root": f"{_BACKBONE}.norm"}
BIT: Table = {
    "conv_root": "stem.conv",
    **{f"stages.#.#.{kind}{n}": f"stages.#.blocks.#.{kind}{n}" for kind in ("conv", "norm") for n in (1, 2, 3)},
    "stages.#.#.conv_proj": "stages.#.blocks.#.downsample.conv",
    "norm": "norm",
    "head": "head.fc",
}

NORM_EPS = 1e-6  # of timm's LayerNorm; a config.json cannot say another
_GELU = {"gelu": "erf", "gelu_tanh": "tanh"}
_ACT_LAYER = {ours: theirs for theirs, ours in _GELU.items()}
_POOL = {"token": "token", "avg": "gap", "map": "map"}
_GLOBAL_POOL = {ours: theirs for theirs, ours in _POOL.items()}

# What an architecture's name says and no entry shows. The first line that matches counts; heads stay when an argument
# changes the width. A test holds every architecture of timm against these lines.
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

# Arguments that need no look: entries show what they do, or they matter in training alone.
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
_DROPOUT = ("pos_drop_rate", "proj_drop_rate")
_UNUSED_RATES = ("drop_rate", "patch_drop_rate", "attn_drop_rate", "drop_path_rate")
_OF_TRANSFORMERS = _SHOWN | _READ | {*_DROPOUT, *_UNUSED_RATES}
_OF_BIT = {"architecture", "img_size", "input_size", "global_pool", "num_classes", "in_chans", "zero_init_last"}
_OF_BIT |= {"drop_rate", "drop_path_rate"}

# Plain names of timm, by (width, depth, heads, patch); any other network goes by a name with all its arguments.
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


# timm -> ours.


def read_timm(path: str | Path, *, num_classes: int | None = None) -> Converted:
    """The network of a folder that timm's `save_for_hf` or `push_to_hf_hub` wrote, or of a .safetensors file.

    `config.json` beside the weights says which architecture it is; without it timm's defaults are assumed, and the report
    says so. `num_classes` is for files without a head, which becomes zeros. Raises ConversionError as `from_timm` does,
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
    """The network of timm's state dict, with a report of every entry.

    `args`: what its `config.json` says: `architecture`, `input_size` and the `model_args`, all optional; `num_heads` is in
    no entry, so it must follow from them or from a known width and depth. GELU is exact unless they say gelu_tanh,
    epsilons are timm's. Kernels of a ResNet are rescaled, since timm standardises with another epsilon. Raises
    ConversionError naming entries or arguments that make another function of it than our networks compute.
    """
    report = ConversionReport(source=source, family="timm")
    args = {name: value for name, value in args.items() if value is not None}
    if "stem.conv.weight" in state:
        return _bit_from_timm(state, args, report, num_classes)
    if "patch_embed.proj.weight" in state:
        return _transformer_from_timm(state, args, report, num_classes)
    shown = ", ".join(sorted(state)[:5])
    raise ConversionError(
        f"{source} is no Vision Transformer, hybrid or BiT ResNet of timm: it has neither patch_embed.proj.weight nor "
        f"stem.conv.weight, and starts with {shown or 'nothing'}."
    )


def _transformer_from_timm(
    state: Mapping[str, Tensor], args: Mapping[str, Any], report: ConversionReport, num_classes: int | None
) -> Converted:
    kernel = _need(state, "patch_embed.proj.weight", 4, report)
    hidden = _need(state, "blocks.0.mlp.fc1.weight", 2, report)
    hybrid = any(name.startswith(f"{_BACKBONE}.") for name in state)
    report.family = "timm, hybrid" if hybrid else "timm, Vision Transformer"
    _check_args(args, _OF_TRANSFORMERS, report)
    depth = numbered(state, r"blocks\.(\d+)\.")
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
        stages = _stages(state, rf"{re.escape(_BACKBONE)}\.stages\.")
        table = HYBRID if stages else STEM_ONLY
        root = _need(state, f"{_BACKBONE}.{'stem.' if stages else ''}conv.weight", 4, report)
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
        _rescale(weights, "resnet.", _kernel_from_timm)
        report.adapted.append(
            "resnet kernels: rescaled, so that division by std + 1e-5 here gives what division by sqrt(var + 1e-8) gives in "
            "timm; GroupNorm's epsilon is 1e-6 here and 1e-5 there, which moves logits by less than 1e-5 of the largest"
        )
    return finish(config, classes, weights, report, unused)


def _bit_from_timm(
    state: Mapping[str, Tensor], args: Mapping[str, Any], report: ConversionReport, num_classes: int | None
) -> Converted:
    report.family = "timm, BiT ResNet"
    _check_args(args, _OF_BIT, report)
    if not re.fullmatch(r"resnetv2_\d+x\d_bit", name := _architecture(args) or "resnetv2_50x1_bit"):
        raise ConversionError(f"{report.source}: {name} is no BiT ResNet; its padding, pooling or epsilons are others.")
    if (pool := args.get("global_pool", "avg")) != "avg":
        raise ConversionError(f"{report.source}: not supported: global_pool={pool!r}; a BiT ResNet averages (avg).")
    root = _need(state, "stem.conv.weight", 4, report)
    size = _asked_size(args, report)
    stages = _stages(state, r"stages\.")
    if not stages:
        raise ConversionError(f"{report.source} has a stem, stem.conv.weight, but no stages.")
    config = BiTConfig(stages=stages, width_factor=max(1, root.shape[0] // 64), image_size_px=size or 224)
    classes = head_classes(state, "head.fc.weight", num_classes, report)
    weights, unused = take(_wanted(config, classes), BIT, state, report)
    if "head.fc.weight" not in state:
        zero_head(weights, 2 ** (len(stages) - 1) * 256 * config.width_factor, classes, report)
    elif weights["head.weight"].ndim == 4:
        weights["head.weight"] = weights["head.weight"].flatten(1)
    _rescale(weights, "", lambda kernel: kernel / 10)
    report.adapted.append(
        "kernels: a tenth of the file's, so that sqrt(var + 1e-10) here divides as sqrt(var + 1e-8) does in timm"
    )
    return finish(config, classes, weights, report, unused)


# ours -> timm.


def to_timm(network: Network) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(arguments of `timm.create_model`, `model_name` among them; state dict) with which timm computes the same logits.

    Positions that are computed become a table; kernels of a ResNet are rescaled (see `from_timm`). Stochastic depth is
    left out: timm divides what it keeps, this code does not. Raises ValueError, "not supported: ...", for what timm
    cannot compute: a pre-logits layer, relative or every-layer positions, another epsilon, ResNets without a name.
    """
    if isinstance(network, Transformer):
        return _transformer_to_timm(network, network.config)
    config = network.config
    assert isinstance(config, BiTConfig), config
    depth = next((depth for depth, stages in BIT_STAGES.items() if stages == config.stages), 0)
    if (depth, config.width_factor) not in _BIT_NAMES:
        names = ", ".join(f"bit_r{d}x{w}" for d, w in sorted(_BIT_NAMES))
        raise ValueError(f"not supported: {config.summary} in timm, which has {names}.")
    weights = dict(network.state_dict())
    _rescale(weights, "", lambda kernel: kernel * 10)
    weights["head.weight"] = weights["head.weight"][:, :, None, None]
    name = f"resnetv2_{depth}x{config.width_factor}_bit"
    return {"model_name": name, "num_classes": network.num_classes}, give(weights, BIT)


def _transformer_to_timm(network: Transformer, config: TransformerConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if config.pre_logits:
        raise ValueError(
            "not supported: pre_logits in timm, which dropped the tanh layer before the head. Fine-tuning drops it as well."
        )
    if config.norm_eps != NORM_EPS:
        raise ValueError(f"not supported: norm_eps={config.norm_eps:g} in timm, whose configs mean {NORM_EPS:g}.")
    positions = position_table(network, "timm")
    weights = {name: value for name, value in network.state_dict().items() if not name.startswith("pos_embed")}
    if positions is not None:
        weights["pos_embed"] = positions
    patch, name, table = _place(config)
    if isinstance(config, HybridConfig):
        _rescale(weights, "resnet.", _kernel_to_timm)
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
        "global_pool": _GLOBAL_POOL[config.pool],
        "fc_norm": False,  # the final norm comes before the pool
        "pos_embed": "none" if positions is None else "learn",
        "act_layer": _ACT_LAYER[config.gelu],
    }
    return args | {rate: config.dropout_rate for rate in _DROPOUT if config.dropout_rate}, give(weights, table)


def write_timm(
    network: Network, directory: str | Path, classes: Sequence[str], contract: ImageContract | None = None
) -> None:
    """A folder that `timm.create_model(f"local-dir:{directory}", pretrained=True)` loads, with the same logits.

    `contract` becomes timm's data config; without one it says: resized to the square, bilinear, values from -1 to 1.
    Raises ValueError as `to_timm` does, and for a wrong number of class names.
    """
    if len(classes) != network.num_classes:
        raise ValueError(f"{len(classes)} class names for a head of {network.num_classes} classes.")
    args, state = to_timm(network)
    name = args.pop("model_name")
    bit = isinstance(network.config, BiTConfig)
    hybrid = isinstance(network.config, HybridConfig)
    stem = (
        f"{_BACKBONE}.{'' if network.config.stages else 'stem.'}conv"
        if isinstance(network.config, HybridConfig)
        else ""
    )
    size = network.config.image_size_px
    about = {
        "tag": "vitline",
        "custom_load": False,
        "input_size": [3, size, size],
        "fixed_input_size": not bit,
        **_data_config(contract),
        "num_classes": network.num_classes,
        "pool_size": None,
        "first_conv": "stem.conv" if bit else stem if hybrid else "patch_embed.proj",
        "classifier": "head.fc" if bit else "head",
    }
    config = {
        "architecture": name,
        "num_classes": network.num_classes,
        "num_features": network.head.in_features,
        "global_pool": args.get("global_pool", "avg"),
        "label_names": list(classes),
        "model_args": args,
        "pretrained_cfg": about,
    }
    write_folder(directory, state, {CONFIG: config})


# What entries do not show.


def _architecture(args: Mapping[str, Any]) -> str | None:
    """Without its tag: `vit_base_patch16_224.augreg_in21k` is a `vit_base_patch16_224`."""
    name = args.get("architecture")
    return str(name).split(".")[0] if name else None


def _check_args(args: Mapping[str, Any], known: set[str], report: ConversionReport) -> None:
    """Refuses arguments that may change the function; notes those that change training alone."""
    odd = {name: value for name, value in args.items() if name not in known and value is not False}
    if args.get("norm_layer", "layernorm") != "layernorm":
        odd["norm_layer"] = args["norm_layer"]
    if odd:
        shown = ", ".join(f"{name}={value!r}" for name, value in sorted(odd.items()))
        raise ConversionError(f"{report.source}: not supported: {shown}. It may change what the network computes.")
    if "architecture" not in args:
        report.adapted.append("no architecture is named: GELU, epsilons and heads are taken to be timm's defaults")
    if rates := [f"{name}={args[name]:g}" for name in _UNUSED_RATES if args.get(name)]:
        report.adapted.append(f"left out, since it differs or is absent here, in training alone: {', '.join(rates)}")


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
        f"{report.source}: no entry shows the number of attention heads, and neither {name or 'a missing architecture'} nor "
        f"width {embed_dim} at depth {depth} is known. Give num_heads."
    )


def _gelu(args: Mapping[str, Any], report: ConversionReport) -> str:
    default = "gelu_tanh" if _TANH.fullmatch(_architecture(args) or "") else "gelu"
    if (act := args.get("act_layer", default)) not in _GELU:
        raise ConversionError(f"{report.source}: not supported: act_layer={act!r}; {' and '.join(_GELU)} are.")
    return _GELU[act]


def _pool(state: Mapping[str, Tensor], args: Mapping[str, Any], report: ConversionReport) -> str:
    """Raises ConversionError where timm pools over other tokens, or norms after the pool."""
    shown = "map" if "attn_pool.latent" in state else "token" if "cls_token" in state else "avg"
    asked = args.get("global_pool", shown)
    refused = f"{report.source}: not supported: "
    if any(name.startswith("fc_norm.") for name in state):
        raise ConversionError(
            f"{refused}fc_norm, a norm after the average pool. Here the final norm comes before it, as in the original; "
            "the mean of normalised tokens is another function than the normalised mean of tokens."
        )
    if asked != shown or ("cls_token" in state and shown != "token"):
        token = "with a class token" if "cls_token" in state else "without a class token"
        raise ConversionError(f"{refused}global_pool={asked!r} {token}; token goes with one, avg and map without.")
    return _POOL[shown]


def _dropout(args: Mapping[str, Any], report: ConversionReport) -> float:
    rates = {float(args.get(name, 0.0)) for name in _DROPOUT}
    if len(rates) == 1:
        return rates.pop()
    shown = ", ".join(f"{name}={args.get(name, 0.0):g}" for name in _DROPOUT)
    report.adapted.append(f"dropout_rate: 0, since there is one rate here, and two there, in training alone: {shown}")
    return 0.0


def _side(state: Mapping[str, Tensor], common: Mapping[str, Any], report: ConversionReport) -> int | None:
    """Patches along one side; None without position embeddings."""
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
    """The config at the resolution that is asked for, where the positions fit it; else at theirs."""
    asked = _asked_size(args, report)
    try:
        config = kind(image_size_px=asked or (side * stride if side else 224), **common)
        if side is not None and config.grid_side != side:
            report.adapted.append(
                f"image_size_px: {side * stride}, for which there are positions; {asked} px stand in the config"
            )
            config = kind(image_size_px=side * stride, **common)
    except ValueError as error:
        raise ConversionError(f"{report.source} does not describe a network: {error}") from error
    return config


def _asked_size(args: Mapping[str, Any], report: ConversionReport) -> int | None:
    size = args.get("img_size", args.get("input_size"))
    sides = [size] if isinstance(size, int) else list(size or [])[-2:]
    if len(set(sides)) > 1:
        raise ConversionError(f"{report.source}: not supported: images of {sides} pixels; only squares are.")
    return int(sides[0]) if sides else None


def _settle_positions(config: TransformerConfig, weights: dict[str, Tensor], report: ConversionReport) -> None:
    table = weights.get("pos_embed")
    if table is not None and config.pool == "token" and table.shape[1] == config.num_patches:
        report.adapted.append("pos_embed: a zero entry for the class token, which had none, stands in front")
        weights["pos_embed"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)


def _stages(state: Mapping[str, Tensor], prefix: str) -> tuple[int, ...]:
    return tuple(numbered(state, rf"{prefix}{i}\.blocks\.(\d+)\.") for i in range(numbered(state, rf"{prefix}(\d+)\.")))


def _need(state: Mapping[str, Tensor], name: str, dims: int, report: ConversionReport) -> Tensor:
    if name not in state:
        raise ConversionError(f"{report.source} has no {name}, which every such network of timm has.")
    if state[name].ndim != dims:
        raise ConversionError(
            f"{report.source}: {name} has the shape {tuple(state[name].shape)}; {dims} axes expected."
        )
    return state[name]


def _wanted(config: NetworkConfig, num_classes: int) -> list[str]:
    return list(meta_network(config, num_classes).state_dict())


# Weight standardisation with another epsilon is the same function of a kernel of another size.


def _rescale(weights: dict[str, Tensor], prefix: str, change: Callable[[Tensor], Tensor]) -> None:
    for name, value in weights.items():
        if name.startswith(prefix) and value.ndim == 4:
            weights[name] = change(value.detach())


def _kernel_from_timm(kernel: Tensor) -> Tensor:
    """a k with a k / (a std + 1e-5) = k / sqrt(var + 1e-8)."""
    std = _std(kernel)
    return (kernel * (1e3 * ((std.square() + 1e-8).sqrt() + std))).to(kernel.dtype)


def _kernel_to_timm(kernel: Tensor) -> Tensor:
    """b k with b k / sqrt(b^2 var + 1e-8) = k / (std + 1e-5)."""
    std = _std(kernel)
    return (kernel * (1e-8 / (2e-5 * std + 1e-10)).sqrt()).to(kernel.dtype)


def _std(kernel: Tensor) -> Tensor:
    """Per output channel, biased, as float64."""
    return kernel.double().std(dim=(1, 2, 3), correction=0, keepdim=True)


# Arguments of timm.


def _place(config: TransformerConfig) -> tuple[int, str, Table]:
    """(patch size, name, table). Raises ValueError for hybrids that timm has no name for."""
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
            "which drops no remainder."
        )
    return config.patch_size, _HYBRID_NAMES[config.stages], HYBRID if config.stages else STEM_ONLY


def _mlp_ratio(config: TransformerConfig) -> float:
    """What timm multiplies the width by, and cuts to an integer."""
    ratio = config.mlp_dim / config.embed_dim
    return ratio if int(config.embed_dim * ratio) == config.mlp_dim else math.nextafter(ratio, math.inf)


def _data_config(contract: ImageContract | None) -> dict[str, Any]:
    low, high = (contract.low, contract.high) if contract else (-1.0, 1.0)
    evaluation = contract.evaluation if contract else None
    cut = evaluation.eval_resize_px if evaluation else None
    return {
        "mean": [-low / (high - low)] * 3,
        "std": [1 / (high - low)] * 3,
        "interpolation": "bilinear",
        "crop_mode": "center" if cut else "squash",
        "crop_pct": evaluation.image_size_px / cut if evaluation and cut else 1.0,
    }
