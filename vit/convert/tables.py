"""Tables of names, one line per module. Reading and writing use the same table, so that they cannot diverge.

A line maps one of our modules to theirs. `#` is a number. `{query,key,value}` are several of their modules, whose rows
concatenated give ours.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vitline.vit.convert.report import ConversionError, ConversionReport
from vitline.vit.models.limits import MAX_BLOCKS
from vitline.vit.models.vit import Transformer

Table = dict[str, str]


def names_of(ours: str, table: Table) -> list[str]:
    """Their entries for one of our parameters, in the order of its rows. Raises KeyError if the table has no line for it."""
    parts = ours.split(".")
    pattern = ".".join("#" if part.isdigit() else part for part in parts)
    module, _, leaf = pattern.rpartition(".")
    theirs = table[pattern] if pattern in table else f"{table[module]}.{leaf}"
    for number in (part for part in parts if part.isdigit()):
        theirs = theirs.replace("#", number, 1)
    if several := re.search(r"\{(.*?)\}", theirs):
        return [theirs[: several.start()] + one + theirs[several.end() :] for one in several[1].split(",")]
    return [theirs]


def take(
    wanted: Iterable[str], table: Table, state: Mapping[str, Tensor], report: ConversionReport
) -> tuple[dict[str, Tensor], set[str]]:
    """(our parameters, unused entries). A parameter with missing entries is left out; `finish` reports it."""
    weights: dict[str, Tensor] = {}
    unused = set(state)
    for name in wanted:
        sources = names_of(name, table)
        if all(source in state for source in sources):
            parts = [_widened(state[source], report) for source in sources]
            weights[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
            report.loaded[name] = ", ".join(sources)
            unused.difference_update(sources)
    return weights, unused


def give(weights: Mapping[str, Tensor], table: Table) -> dict[str, Tensor]:
    """Their state dict, with copies of our tensors."""
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        theirs = names_of(name, table)
        parts = value.detach().chunk(len(theirs))
        state |= {entry: part.clone() for entry, part in zip(theirs, parts, strict=True)}
    return state


def numbered(state: Iterable[str], pattern: str, report: ConversionReport) -> int:
    """One more than the largest number that `pattern` matches, 0 without a match: the count of modules numbered from 0.

    Raises ConversionError for a number that no network has, before anything of that size is built.
    """
    found = (match for name in state if (match := re.match(pattern, name)))
    return 1 + max((module_number(match[1], match[0], report) for match in found), default=-1)


def module_number(digits: str, name: str, report: ConversionReport) -> int:
    """The number of a block or stage in the name of an entry. Raises ConversionError above MAX_BLOCKS."""
    if len(digits) > 9 or int(digits) >= MAX_BLOCKS:
        raise ConversionError(
            f"{report.source}: {name[:60]} is of block {digits[:12]}, expected fewer than {MAX_BLOCKS:,} blocks."
        )
    return int(digits)


def head_classes(state: Mapping[str, Tensor], entry: str, asked: int | None, report: ConversionReport) -> int:
    """Number of classes of the head `entry`, or `asked` without a head. Raises ConversionError if both differ or are absent."""
    if (head := state.get(entry)) is not None:
        if asked is not None and asked != len(head):
            raise ConversionError(
                f"{report.source} has a head of {len(head)} classes, not {asked}. "
                "Give one class name per class of the head."
            )
        return len(head)
    if asked is None:
        raise ConversionError(
            f"{report.source} has no head. Give class names with --classes FILE (in Python: num_classes) "
            "for a new head."
        )
    return asked


def zero_head(weights: dict[str, Tensor], width: int, num_classes: int, report: ConversionReport) -> None:
    """Adds a head of zeros, for a file without a head."""
    weights["head.weight"], weights["head.bias"] = torch.zeros(num_classes, width), torch.zeros(num_classes)
    report.missing |= {name: "zeros: the file has no head" for name in ("head.weight", "head.bias")}


def position_table(network: Transformer, target: str) -> Tensor | None:
    """The position embeddings that are added to the tokens, as one table (1, T, D); None if nothing is added.

    Raises ValueError if one table cannot express them; the message names `target`, the format to be written.
    """
    config = network.config
    if config.pos_embed == "relative" or config.pos_embed_at != "stem":
        which = "relative" if config.pos_embed == "relative" else f"{config.pos_embed_at}"
        raise ValueError(
            f"not supported: {which} position embeddings (pos_embed={config.pos_embed}, "
            f"pos_embed_at={config.pos_embed_at}) in {target}, which adds one table before the first block."
        )
    table = network.positions()
    return None if table is None else table.detach()


def _widened(value: Tensor, report: ConversionReport) -> Tensor:
    """Half precision converted to float32, in which our networks are stored."""
    if value.dtype in (torch.float32, torch.float64):
        return value
    kind = str(value.dtype).removeprefix("torch.")
    if (note := f"{kind} became float32") not in report.adapted:
        report.adapted.append(note)
    return value.float()
