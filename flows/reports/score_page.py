"""The score tables as one self-contained HTML page: own scores first, the published rows folded below them."""

from collections.abc import Sequence
from datetime import UTC, datetime

from vitline.infra.html.page import render
from vitline.infra.html.tables import Table, numeric

Row = tuple[str, Sequence[str]]
"""Kind and cells."""


def page_html(tables: Sequence[Table], lead: str) -> str:
    """The page, without external references. Abbreviated columns show their full names as tooltips."""
    own_first = sorted(tables, key=lambda table: "ours" not in table.kinds)
    return render(
        "flows/reports/score_page.html.j2",
        title="Scores and published scores",
        lead=lead,
        now=datetime.now(UTC),
        tables=[(table, column_kinds(table), *parted(table)) for table in own_first],
    )


def column_kinds(table: Table) -> list[str]:
    """The classes of the style sheet for each column."""
    names = table.columns if not table.full_names else ("", *table.full_names)
    return [
        " ".join(["n"] * number + ["mean"] * name.startswith("mean"))
        for number, name in zip(numeric(table.rows), names, strict=True)
    ]


def parted(table: Table) -> tuple[list[Row], list[Row]]:
    """Own rows and published rows, each with the headings above them."""
    own, published, headings = list[Row](), list[Row](), list[Row]()
    for row in zip(table.kinds, table.rows, strict=True):
        if row[0] == "heading":
            headings.append(row)
            continue
        (published if row[0] == "published" else own).extend([*headings, row])
        headings = []
    return own, published
