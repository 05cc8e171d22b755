"""CSV for people, who open it in spreadsheets."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

# What begins a formula; full-width forms too, which some spreadsheets convert. A spreadsheet may split cells at other separators
# than commas, by its language, so the beginning of a part behind one counts, too. (OWASP, "CSV Injection".)
_FORMULA = re.compile(r"(^|[;\t\r\n])(?=[=+\-@\t\r\n＝＋－＠])")


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV with \\n at their ends. Names are made by others: a text that a spreadsheet would run, such as `=cmd`, gets an
    apostrophe before it. Numbers stay as they are."""
    return "".join(_line(row) for row in (head, *rows))


def _line(row: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(
        [_defused(cell) for cell in row]
    )  # with "\n" it would not quote "\r"
    return line.getvalue().removesuffix("\r\n") + "\n"


def _defused(cell: object) -> object:
    return _FORMULA.sub(r"\1'", cell) if isinstance(cell, str) else cell
