"""Tables of names: one line per module, read in both directions, so that reading and writing cannot drift apart.

A line says which of their modules stands for one of ours. `#` is a number; `{query,key,value}` are several modules whose
rows, one below the other, are ours.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vit.convert.report import ConversionError, ConversionReport
from vit.models.vit import Transformer

Table = dict[str, str]


def names_of(ours: str, table: Table) -> list[str]:
    """Their entries for one of our parameters, in the order of its rows. Raises KeyError where the table has no line."""
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
    """(our parameters, entries that nobody used); what is only half there is left for the final check to name."""
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
    """Their state dict, of tensors of its own."""
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        theirs = names_of(name, table)
        parts = value.detach().chunk(len(theirs))
        state |= {entry: part.clone() for entry, part in zip(theirs, parts, strict=True)}
    return state


def numbered(state: Iterable[str], pattern: str) -> int:
    """How many there are of what `pattern` numbers from 0: one more than the largest; 0 where there is none."""
    return 1 + max((int(match[1]) for name in state if (match := re.match(pattern, name))), default=-1)


def head_classes(state: Mapping[str, Tensor], entry: str, asked: int | None, report: ConversionReport) -> int:
    """Classes of the head `entry`, or of the one to be made. Raises ConversionError where the two differ, or neither is."""
    if (head := state.get(entry)) is not None:
        if asked is not None and asked != len(head):
            raise ConversionError(f"{report.source} has a head of {len(head)} classes, not {asked}.")
        return len(head)
    if asked is None:
        raise ConversionError(f"{report.source} has no head; say how many classes the new one is to have.")
    return asked


def zero_head(weights: dict[str, Tensor], width: int, num_classes: int, report: ConversionReport) -> None:
    """A head of zeros for a file that has none."""
    weights["head.weight"], weights["head.bias"] = torch.zeros(num_classes, width), torch.zeros(num_classes)
    report.missing |= {name: "zeros: the file has no head" for name in ("head.weight", "head.bias")}


def position_table(network: Transformer, target: str) -> Tensor | None:
    """What is added to the tokens, as one table (1, T, D), whatever it is computed from; None where nothing is.

    Raises ValueError where no such table exists; `target` is who would have to hold it.
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
    """Half precision as float32, in which networks are kept."""
    if value.dtype in (torch.float32, torch.float64):
        return value
    kind = str(value.dtype).removeprefix("torch.")
    if (note := f"{kind} became float32") not in report.adapted:
        report.adapted.append(note)
    return value.float()
