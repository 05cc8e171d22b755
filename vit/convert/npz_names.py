"""Renames the entries of official `.npz` files to the current naming scheme of big_vision.

Source: the authors' repositories and their converters (arXiv:2010.11929, 2106.10270, 2205.01580, 1912.11370).
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from vitline.vit.convert.report import ConversionError, ConversionReport
from vitline.vit.models.limits import MAX_BLOCKS

Arrays = dict[str, np.ndarray]

_CONTAINERS = (
    ("opt/target/", "an optimizer's checkpoint"),
    ("params/img/", "the image tower of a two-tower checkpoint"),
    ("img/", "the image tower of a two-tower checkpoint"),
    ("params/", "a training checkpoint"),
)
BLOCK = "Transformer/encoderblock_"
_PRE_LINEN = (
    ("/LayerNorm_2/", "/LayerNorm_1/"),
    ("/MultiHeadDotProductAttention_1/", "/MultiHeadDotProductAttention_0/"),
    ("/MlpBlock_3/", "/MlpBlock_0/"),
)
_POSITIONS = ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding")
_INLINED_MAP = ("probe", "MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")
_GROUP_NORM = re.compile(r"(?:^|/)(?:gn\d+|gn_root|gn_proj|norm-pre-head)/(?:scale|bias)$")
_BIT_UNIT = re.compile(
    r"resnet/(block\d)/(unit\d+)/([abc])/(proj/)?(standardized_conv2d/kernel|group_norm/(?:gamma|beta))"
)
_BIT_NAMES = {
    "resnet/root_block/standardized_conv2d/kernel": "root_block/conv_root/kernel",
    "resnet/group_norm/gamma": "norm-pre-head/scale",
    "resnet/group_norm/beta": "norm-pre-head/bias",
    "resnet/head/conv2d/kernel": "head/kernel",
    "resnet/head/conv2d/bias": "head/bias",
    "conv_head/kernel": "head/kernel",
    "conv_head/bias": "head/bias",
}


def spelled_as_today(file: Mapping[str, np.ndarray], report: ConversionReport) -> dict[str, tuple[str, np.ndarray]]:
    """Current name -> (name in the file, array). Raises ConversionError if two entries have the same current name."""
    entries: dict[str, tuple[str, np.ndarray]] = {}
    for name, entry, array in _unstacked(_unpacked(file, report), report):
        today = _today(name)
        if _GROUP_NORM.search(today):
            array = array.reshape(-1)
        if today in entries:
            raise ConversionError(f"{report.source}: {entries[today][0]} and {entry} are the same parameter, {today}.")
        entries[today] = (entry, array)
    if not entries:
        raise ConversionError(
            f"{report.source} contains no weights. Give an official checkpoint; if it is one, download it again."
        )
    if any(name.startswith(_INLINED_MAP) for name in entries):  # a naming scheme from the development of ViT-G
        moved = {f"MAPHead_0/{n}" if n.startswith(_INLINED_MAP) else n: v for n, v in entries.items()}
        report.adapted.append("the attention pool was at the top level of the file")
        entries = moved
    return entries


def _unpacked(file: Mapping[str, np.ndarray], report: ConversionReport) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name without its container, name in the file, array) of the entries of the network. Other entries are skipped."""
    container = next((c for c in _CONTAINERS if any(name.startswith(c[0]) for name in file)), None)
    report.family = container[1] if container else "a model checkpoint"
    for entry in file:  # an entry that is skipped is not unpacked
        if container is None or entry.startswith(container[0]):
            yield entry.removeprefix(container[0] if container else ""), entry, _float32(entry, file[entry], report)
        else:
            report.skipped[entry] = f"not part of the network: {report.family} contains more than the network"


def _float32(name: str, array: np.ndarray, report: ConversionReport) -> np.ndarray:
    """The array as float32. Files store bfloat16 as two opaque bytes."""
    if array.dtype == np.float32:
        return array
    kind = "bfloat16" if array.dtype.kind == "V" and array.dtype.itemsize == 2 else str(array.dtype)
    if array.dtype.kind != "f" and kind != "bfloat16":
        raise ConversionError(f"{report.source}: entry {name} has dtype {kind}, expected floating-point numbers.")
    if (note := f"{kind} became float32") not in report.adapted:
        report.adapted.append(note)
    if kind == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _unstacked(
    entries: Iterator[tuple[str, str, np.ndarray]], report: ConversionReport
) -> Iterator[tuple[str, str, np.ndarray]]:
    """The entries, with blocks that were stacked along a first axis as separate entries."""
    stacked = "Transformer/encoderblock/"
    for name, entry, array in entries:
        if not name.startswith(stacked):
            yield name, entry, array
            continue
        note = "the blocks were stacked along a first axis (scanned layers)"
        if note not in report.adapted:
            report.adapted.append(note)
        blocks = len(array) if array.ndim else 0
        if blocks > MAX_BLOCKS:
            raise ConversionError(
                f"{report.source}: {entry} has {blocks:,} stacked blocks, expected fewer than {MAX_BLOCKS:,}."
            )
        for i in range(blocks):
            yield f"{BLOCK}{i}/{name.removeprefix(stacked)}", f"{entry}[{i}]", array[i]


def _today(name: str) -> str:
    """The current name in big_vision."""
    if name.startswith(BLOCK):
        for old, new in _PRE_LINEN:
            name = name.replace(old, new)
        return name
    if name in _POSITIONS:
        return "pos_embedding"
    name = re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)
    if name in _BIT_NAMES:
        return _BIT_NAMES[name]
    if match := _BIT_UNIT.fullmatch(name):
        block, unit, letter, projection, what = match.groups()
        number = "abc".index(letter) + 1
        if what.startswith("standardized_conv2d"):
            return f"{block}/{unit}/{'conv_proj' if projection else f'conv{number}'}/kernel"
        return f"{block}/{unit}/gn{number}/{'scale' if what.endswith('gamma') else 'bias'}"
    return name
