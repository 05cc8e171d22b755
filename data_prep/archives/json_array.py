"""Reads a JSON array element by element, of any number of elements."""

import codecs
import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

_PIECE_BYTES = 1 << 16
_MAX_ITEM_CHARS = 16 << 20
_AT_A_NUMBERS_END = len("e+")  # a number may continue if fewer characters follow it


def array_elements(file: BinaryIO, max_chars: int) -> Iterator[str]:
    """The text of every element. Raises ValueError where the file is no array, ends inside it, or has an element of more than about
    `max_chars`, after the elements before."""
    text = _Text(file.read, max_chars)
    for _, element in text.array():
        yield element
    if mark := text.next_mark():
        raise text.error(f"{mark!r} stands behind the array")


def json_items(pieces: Iterator[bytes], name: str) -> Iterator[Any]:
    """The items of the array named `name` in the JSON object in `pieces`, one at a time. All pieces are read, because a checksum may
    be compared at the end. Raises ValueError as `array_elements`, with at most 16 Mi characters per item."""
    filled = filter(None, pieces)
    text = _Text(lambda _: next(filled, b""), _MAX_ITEM_CHARS)
    text.expect("{")
    while text.value()[0] != name:
        text.expect(":")
        text.value()
        if text.next_mark() == "}":
            raise ValueError(f"there is no array {name!r}")
        text.expect(",")
    text.expect(":")
    for item, _ in text.array():
        yield item
    for _ in pieces:
        pass


class _Text:
    """JSON text that is read in pieces; memory holds one value and one piece."""

    def __init__(self, read: Callable[[int], bytes], max_chars: int) -> None:
        """`read` returns about as many bytes as it is asked for, and none at the end."""
        self._more, self._max_chars = read, max_chars
        self._decoder, self._scan = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
        self._text, self._at, self._before, self._ended = "", 0, 0, False

    def error(self, what: str) -> ValueError:
        return ValueError(f"character {self._before + self._at:,}: {what}")

    def next_mark(self) -> str:
        """The next character that is not blank, which stays; empty at the end."""
        while True:
            while self._text[self._at : self._at + 1] in tuple(" \t\r\n"):
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def expect(self, mark: str) -> None:
        """Goes behind this character. Raises ValueError for another."""
        if (found := self.next_mark()) != mark:
            raise self.error(f"{mark!r} is expected, found {found!r}")
        self._at += 1

    def array(self) -> Iterator[tuple[Any, str]]:
        """Value and text of every element of the array that begins here."""
        self.expect("[")
        mark = self.next_mark()
        while mark != "]":
            yield self.value()
            mark = self.next_mark()
            if mark == ",":
                self.expect(",")
                if self.next_mark() == "]":
                    raise self.error("a comma stands before the end of the array")
            elif mark != "]":
                behind = f"{mark!r} stands behind an element, where ',' or ']' is expected"
                raise self.error(behind if mark else "the array has no end")
        self.expect("]")

    def value(self) -> tuple[Any, str]:
        """The JSON value that begins here, and its text."""
        self.next_mark()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except RecursionError:
                raise self.error("an element is nested too deeply") from None
            except ValueError as error:
                if self._ended or len(self._text) - self._at > self._max_chars:
                    reason = str(error).partition(":")[0]
                    raise self.error(f"an element is not JSON, or too long: {reason}") from None
            else:
                complete = isinstance(value, str | list | dict) or len(self._text) - end > _AT_A_NUMBERS_END
                if complete or self._ended:
                    text, self._at = self._text[self._at : end], end
                    return value, text
            self._read()

    def _read(self) -> None:
        data = self._more(max(_PIECE_BYTES, len(self._text) - self._at))  # twice as much, for a long element
        self._before += self._at
        self._text, self._at, self._ended = self._text[self._at :] + self._decoder.decode(data, not data), 0, not data
