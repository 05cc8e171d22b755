"""Reads a JSON array element by element, of any number of elements."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

_PIECE_BYTES = 1 << 16
_BLANK = re.compile(r"[ \t\r\n]*")


def array_elements(file: BinaryIO, max_chars: int) -> Iterator[str]:
    """The text of every element. Raises ValueError where the file is no array, ends inside it, or has an element of more than about
    `max_chars`, after the elements before."""
    text = _Text(file, max_chars)
    text.expect("[")
    mark = text.next_mark()
    while mark != "]":
        yield text.element()
        mark = text.next_mark()
        if mark == ",":
            text.expect(",")
            if text.next_mark() == "]":
                raise ValueError("a comma stands before the end of the array")
        elif mark != "]":
            raise ValueError(
                f"{mark!r} stands behind an element, where ',' or ']' is expected" if mark else "the array has no end"
            )
    text.expect("]")
    if mark := text.next_mark():
        raise ValueError(f"{mark!r} stands behind the array")


class _Text:
    """The decoded text from a position on; it reads further as needed."""

    def __init__(self, file: BinaryIO, max_chars: int) -> None:
        self._file, self._max_chars = file, max_chars
        self._decoder, self._scan = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False

    def next_mark(self) -> str:
        """The next character that is not blank, which stays; empty at the end."""
        while True:
            if match := _BLANK.match(self._text, self._at):
                self._at = match.end()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def expect(self, mark: str) -> None:
        """Goes behind this character. Raises ValueError for another."""
        if (found := self.next_mark()) != mark:
            raise ValueError(f"{mark!r} is expected, found {found!r}")
        self._at += 1

    def element(self) -> str:
        """The text of the JSON value that begins here."""
        while True:
            try:
                _, end = self._scan(self._text, self._at)
            except RecursionError:
                raise ValueError("an element is nested too deeply") from None
            except ValueError as error:
                if self._ended or len(self._text) - self._at > self._max_chars:
                    raise ValueError(f"an element is not JSON, or too long: {str(error).partition(':')[0]}") from None
            else:
                if end < len(self._text) or self._ended:  # a number may go on
                    element, self._at = self._text[self._at : end], end
                    return element
            self._read()

    def _read(self) -> None:
        data = self._file.read(max(_PIECE_BYTES, len(self._text) - self._at))  # twice as much, for a long element
        self._text, self._at, self._ended = self._text[self._at :] + self._decoder.decode(data, not data), 0, not data
