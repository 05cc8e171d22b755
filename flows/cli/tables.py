"""Draws tables in a terminal."""

from collections.abc import Iterator, Sequence

from vitline.flows import console
from vitline.infra.html.tables import Table, numeric
from vitline.infra.plain_text import visible

STYLES = {"ours": "bold", "detail": "dim", "heading": "italic dim"}


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table on stdout."""
    draw(Table(title, columns, rows))


def draw(table: Table) -> None:
    """Prints a table and its notes on stdout; cells are plain text, never markup. If the console is too narrow, blocks of columns are
    printed one below the other."""
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    right, width = numeric(table.rows), console.out().width
    for start, end in pieces(table, width):
        drawn = Drawn(
            title=Text(visible(table.title)) if table.title and start == 1 else None,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE,
            padding=0 if table.blocks else (0, 1),
            pad_edge=False,
            show_header=any(table.columns),
        )
        shown = (0, *range(start, end))
        for index in shown:
            justify = "right" if right and right[index] else "left"
            drawn.add_column(
                Text(visible(table.columns[index])),
                justify=justify,  # type: ignore[arg-type]
                overflow="fold",
                no_wrap=bool(table.blocks and index),
            )
        for row, kind in zip(table.rows, table.kinds or [""] * len(table.rows), strict=True):
            if not kind or kind == "heading" or any(row[start:end]):
                drawn.add_row(*(Text(visible(row[index])) for index in shown), style=STYLES.get(kind))
        console.out().print(drawn)
    for note in (table.legend, *table.notes):
        if note:
            console.print_result(note)


def pieces(table: Table, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of columns after the first that fit into `width` with it: as many blocks as possible, at least one."""
    widths = [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
    room = width - widths[0]
    start, end, used = 1, 1, 0
    for block in table.blocks or (len(table.columns) - 1,):
        needed = sum(column + 1 for column in widths[end : end + block])
        if end > start and used + needed > room:
            yield start, end
            start, used = end, 0
        end, used = end + block, used + needed
    yield start, end
