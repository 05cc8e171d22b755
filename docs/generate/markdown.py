"""Markdown from prose of the code, and tables."""

import html
import re
from collections.abc import Iterable, Sequence


def text(words: str) -> str:
    """Prose of the code as Markdown: outside of code spans nothing is markup, and line breaks do not count."""
    paragraphs = re.split(r"\n\s*\n", words.strip())
    return "\n\n".join(paragraph(" ".join(p.split())) for p in paragraphs)


def paragraph(words: str) -> str:
    pieces = words.split("`")
    if len(pieces) % 2 == 0:  # a lone backtick
        return escaped(words)
    return "`".join(piece if number % 2 else escaped(piece) for number, piece in enumerate(pieces))


def escaped(words: str) -> str:
    safe = html.escape(words, quote=False)
    return re.sub(r"([|*_\[\]])", r"\\\1", safe)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, or nothing where there are no rows."""
    body = [line(row) for row in rows]
    return "\n".join([line(head), line(["---"] * len(head)), *body]) if body else ""


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |"


def joined(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"
