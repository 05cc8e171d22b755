"""Reads official `.npz` checkpoints of the paper, AugReg, big_vision and BiT, in all naming schemes that they have used.

Entries are first renamed to one naming scheme (`npz_names.py`), and their axes are put in torch's order.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vitline.vit.convert.npz_file import opened_npz
from vitline.vit.convert.npz_names import BLOCK, spelled_as_today
from vitline.vit.convert.report import (
    ConversionError,
    ConversionReport,
    Converted,
    check_variant,
    finish,
    refusing,
    resampled,
)
from vitline.vit.convert.shapes import Entries
from vitline.vit.convert.tables import Table
from vitline.vit.models.config import BiTConfig, TransformerConfig

_ATTENTION = "MultiHeadDotProductAttention_0"
_UNIT = {f"conv{n}": f"conv{n}" for n in (1, 2, 3)} | {f"norm{n}": f"gn{n}" for n in (1, 2, 3)}
_UNIT |= {"conv_proj": "conv_proj", "norm_proj": "gn_proj"}


def _lines(modules: Table) -> Table:
    """A line for each parameter of these modules: flax calls the weight of a norm `scale`, and any other `kernel`."""
    lines = {}
    for ours, theirs in modules.items():
        is_norm = ours.rpartition(".")[2].startswith("norm")
        lines[f"{ours}.weight"] = f"{theirs}/{'scale' if is_norm else 'kernel'}"
        lines[f"{ours}.bias"] = f"{theirs}/bias"
    return lines


TRANSFORMER: Table = {"cls_token": "cls", "pos_embed": "pos_embedding", "pool.probe": "MAPHead_0/probe"} | _lines(
    {
        "resnet.conv_root": "conv_root",
        "resnet.norm_root": "gn_root",
        **{f"resnet.stages.#.#.{ours}": f"block#1/unit#1/{theirs}" for ours, theirs in _UNIT.items()},
        "patch_embed": "embedding",
        "blocks.#.norm1": f"{BLOCK}#/LayerNorm_0",
        "blocks.#.attention.qkv": f"{BLOCK}#/{_ATTENTION}/{{query,key,value}}",
        "blocks.#.attention.out": f"{BLOCK}#/{_ATTENTION}/out",
        "blocks.#.norm2": f"{BLOCK}#/LayerNorm_1",
        "blocks.#.fc1": f"{BLOCK}#/MlpBlock_0/Dense_0",
        "blocks.#.fc2": f"{BLOCK}#/MlpBlock_0/Dense_1",
        "norm": "Transformer/encoder_norm",
        "pool.query": f"MAPHead_0/{_ATTENTION}/query",
        "pool.key_value": f"MAPHead_0/{_ATTENTION}/{{key,value}}",
        "pool.out": f"MAPHead_0/{_ATTENTION}/out",
        "pool.norm": "MAPHead_0/LayerNorm_0",
        "pool.fc1": "MAPHead_0/MlpBlock_0/Dense_0",
        "pool.fc2": "MAPHead_0/MlpBlock_0/Dense_1",
        "pre_logits": "pre_logits",
        "head": "head",
    }
)
BIT: Table = _lines(
    {
        "conv_root": "root_block/conv_root",
        **{f"stages.#.#.{ours}": f"block#1/unit#01/{theirs}" for ours, theirs in _UNIT.items()},
        "norm": "norm-pre-head",
        "head": "head",
    }
)
# (end of an entry's name, its number of axes): puts the axes in torch's order. Other entries are as in torch.
_LAYOUTS: dict[tuple[str, int], Callable[[Tensor], Tensor]] = {
    ("/(query|key|value)/kernel", 3): lambda kernel: kernel.flatten(1).T,  # (in, heads, head dim) -> (out, in)
    ("/(query|key|value)/bias", 2): lambda bias: bias.flatten(),  # (heads, head dim) -> (out)
    ("/out/kernel", 3): lambda kernel: kernel.flatten(0, 1).T,  # (heads, head dim, out) -> (out, in)
    ("/kernel", 2): lambda kernel: kernel.T,  # (in, out) -> (out, in)
    ("/kernel", 4): lambda kernel: kernel.permute(3, 2, 0, 1),  # HWIO -> OIHW
}


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
        found = spelled_as_today(file, report)
    is_bit = "root_block/conv_root/kernel" in found
    raw = Entries(
        state={name: torch.as_tensor(array) for name, (_, array) in found.items()},
        table=BIT if is_bit else TRANSFORMER,
        report=report,
        kind="an official .npz checkpoint",
        written={name: entry for name, (entry, _) in found.items()},
    )
    entries = replace(raw, state={name: _laid_out(name, value) for name, value in raw.state.items()})
    with refusing(uri):
        config = _bit_config(entries) if is_bit else _transformer_config(entries, _num_heads(raw), image_size_px)
        if variant is not None:
            check_variant(config, variant, uri)
        classes = entries.classes(num_classes)
        weights, unused = entries.take(config, classes)
        if isinstance(config, TransformerConfig):
            entries.add_class_position(weights, config)
        network = finish(config, classes, weights, report, unused).network
        return Converted(resampled(network, image_size_px, report), report)


def _laid_out(name: str, value: Tensor) -> Tensor:
    for (end, dims), change in _LAYOUTS.items():
        if value.ndim == dims and re.search(f"{end}$", name):
            return change(value)
    return value


def _bit_config(entries: Entries) -> BiTConfig:
    entries.report.missing["(resolution)"] = (
        "224 px unless another one is requested: a BiT file does not contain its training resolution"
    )
    return BiTConfig(**entries.resnet(""))


def _transformer_config(entries: Entries, num_heads: int, image_size_px: int | None) -> TransformerConfig:
    """The config at the resolution of the position embeddings, or at the requested one if the network computes them."""
    learned = entries.has("pos_embed")
    if not learned and (image_size_px is None or entries.pool == "token"):
        raise ConversionError(
            f"{entries.report.source} has no position embeddings. If the network computes fixed ones and has no class token, "
            "give its image size; otherwise the file is incomplete."
        )
    config = entries.transformer(
        None if learned else image_size_px,
        num_heads=num_heads,
        pre_logits=entries.has("pre_logits.weight"),
        pos_embed="learned-1d" if learned else "sincos-2d",
    )
    if not learned:
        entries.report.missing["(positions)"] = (
            f"fixed sin-cos embeddings of {config.grid_side} x {config.grid_side} patches: the file has none"
        )
    return config


def _num_heads(raw: Entries) -> int:
    """Number of attention heads, an axis of each projection. Raises ConversionError if projections have different shapes."""
    shape = raw.need("blocks.0.attention.qkv.weight", 3).shape
    for name, value in raw.state.items():
        if re.search(r"Attention_0/(query|key|value)/kernel$", name) and value.shape != shape:
            raise ConversionError(
                f"{raw.report.source}: {name} has shape {tuple(value.shape)}, but the query of block 0 has {tuple(shape)}."
            )
    return shape[1]
