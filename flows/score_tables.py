"""The tables that people compare with, drawn: in the console, as Markdown for a flow's page, as one HTML page."""

import html
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table as Drawn

from flows import console
from flows.report import STYLE, table_html
from flows.score_lines import TextTable, text_tables
from flows.score_report import ScoreReport, as_data, read_report
from infra.settings import Settings

STYLES = {"ours": "bold", "detail": "dim", "heading": "italic dim", "published": ""}
WIDE_STYLE = """
body { max-width: 110rem } .wide { overflow-x: auto } td, th { padding-right: .45rem }
td:first-child { white-space: pre; position: sticky; left: 0; background: #fff }
"""
NO_SCORES = (
    "There are no scores yet: `vitline vtab run --model NAME --task CORPUS` makes one. A task is a corpus with splits "
    "train800, val200, train800val200 and test (the 19 are named vtab-<task>), or train, val, trainval and test."
)


def show_scores(
    settings: Settings, *, beside: str | None = None, every: bool = False, page: Path | None = None, as_json: bool
) -> None:
    """Every stored score in its table beside the published rows; on request as data, or as a page as well.

    Raises ValueError for a `beside` that is no published row, and for a page that cannot be written.
    """
    report = read_report(settings.root, beside)
    if page is not None:
        write_page(report, page, settings.root)
    if as_json:
        console.emit(as_data(report))
        return
    for table in text_tables(report, "every" if every else "usual"):
        draw(table)
    if not report.models:
        console.tell(NO_SCORES)
    if report.num_left_out:
        console.tell(left_out(report))
    if page is not None:
        console.say(f"written: {page}")


def left_out(report: ScoreReport) -> str:
    return (
        f"{report.num_left_out} further records of the same model, protocol, task and seed are not shown: they were made "
        "on another version of the corpus, or by other code."
    )


def draw(table: TextTable) -> None:
    """On stdout; in several pieces, one below the other, where the console is too narrow."""
    for number, (start, end) in enumerate(pieces(table, console.OUT.width)):
        title = table.title if number == 0 else None
        drawn = Drawn(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
        drawn.add_column(table.first, overflow="fold")
        for index, column in enumerate(table.columns[start:end], start):
            drawn.add_column(column, justify="right" if is_number(table, index) else "left", no_wrap=True)
        for line in table.lines:
            cells = line.cells[start:end]
            if any(cells) or line.kind == "heading":
                drawn.add_row(line.label, *cells, style=STYLES[line.kind])
        console.OUT.print(drawn)
        console.tell("")
    for note in table.notes:
        console.tell(note)
    console.tell("")


def pieces(table: TextTable, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of columns that fit beside the labels: as many whole blocks as there is room for, at least one."""
    blocks = table.blocks or (len(table.columns),)
    room = width - max(len(text) for text in (table.first, *(line.label for line in table.lines)))
    start = end = used = 0
    for block in blocks:
        needed = sum(column_width(table, index) + 1 for index in range(end, end + block))
        if end > start and used + needed > room:
            yield start, end
            start, used = end, 0
        end, used = end + block, used + needed
    yield start, end


def column_width(table: TextTable, index: int) -> int:
    return max(len(table.columns[index]), *(len(line.cells[index]) for line in table.lines))


def is_number(table: TextTable, index: int) -> bool:
    """Whether what stands in a column begins as numbers do."""
    texts = [line.cells[index] for line in table.lines if line.cells[index] not in ("", "-")]
    return all(text.lstrip("+-")[:1].isdigit() for text in texts)


def score_tables_markdown(root: str, models: Collection[str] | None = None) -> str:
    """The tables of some models (URIs), or of all, as Markdown: what a flow shows of its scores.

    A page of Prefect is narrow: VTAB's nineteen columns become lines, and of the published rows those that differences
    are to are shown.
    """
    tables = text_tables(read_report(root, models=models), "compared")
    return "\n\n".join(markdown(table) for table in tables)


def markdown(table: TextTable) -> str:
    """A heading, the table and its notes."""
    head, rows = (table.first, *table.columns), [(line.label.strip(), *line.cells) for line in table.lines]
    if table.blocks:
        kept = [row for row, line in zip(rows, table.lines, strict=True) if line.kind != "heading"]
        head, *rows = zip(("", *table.full_names), *kept, strict=True)
    lines = [head, ("---", *("---:" for _ in head[1:])), *rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"### {table.title}\n\n{body}\n\n" + "\n\n".join(table.notes)


def write_page(report: ScoreReport, page: Path, root: str) -> None:
    """One HTML file with every table and every published row, without any outside reference.

    Raises ValueError where the file cannot be written.
    """
    try:
        page.write_text(page_html(text_tables(report, "every"), f"{root}: {len(report.models)} models"))
    except OSError as error:
        raise ValueError(f"{page} cannot be written ({error.strerror}); `--html FILE` takes a file's path.") from error


def page_html(tables: Sequence[TextTable], lead: str) -> str:
    body = "\n".join(
        f'<h2>{html.escape(table.title)}</h2><div class="wide">{_table_html(table)}</div>'
        + "".join(f'<p class="note">{html.escape(note)}</p>' for note in table.notes)
        for table in tables
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>vitline: scores</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{WIDE_STYLE}</style></head><body>'
        f'<h1>Scores beside the published ones</h1><p class="lead">{html.escape(lead)}<br>'
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p>{body}</body></html>\n"
    )


def _table_html(table: TextTable) -> str:
    right = [index + 1 for index in range(len(table.columns)) if is_number(table, index)]
    return table_html((table.first, *table.columns), [(line.label, *line.cells) for line in table.lines], right=right)
