"""The score tables as Markdown for Prefect's page of a flow run, and as an HTML page."""

from collections.abc import Sequence
from pathlib import Path

from vitline.flows.reports.score_lines import text_tables
from vitline.flows.reports.score_page import page_html
from vitline.flows.reports.score_report import ScoreReport, read_report
from vitline.infra.html.tables import Table, markdown
from vitline.vit.evaluation.evaluate import Score


def score_tables_markdown(root: str, scores: Sequence[Score]) -> str:
    """The tables of the models of these scores as Markdown, for Prefect.

    Prefect's page is narrow: VTAB's nineteen columns become lines, and only the compared published rows are shown.
    """
    return "\n\n".join(table_markdown(table) for table in text_tables(read_report(root, of=scores), "compared"))


def table_markdown(table: Table) -> str:
    """A heading, the table and its notes. A table with abbreviated columns is transposed, with the full names."""
    columns, rows = table.columns, [(row[0].strip(), *row[1:]) for row in table.rows]
    if table.full_names:
        kept = [row for row, kind in zip(rows, table.kinds, strict=True) if kind != "heading"]
        columns, *rows = zip(("", *table.full_names), *kept, strict=True)
    return f"### {table.title}\n\n{markdown(columns, rows)}\n\n" + "  \n".join(table.notes)


def write_page(report: ScoreReport, page: Path, root: str) -> None:
    """Writes one HTML file with every table and every published row, without external references.

    Raises ValueError if the file cannot be written.
    """
    try:
        page.write_text(page_html(text_tables(report, "every"), f"{root}: {len(report.models)} models"))
    except OSError as error:
        raise ValueError(f"{page} cannot be written ({error.strerror}); `--html` takes the path of a file.") from error
