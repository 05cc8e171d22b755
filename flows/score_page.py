"""The tables of scores as one self-contained HTML page: every table, every published row."""

import html
from collections.abc import Sequence
from datetime import UTC, datetime

from flows.report import STYLE
from flows.score_lines import TextTable, is_number

WIDE_STYLE = """
body { max-width: 110rem } .wide { overflow-x: auto } table th, table td { padding-right: .3rem } th[title] { cursor: help }
th:first-child, td:first-child { white-space: pre; position: sticky; left: 0; background: #fff }
tr.ours td { font-weight: 600 } tr.detail td { color: #4a5365; font-size: .85rem }
tr.heading td { color: #4a5365; font-style: italic; padding-top: 1rem } .mean { background: #f3f5f9 }
"""


def page_html(tables: Sequence[TextTable], lead: str) -> str:
    """The page, without any outside reference. Abbreviated columns show their full names under the pointer."""
    body = "\n".join(section_html(table) for table in tables)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>vitline: scores</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{WIDE_STYLE}</style></head><body>'
        f'<h1>Scores beside the published ones</h1><p class="lead">{html.escape(lead)}<br>'
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p>{body}</body></html>\n"
    )


def section_html(table: TextTable) -> str:
    """A heading, the table and its notes."""
    names = table.full_names or table.columns
    kinds = [
        " ".join(["n"] * is_number(table, index) + ["mean"] * name.startswith("mean"))
        for index, name in enumerate(names)
    ]
    titles = [f' title="{html.escape(name)}"' for name in table.full_names] or [""] * len(table.columns)
    columns = zip(table.columns, kinds, titles, strict=True)
    head = "".join(f'<th class="{kind}"{title}>{html.escape(name)}</th>' for name, kind, title in columns)
    rows = "".join(
        f'<tr class="{line.kind}"><td>{html.escape(line.label)}</td>'
        + "".join(f'<td class="{k}">{html.escape(text)}</td>' for text, k in zip(line.cells, kinds, strict=True))
        + "</tr>"
        for line in table.lines
    )
    notes = "<br>".join(html.escape(note) for note in (table.legend, *table.notes) if note)
    return (
        f'<h2>{html.escape(table.title)}</h2><div class="wide"><table><thead><tr><th>{html.escape(table.first)}</th>'
        f'{head}</tr></thead><tbody>{rows}</tbody></table></div><p class="note">{notes}</p>'
    )
