"""The score tables in the console, and as Markdown for Prefect's page of a flow run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table as Drawn

from vitline.flows import console
from vitline.flows.reports.score_lines import TextTable, is_number, text_tables
from vitline.flows.reports.score_page import page_html
from vitline.flows.reports.score_report import ScoreReport, as_data, read_report
from vitline.infra.html.markdown import markdown_table
from vitline.infra.settings import Settings
from vitline.vit.evaluation.evaluate import Score

STYLES = {"ours": "bold", "detail": "dim", "heading": "italic dim", "published": ""}
NO_SCORES = (
    "There are no scores yet: `vitline evaluate run --model NAME --task CORPUS` makes them. A task is a corpus with the splits "
    "train800, val200, train800val200 and test (the 19 of VTAB are named vtab-<task>), or train, val, trainval and test."
)


def show_scores(
    settings: Settings, *, beside: str | None = None, every: bool = False, page: Path | None = None, as_json: bool
) -> None:
    """Prints every stored score with the published rows, as tables or as JSON; also writes the HTML page if requested.

    Raises ValueError if `beside` names no published row, or if the page cannot be written.
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
        console.print_result(NO_SCORES)
    if report.num_left_out:
        console.print_result(left_out(report))
    if page is not None:
        console.say(f"written: {page}")


def left_out(report: ScoreReport) -> str:
    return (
        f"{report.num_left_out} older records of the same model, protocol, task and seed are not shown: they were made on "
        "another version of the corpus, or by other code."
    )


def draw(table: TextTable) -> None:
    """Prints a table on stdout. If the console is too narrow, blocks of columns are printed one below the other."""
    for number, (start, end) in enumerate(pieces(table, console.out().width)):
        title = table.title if number == 0 else None
        drawn = Drawn(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
        drawn.add_column(table.first, overflow="fold")
        for index, column in enumerate(table.columns[start:end], start):
            drawn.add_column(column, justify="right" if is_number(table, index) else "left", no_wrap=True)
        for line in table.lines:
            cells = line.cells[start:end]
            if any(cells) or line.kind == "heading":
                drawn.add_row(escape(line.label), *map(escape, cells), style=STYLES[line.kind])
        console.out().print(drawn)
        console.print_result("")
    for note in (table.legend, *table.notes):
        if note:
            console.print_result(note)
    console.print_result("")


def pieces(table: TextTable, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of columns that fit into `width` with the labels: as many blocks as possible, at least one."""
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


def score_tables_markdown(root: str, scores: Sequence[Score]) -> str:
    """The tables of the models of these scores as Markdown, for Prefect.

    Prefect's page is narrow: VTAB's nineteen columns become lines, and only the compared published rows are shown.
    """
    return "\n\n".join(markdown(table) for table in text_tables(read_report(root, of=scores), "compared"))


def markdown(table: TextTable) -> str:
    """A heading, the table and its notes. A table with abbreviated columns is transposed, with the full names."""
    head, rows = (table.first, *table.columns), [(line.label.strip(), *line.cells) for line in table.lines]
    right = [is_number(table, index) for index in range(len(table.columns))]
    if table.full_names:
        kept = [row for row, line in zip(rows, table.lines, strict=True) if line.kind != "heading"]
        head, *rows = zip(("", *table.full_names), *kept, strict=True)
        right = [True] * len(kept)
    body = markdown_table(head, rows, [index for index, number in enumerate(right, start=1) if number])
    return f"### {table.title}\n\n{body}\n\n" + "  \n".join(table.notes)


def write_page(report: ScoreReport, page: Path, root: str) -> None:
    """Writes one HTML file with every table and every published row, without external references.

    Raises ValueError if the file cannot be written.
    """
    try:
        page.write_text(page_html(text_tables(report, "every"), f"{root}: {len(report.models)} models"))
    except OSError as error:
        raise ValueError(f"{page} cannot be written ({error.strerror}); `--html` takes the path of a file.") from error
