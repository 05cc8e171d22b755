"""The score tables as one self-contained HTML page: own scores first, the published rows folded below them."""

from collections.abc import Sequence
from datetime import UTC, datetime

from vitline.flows.reports.score_lines import Line, TextTable, is_number
from vitline.infra.html.page import render


def page_html(tables: Sequence[TextTable], lead: str) -> str:
    """The page, without external references. Abbreviated columns show their full names as tooltips."""
    own_first = sorted(tables, key=lambda table: not any(line.kind == "ours" for line in table.lines))
    return render(
        "flows/reports/score_page.html.j2",
        title="Scores and published scores",
        lead=lead,
        now=datetime.now(UTC),
        tables=[(table, column_kinds(table), *parted(table.lines)) for table in own_first],
    )


def column_kinds(table: TextTable) -> list[str]:
    """The classes of the style sheet for each column."""
    names = table.full_names or table.columns
    return [
        " ".join(["n"] * is_number(table, index) + ["mean"] * name.startswith("mean"))
        for index, name in enumerate(names)
    ]


def parted(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Own lines and published lines, each with the headings above them."""
    own: list[Line] = []
    published: list[Line] = []
    headings: list[Line] = []
    for line in lines:
        if line.kind == "heading":
            headings.append(line)
            continue
        (published if line.kind == "published" else own).extend([*headings, line])
        headings = []
    return own, published
