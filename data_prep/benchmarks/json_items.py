"""Streams a list from a JSON file that is too large for memory."""

import codecs
import json
from collections.abc import Iterator
from typing import Any

_MAX_VALUE_CHARACTERS = 16 << 20
_AT_A_NUMBERS_END = len("e+")  # a number may continue if fewer characters follow it


def json_items(pieces: Iterator[bytes], name: str) -> Iterator[Any]:
    """The items of the list named `name` in the JSON object in `pieces`, one at a time. All pieces are read.

    Raises ValueError with the position if the text is not JSON, or if an item is larger than 16 Mi characters.
    """
    text = _JsonText(pieces)
    text.take("{")
    while text.value() != name:
        text.take(":")
        text.value()
        if text.next_mark() == "}":
            raise ValueError(f"there is no list {name!r}")
        text.take(",")
    text.take(":")
    text.take("[")
    if text.next_mark() != "]":
        yield text.value()
    while text.next_mark() != "]":
        text.take(",")
        yield text.value()
    for _ in pieces:  # read on to the end, where a checksum is compared
        pass


class _JsonText:
    """JSON text that arrives in pieces; memory holds one value and one piece."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._utf8, self._json = pieces, codecs.getincrementaldecoder("utf-8")(), json.JSONDecoder()
        self._text, self._at, self._before = "", 0, 0

    def next_mark(self) -> str:
        """The next character that is not whitespace, without consuming it. Raises ValueError at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise ValueError("the JSON text ends early")

    def take(self, mark: str) -> None:
        if (found := self.next_mark()) != mark:
            raise ValueError(f"character {self._before + self._at:,} is {found!r} where {mark!r} should be")
        self._at += 1

    def value(self) -> Any:
        """The next value."""
        self.next_mark()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError:
                raise ValueError(f"character {self._before + self._at:,}: nested too deeply") from None
            except ValueError as error:
                if len(self._text) - self._at > _MAX_VALUE_CHARACTERS or not self._more():
                    raise ValueError(f"in the value at character {self._before + self._at:,}: {error}") from error
                continue
            complete = isinstance(value, str | list | dict) or len(self._text) - end > _AT_A_NUMBERS_END
            if complete or not self._more():
                self._at = end
                return value

    def _more(self) -> bool:
        """Read the next piece. False at the end."""
        for piece in self._pieces:
            if text := self._utf8.decode(piece):
                self._before += self._at
                self._text, self._at = self._text[self._at :] + text, 0
                return True
        return False
