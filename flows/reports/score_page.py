"""The score tables as one self-contained HTML page: own scores first, the published rows folded below them."""

import html
from collections.abc import Sequence
from datetime import UTC, datetime

from flows.reports.report import STYLE
from flows.reports.score_lines import Line, TextTable, is_number

WIDE_STYLE = """
body { max-width: 110rem } .wide { overflow-x: auto } table th, table td { padding-right: .3rem } th[title] { cursor: help }
th:first-child, td:first-child { white-space: pre; position: sticky; left: 0; background: #fff }
tr.ours td { font-weight: 600 } tr.detail td { color: #4a5365; font-size: .85rem }
tr.heading td { color: #4a5365; font-style: italic; padding-top: 1rem } .mean { background: #f3f5f9 }
summary { cursor: pointer; margin: .6rem 0 }
@media (max-width: 40rem) { th:first-child, td:first-child { position: static; white-space: normal; min-width: 8rem } }
"""


def page_html(tables: Sequence[TextTable], lead: str) -> str:
    """The page, without external references. Abbreviated columns show their full names as tooltips."""
    own_first = sorted(tables, key=lambda table: not any(line.kind == "ours" for line in table.lines))
    body = "\n".join(section_html(table) for table in own_first)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>vitline: scores</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}{WIDE_STYLE}</style></head><body>'
        f'<h1>Scores and published scores</h1><p class="lead">{html.escape(lead)}<br>'
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

    def drawn(lines: Sequence[Line]) -> str:
        rows = "".join(
            f'<tr class="{line.kind}"><td>{html.escape(line.label)}</td>'
            + "".join(f'<td class="{k}">{html.escape(text)}</td>' for text, k in zip(line.cells, kinds, strict=True))
            + "</tr>"
            for line in lines
        )
        titles = f"<thead><tr><th>{html.escape(table.first)}</th>{head}</tr></thead>"
        return f'<div class="wide"><table>{titles}<tbody>{rows}</tbody></table></div>'

    own, others = parted(table.lines)
    published = sum(line.kind == "published" for line in others)
    folded = f"<details><summary>{published} published rows</summary>{drawn(others)}</details>" if others else ""
    notes = "<br>".join(html.escape(note) for note in (table.legend, *table.notes) if note)
    return f'<h2>{html.escape(table.title)}</h2>{drawn(own) if own else ""}{folded}<p class="note">{notes}</p>'


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
