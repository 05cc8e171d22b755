"""Tables of names, one line per module. Reading and writing use the same table, so that they cannot diverge.

A line maps one of our modules to theirs. `#` is a number, `#1` a number that they count from 1, and `#01` one that they also write
with two digits. `{query,key,value}` are several of their modules, whose rows concatenated give ours.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from vitline.vit.convert.report import ConversionError, ConversionReport
from vitline.vit.models.limits import MAX_BLOCKS
from vitline.vit.models.vit import Transformer

Table = dict[str, str]
_NUMBER = re.compile("#(0?1|)")


def names_of(ours: str, table: Table) -> list[str]:
    """Their entries for one of our parameters, in the order of its rows. Raises KeyError if the table has no line for it."""
    parts = ours.split(".")
    pattern = ".".join("#" if part.isdigit() else part for part in parts)
    module, _, leaf = pattern.rpartition(".")
    theirs = table[pattern] if pattern in table else f"{table[module]}.{leaf}"
    for part in parts:
        if part.isdigit():
            theirs = _NUMBER.sub(_numbered(int(part)), theirs, count=1)
    if several := re.search(r"\{(.*?)\}", theirs):
        return [theirs[: several.start()] + one + theirs[several.end() :] for one in several[1].split(",")]
    return [theirs]


def numbers_of(ours: str, table: Table, state: Iterable[str], report: ConversionReport) -> Iterator[tuple[int, ...]]:
    """The numbers of the modules that entries are of, counted from 0, where `ours` is like `blocks.#.norm1.weight`.

    Raises ConversionError for a number that no network has, before anything of that size is built.
    """
    *texts, _ = (pieces := _NUMBER.split(names_of(ours, table)[0]))[::2]
    pattern = re.compile("".join(rf"{re.escape(text)}(\d+)" for text in texts) + r"\b")
    for name in state:
        if match := pattern.match(name):
            found = zip(match.groups(), pieces[1::2], strict=True)
            yield tuple(_module_number(digits, match[0], report) - bool(from_1) for digits, from_1 in found)


def give(weights: Mapping[str, Tensor], table: Table) -> dict[str, Tensor]:
    """Their state dict, with copies of our tensors."""
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        theirs = names_of(name, table)
        parts = value.detach().chunk(len(theirs))
        state |= {entry: part.clone() for entry, part in zip(theirs, parts, strict=True)}
    return state


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


def _numbered(number: int) -> Callable[[re.Match[str]], str]:
    return lambda place: f"{number + bool(place[1]):0{len(place[1])}d}"


def _module_number(digits: str, name: str, report: ConversionReport) -> int:
    """The number of a block or stage in the name of an entry. Raises ConversionError above MAX_BLOCKS."""
    if len(digits) > 9 or int(digits) >= MAX_BLOCKS:
        raise ConversionError(
            f"{report.source}: {name[:60]} is of block {digits[:12]}, expected fewer than {MAX_BLOCKS:,} blocks."
        )
    return int(digits)
