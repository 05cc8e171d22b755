"""Untrusted text as plain text: terminal control sequences (colours, titles, cursor movements) are removed, or shown as escapes, and
what a spreadsheet would run as a formula is a text.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

# ECMA-48: CSI sequences (colours, cursor), OSC strings (titles, links) up to BEL or ST, and two-character escapes.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
# Control characters, line and paragraph separators, bidirectional controls, and bytes that are not valid text.
_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# The last line of a Python traceback, or an error line of a log. Not any line with the word, such as "(Background on this
# error at: ...)".
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b.*:|\bERROR\b|^[Ee]rror:")
# What begins a formula; full-width forms too, which some spreadsheets convert. A spreadsheet may split cells at other separators
# than commas, by its language, so the beginning of a part behind one counts, too. (OWASP, "CSV Injection".)
_FORMULA = re.compile(r"(^|[;\t\r\n])(?=[=+\-@\t\r\n＝＋－＠])")


def plain(text: str) -> str:
    """`text` without escape sequences, and without text that a carriage return has overwritten.

    >>> plain("\\x1b[31mred\\x1b[0m")
    'red'
    """
    lines = _ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def visible(text: str) -> str:
    """A text as one line, invisible characters escaped as in Python: file and class names come from untrusted data and must neither
    colour a terminal nor break a table or page."""
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_lines(text: str) -> str:
    """The same of a text of several lines."""
    return "\n".join(map(visible, text.split("\n")))


def last_words(text: str) -> str:
    """The line of a log that best explains why a program ended: its last error, else its last line."""
    lines = [line.strip() for line in plain(text).splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or lines or ["its log is empty"])[-1]


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
