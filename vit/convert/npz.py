"""Reads official `.npz` checkpoints of the paper, AugReg, big_vision and BiT, in all naming schemes that they have used.

Entries are first renamed to one naming scheme (`npz_names.py`). Rules then make each of our parameters from entries.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitline.vit.convert.npz_file import opened_npz
from vitline.vit.convert.npz_names import BLOCK, Arrays, spelled_as_today
from vitline.vit.convert.report import ConversionError, ConversionReport, Converted, check_variant, finish, refusing
from vitline.vit.convert.tables import module_number, numbered
from vitline.vit.models.build import meta_network
from vitline.vit.models.config import BiTConfig, HybridConfig, NetworkConfig, TransformerConfig, ViTConfig
from vitline.vit.models.limits import check_limits
from vitline.vit.models.pos_embed import grid_side, resample_positions

Config = TypeVar("Config", bound=NetworkConfig)


def read_npz(
    uri: str, *, variant: str | None = None, num_classes: int | None = None, image_size_px: int | None = None
) -> Converted:
    """The network of an official `.npz` file, with a report of every entry.

    Architecture, sizes, classes and grid are found from the file. `variant` is compared with them. `num_classes` is needed
    for files without a head, which get a head of zeros. `image_size_px` resamples the position embeddings, and is needed
    for files without any. Raises ConversionError naming entries and shapes. Pickled entries are refused.
    """
    report = ConversionReport(source=uri, family="")
    with opened_npz(uri) as file:
        entries = spelled_as_today(file, report)
    arrays = {name: array for name, (_, array) in entries.items()}
    is_bit = "root_block/conv_root/kernel" in arrays
    config = _bit_config(arrays, report) if is_bit else _transformer_config(arrays, report)
    if variant is not None:
        check_variant(config, variant, uri)
    config, classes = _settle(config, arrays, report, num_classes, image_size_px)
    weights: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, sources, make in _recipes(config):
        if all(source in arrays for source in sources):
            used.update(sources)
            weights[name] = _made(make, sources, arrays, report)
            report.loaded[name] = ", ".join(entries[source][0] for source in sources)
    if isinstance(config, TransformerConfig):
        weights |= _positions(config, classes, weights, report)
    if num_classes is not None and "head/kernel" not in arrays and "norm.weight" in weights:
        head = meta_network(config, num_classes).head
        weights |= {"head.weight": torch.zeros(head.weight.shape), "head.bias": torch.zeros(num_classes)}
        report.missing |= {"head.weight": "zeros: the file has no head", "head.bias": "zeros: the file has no head"}
    unused = {entries[name][0] for name in set(arrays) - used}
    return finish(config, classes, weights, report, unused)


def _made(make: Callable[..., Tensor], sources: tuple[str, ...], arrays: Arrays, report: ConversionReport) -> Tensor:
    try:
        return make(*(arrays[source] for source in sources)).contiguous()
    except (ValueError, IndexError, RuntimeError) as error:
        shapes = ", ".join(f"{source} {arrays[source].shape}" for source in sources)
        raise ConversionError(f"{report.source}: the shapes do not fit together: {shapes}.") from error


# Finding the architecture and sizes.


def _transformer_config(arrays: Arrays, report: ConversionReport) -> TransformerConfig:
    kernel = _need(arrays, "embedding/kernel", report, dims=4)
    mlp = _need(arrays, f"{BLOCK}0/MlpBlock_0/Dense_0/kernel", report, dims=2)
    depth = numbered(arrays, rf"{BLOCK}(\d+)/", report)
    pool = "token" if "cls" in arrays else "map" if "MAPHead_0/probe" in arrays else "gap"
    common: dict[str, Any] = {
        "embed_dim": kernel.shape[3],
        "depth": depth,
        "num_heads": _num_heads(arrays, report),
        "mlp_dim": mlp.shape[1],
        "pool": pool,
        "pre_logits": "pre_logits/kernel" in arrays,
        "qkv_bias": f"{BLOCK}0/MultiHeadDotProductAttention_0/query/bias" in arrays,
        "pos_embed": "learned-1d" if "pos_embedding" in arrays else "sincos-2d",
    }
    side, patch = _grid_side(arrays, report), max(kernel.shape[0], 1)
    if "conv_root/kernel" not in arrays:
        return _checked(ViTConfig, report, patch_size_px=patch, image_size_px=(side or 224 // patch) * patch, **common)
    stages, width = _stages(arrays, report), _need(arrays, "conv_root/kernel", report, dims=4).shape[3] // 64
    stride = 4 * 2 ** max(0, len(stages) - 1)
    size = (side or 224 // (stride * patch)) * stride * patch
    sizes = {"stages": stages, "width_factor": width, "patch_size": patch, "image_size_px": size}
    return _checked(HybridConfig, report, **sizes, **common)


def _bit_config(arrays: Arrays, report: ConversionReport) -> BiTConfig:
    report.missing["(resolution)"] = (
        "224 px unless another one is requested: a BiT file does not contain its training resolution"
    )
    width = _need(arrays, "root_block/conv_root/kernel", report, dims=4).shape[3] // 64
    return _checked(BiTConfig, report, stages=_stages(arrays, report), width_factor=width)


def _stages(arrays: Arrays, report: ConversionReport) -> tuple[int, ...]:
    """Number of blocks of each stage of a ResNet."""
    found = [m for name in arrays if (m := re.match(r"block(\d+)/unit(\d+)/", name))]
    units = [(module_number(m[1], m[0], report), module_number(m[2], m[0], report)) for m in found]
    return tuple(max(u for b, u in units if b == block) for block in sorted({b for b, _ in units}))


def _num_heads(arrays: Arrays, report: ConversionReport) -> int:
    """Number of attention heads. Raises ConversionError if projections have different shapes."""
    first = f"{BLOCK}0/MultiHeadDotProductAttention_0/query/kernel"
    shape = _need(arrays, first, report, dims=3).shape
    for name, array in arrays.items():
        if re.search(r"Attention_0/(query|key|value)/kernel$", name) and array.shape != shape:
            raise ConversionError(f"{report.source}: {name} has shape {array.shape}, but {first} has {shape}.")
    return int(shape[1])


def _grid_side(arrays: Arrays, report: ConversionReport) -> int | None:
    """Side of the grid of position embeddings; None if the file has none."""
    if "pos_embedding" not in arrays:
        return None
    table = _need(arrays, "pos_embedding", report, dims=3)
    try:
        return grid_side(table.shape[1])[0]
    except ValueError as error:
        raise ConversionError(f"{report.source}: pos_embedding has shape {table.shape}. {error}") from error


def _checked(kind: type[Config], report: ConversionReport, **fields: Any) -> Config:
    with refusing(report.source):
        config = kind(**fields)
        check_limits(config)
    return config


def _need(arrays: Arrays, name: str, report: ConversionReport, dims: int) -> np.ndarray:
    if name not in arrays:
        shown = ", ".join(sorted(arrays)[:5])
        raise ConversionError(
            f"{report.source} does not match any known .npz family: entry {name} is missing. "
            f"Its first entries: {shown}."
        )
    if arrays[name].ndim != dims:
        raise ConversionError(f"{report.source}: {name} has shape {arrays[name].shape}, expected {dims} axes.")
    return arrays[name]


def _settle(
    config: Any, arrays: Arrays, report: ConversionReport, num_classes: int | None, image_size_px: int | None
) -> tuple[Any, int]:
    """The config at the requested resolution, and the number of classes of the head."""
    if image_size_px is not None:
        config = _checked(type(config), report, **config.model_dump() | {"image_size_px": image_size_px})
    if isinstance(config, TransformerConfig) and config.pos_embed == "sincos-2d":
        if image_size_px is None or config.pool == "token":
            raise ConversionError(
                f"{report.source} has no position embeddings. If the network computes fixed ones and has no class token, "
                "give its image size; otherwise the file is incomplete."
            )
        report.missing["(positions)"] = (
            f"fixed sin-cos embeddings of {config.grid_side} x {config.grid_side} patches: the file has none"
        )
    if (kernel := arrays.get("head/kernel")) is None:
        if num_classes is None:
            raise ConversionError(
                f"{report.source} has no head. Give class names with --classes FILE (in Python: num_classes) "
                "for a new head."
            )
        return config, num_classes
    if kernel.ndim not in (2, 4):
        raise ConversionError(f"{report.source}: head/kernel has shape {kernel.shape}, expected 2 axes.")
    if num_classes is not None and num_classes != kernel.shape[-1]:
        raise ConversionError(
            f"{report.source} has a head of {kernel.shape[-1]} classes, not {num_classes}. "
            "Give one class name per class of the head."
        )
    return config, kernel.shape[-1]


def _positions(
    config: TransformerConfig, num_classes: int, weights: Mapping[str, Tensor], report: ConversionReport
) -> dict[str, Tensor]:
    """The position table in our form: with an entry for the class token, and for the grid of the config.

    Nothing if another weight does not fit, so that a table is never resampled to a width that only one entry has.
    """
    expected = {name: value.shape for name, value in meta_network(config, num_classes).state_dict().items()}
    unfit = {name for name, value in weights.items() if name != "pos_embed" and value.shape != expected.get(name)}
    table = weights.get("pos_embed")
    missing = set(expected) - set(weights) - {"head.weight", "head.bias"}
    if table is None or unfit or missing or table.shape[2:] != expected["pos_embed"][2:]:
        return {}
    side, prefix = grid_side(table.shape[1])
    if config.pool == "token" and prefix == 0:  # big_vision adds positions before the class token
        report.adapted.append("pos_embed: a zero entry for the class token was added at the front")
        table = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    if math.isqrt(config.num_patches) != side:
        report.adapted.append(
            f"pos_embed: resampled from {side} x {side} to {config.grid_side} x {config.grid_side} patches "
            f"({config.pos_embed_resample})"
        )
    return resample_positions({"pos_embed": table}, config)


# How each of our parameters is made.


class TensorRule(NamedTuple):
    """The entries that one of our parameters is made of, and the function that makes it."""

    name: str
    sources: tuple[str, ...]
    make: Callable[..., Tensor]


def _recipes(config: NetworkConfig) -> Iterator[TensorRule]:
    if isinstance(config, BiTConfig):
        yield from _bit_recipes(config)
    elif isinstance(config, TransformerConfig):
        yield from _transformer_recipes(config)
    yield TensorRule("head.weight", ("head/kernel",), lambda k: _dense(k.reshape(k.shape[-2:])))
    yield TensorRule("head.bias", ("head/bias",), _same)


def _transformer_recipes(config: TransformerConfig) -> Iterator[TensorRule]:
    if isinstance(config, HybridConfig):
        yield from _resnet_recipes(config)
    yield TensorRule("patch_embed.weight", ("embedding/kernel",), _conv)
    yield TensorRule("patch_embed.bias", ("embedding/bias",), _same)
    if config.pool == "token":
        yield TensorRule("cls_token", ("cls",), _same)
    if config.pos_embed == "learned-1d":
        yield TensorRule("pos_embed", ("pos_embedding",), _same)
    for i in range(config.depth):
        theirs, ours = f"{BLOCK}{i}", f"blocks.{i}"
        attention = f"{theirs}/MultiHeadDotProductAttention_0"
        parts = [f"{attention}/{part}" for part in ("query", "key", "value")]
        yield from _norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
        yield TensorRule(f"{ours}.attention.qkv.weight", tuple(f"{p}/kernel" for p in parts), _stack(_projection))
        yield TensorRule(f"{ours}.attention.qkv.bias", tuple(f"{p}/bias" for p in parts), _stack(_flat))
        yield from _out(f"{ours}.attention.out", f"{attention}/out")
        yield from _norm(f"{ours}.norm2", f"{theirs}/LayerNorm_1")
        yield from _mlp(ours, f"{theirs}/MlpBlock_0")
    yield from _norm("norm", "Transformer/encoder_norm")
    if config.pool == "map":
        attention = "MAPHead_0/MultiHeadDotProductAttention_0"
        pair = [f"{attention}/{part}" for part in ("key", "value")]
        yield TensorRule("pool.probe", ("MAPHead_0/probe",), _same)
        yield TensorRule("pool.query.weight", (f"{attention}/query/kernel",), _projection)
        yield TensorRule("pool.query.bias", (f"{attention}/query/bias",), _flat)
        yield TensorRule("pool.key_value.weight", tuple(f"{p}/kernel" for p in pair), _stack(_projection))
        yield TensorRule("pool.key_value.bias", tuple(f"{p}/bias" for p in pair), _stack(_flat))
        yield from _out("pool.out", f"{attention}/out")
        yield from _norm("pool.norm", "MAPHead_0/LayerNorm_0")
        yield from _mlp("pool", "MAPHead_0/MlpBlock_0")
    if config.pre_logits:
        yield TensorRule("pre_logits.weight", ("pre_logits/kernel",), _dense)
        yield TensorRule("pre_logits.bias", ("pre_logits/bias",), _same)


def _resnet_recipes(config: HybridConfig) -> Iterator[TensorRule]:
    yield TensorRule("resnet.conv_root.weight", ("conv_root/kernel",), _conv)
    yield from _norm("resnet.norm_root", "gn_root")
    for i, blocks in enumerate(config.stages):
        for j in range(blocks):
            yield from _unit(
                f"resnet.stages.{i}.{j}", f"block{i + 1}/unit{j + 1}", projects=j == 0, projection_norm=True
            )


def _bit_recipes(config: BiTConfig) -> Iterator[TensorRule]:
    yield TensorRule("conv_root.weight", ("root_block/conv_root/kernel",), _conv)
    for i, blocks in enumerate(config.stages):
        for j in range(blocks):
            yield from _unit(f"stages.{i}.{j}", f"block{i + 1}/unit{j + 1:02d}", projects=j == 0, projection_norm=False)
    yield from _norm("norm", "norm-pre-head")


def _unit(ours: str, theirs: str, projects: bool, projection_norm: bool) -> Iterator[TensorRule]:
    for n in (1, 2, 3):
        yield TensorRule(f"{ours}.conv{n}.weight", (f"{theirs}/conv{n}/kernel",), _conv)
        yield from _norm(f"{ours}.norm{n}", f"{theirs}/gn{n}")
    if projects:
        yield TensorRule(f"{ours}.conv_proj.weight", (f"{theirs}/conv_proj/kernel",), _conv)
        if projection_norm:
            yield from _norm(f"{ours}.norm_proj", f"{theirs}/gn_proj")


def _norm(ours: str, theirs: str) -> Iterator[TensorRule]:
    yield TensorRule(f"{ours}.weight", (f"{theirs}/scale",), _same)
    yield TensorRule(f"{ours}.bias", (f"{theirs}/bias",), _same)


def _mlp(ours: str, theirs: str) -> Iterator[TensorRule]:
    for n in (1, 2):
        yield TensorRule(f"{ours}.fc{n}.weight", (f"{theirs}/Dense_{n - 1}/kernel",), _dense)
        yield TensorRule(f"{ours}.fc{n}.bias", (f"{theirs}/Dense_{n - 1}/bias",), _same)


def _out(ours: str, theirs: str) -> Iterator[TensorRule]:
    yield TensorRule(f"{ours}.weight", (f"{theirs}/kernel",), lambda k: _dense(k.reshape(-1, k.shape[-1])))
    yield TensorRule(f"{ours}.bias", (f"{theirs}/bias",), _same)


def _same(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _flat(array: np.ndarray) -> Tensor:
    return _same(array.reshape(-1))


def _dense(kernel: np.ndarray) -> Tensor:
    """(in, out) -> (out, in)."""
    return _same(kernel.T)


def _conv(kernel: np.ndarray) -> Tensor:
    """HWIO -> OIHW."""
    return _same(kernel.transpose(3, 2, 0, 1))


def _projection(kernel: np.ndarray) -> Tensor:
    """(D, heads, head dim) -> (D out, D in), with the heads concatenated."""
    return _dense(kernel.reshape(kernel.shape[0], -1))


def _stack(make: Callable[[np.ndarray], Tensor]) -> Callable[..., Tensor]:
    """Several projections fused into one matrix, in the order of the sources."""
    return lambda *arrays: torch.cat([make(array) for array in arrays])
