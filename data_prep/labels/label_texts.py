"""Converts labels of sources (numbers, texts, lists of these) to text."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vitline.data_prep.labels.classes import ClassInfo, number_label


def labelled_number(label: str) -> int | None:
    """The number from which `number_label` made this label; None for any other label."""
    return int(label) if re.fullmatch(r"[0-9]{6,18}", label) and number_label(int(label)) == label else None


def numbered_class(source_id: str, names: Sequence[str] = ()) -> ClassInfo:
    """The class of a label made by `number_label`, named by its number or as it is in `names`; of any other label by itself."""
    number = labelled_number(source_id)
    if number is None:
        return ClassInfo(name=source_id, source_id=source_id)
    return ClassInfo(name=names[number] if number < len(names) else str(number), source_id=source_id)


def label_texts(value: Any, number: Callable[[int], str] = number_label) -> list[str]:
    """The labels of one cell: a number, a text or a list of these; empty for an empty cell. Texts are in NFC, without spaces and
    invisible characters at their ends;
    `number` converts numbers to text. Raises ValueError for any other value and for negative numbers."""
    if value is None or value == "":
        return []
    return [_label_text(label, number) for label in (value if isinstance(value, (list, tuple)) else [value])]


def _label_text(label: Any, number: Callable[[int], str]) -> str:
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():
        label = int(label)  # tables with missing values store whole numbers as floats
    if isinstance(label, int):
        if label < 0:
            raise ValueError(f"label {label} is negative, which stands for a missing label")
        return number(label)
    text = _BLANK_ENDS.sub("", label) if isinstance(label, str) else ""
    if not text:
        raise ValueError(f"{short(label)} is not a label: expected text or a whole number")
    return plain_text(text)


_BLANK = r"[\s\ufeff\u200b\u200e\u200f\u2060\xad]+"  # spaces, byte order mark, marks without width
_BLANK_ENDS = re.compile(rf"^{_BLANK}|{_BLANK}$")


def distinct_labels(labels: Iterable[str], single_label: bool) -> tuple[str, ...]:
    """Each label once, in order. Raises ValueError if there is none, or several where one is expected."""
    distinct = tuple(dict.fromkeys(labels))
    if not distinct:
        raise ValueError("no label")
    if single_label and len(distinct) > 1:
        raise ValueError(
            f"{len(distinct)} labels, {short(distinct)}; set source.single_label to false to keep them all"
        )
    return distinct


def plain_text(text: str) -> str:
    """The text in NFC. Raises ValueError if it cannot be encoded in UTF-8, such as half of a surrogate pair."""
    text.encode()
    return unicodedata.normalize("NFC", text)


def distinguishable(texts: Sequence[str]) -> list[str]:
    """Texts for a message, escaped if two of them differ but look alike, such as a composed and a decomposed umlaut."""
    if len({unicodedata.normalize("NFC", text.encode(errors="replace").decode()) for text in texts}) == len({*texts}):
        return [*texts]
    return [ascii(text)[1:-1] for text in texts]


def short(value: Any) -> str:
    """A value as shown in a message."""
    shown = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return shown if len(shown) <= 120 else f"{shown[:117]}..."
