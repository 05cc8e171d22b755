"""Tables of text: consoles and pages draw them, and Prefect and MLflow show them as Markdown."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of text, whose first column holds names."""

    title: str
    columns: Sequence[str]
    """Headers; a table without any header shows none."""
    rows: Sequence[Sequence[str]]
    kinds: Sequence[str] = ()
    """What each row is, if that decides its style: `ours`, `detail`, `heading` or `published`."""
    blocks: Sequence[int] = ()
    """Numbers of columns after the first that stay together if a console is too narrow for all; empty for a single block."""
    notes: Sequence[str] = ()
    full_names: Sequence[str] = ()
    """Full names of abbreviated columns after the first; those of means begin with `mean`."""
    legend: str = ""
    """What the abbreviations mean."""


def numeric(rows: Iterable[Sequence[str]]) -> list[bool]:
    """Whether each column holds only numbers, which are aligned to the right. The first column always counts as names."""
    columns = [[cell for cell in cells if cell not in ("", "-")] for cells in zip(*rows, strict=True)]
    return [i > 0 and all(cell.lstrip("+-")[:1].isdigit() for cell in cells) for i, cells in enumerate(columns)]


def markdown(columns: Sequence[str], rows: Collection[Sequence[str]]) -> str:
    """A table in Markdown. Cells are Markdown, such as links; a bar in a cell stays one."""
    rule = ["---:" if right else "---" for right in numeric(rows) or [False] * len(columns)]
    # As an entity, which each renderer understands.
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in (columns, rule, *rows)
    )
