"""Tables in Markdown, for the pages of Prefect and MLflow."""

from collections.abc import Collection, Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> str:
    """A table, columns in `right` aligned to the right. Cells are Markdown, such as links; a bar in a cell stays one."""
    rule = ["---:" if index in right else "---" for index in range(len(columns))]
    # As an entity, which each renderer understands.
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in (columns, rule, *rows)
    )
