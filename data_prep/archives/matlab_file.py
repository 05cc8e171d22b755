"""Reads MATLAB 5 files without MATLAB or scipy, after MathWorks' "MAT-File Format", level 5."""

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_MAT_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
_CELL, _STRUCT, _CHAR = 1, 2, 4
_NUMERIC_CLASSES = range(6, 16)
_MAX_DEPTH, _MAX_MAT_BYTES = 8, 256 << 20
_STEP_BYTES = 1 << 20


def read_mat(data: bytes) -> dict[str, Any]:
    """Variables of a MATLAB 5 file by name: struct arrays as lists of dicts and cells as lists, in column order; numbers as
    flat arrays; text as str; None for other classes. Raises ValueError.

    Memory is bounded: numbers are views of the file, or of one decompressed variable.
    """
    if len(data) < _MAT_HEADER_BYTES or data[126:128] not in (b"IM", b"MI"):
        raise ValueError("not a MATLAB 5 file (the newer version 7.3 is HDF5).")
    reader = _MatReader("<" if data[126:128] == b"IM" else ">")
    found: dict[str, Any] = {}
    try:
        for kind, body in reader.elements(memoryview(data), _MAT_HEADER_BYTES):
            if kind == _COMPRESSED:
                kind, body = next(reader.elements(_inflated(body), 0), (0, memoryview(b"")))
            if kind == _MATRIX:
                name, value = reader.matrix(body, 0)
                found[name] = value
    except (ValueError, ArithmeticError, LookupError, StopIteration, struct.error, zlib.error) as error:
        raise ValueError(f"a damaged MATLAB file: {error or 'it is truncated'}.") from error
    return found


def _inflated(body: memoryview) -> memoryview:
    """Decompressed into one buffer: zlib's own result would be in memory twice while it is assembled."""
    inflate, found = zlib.decompressobj(), bytearray()
    for start in range(0, len(body), _STEP_BYTES):
        found += inflate.decompress(body[start : start + _STEP_BYTES], _MAX_MAT_BYTES - len(found) + 1)
        if len(found) > _MAX_MAT_BYTES:
            raise ValueError(f"a variable has more than {_MAX_MAT_BYTES:,} bytes")
        if inflate.eof:
            break
    if not inflate.eof:
        raise ValueError("a variable is truncated")
    return memoryview(found)


class _MatReader:
    """Data elements of one byte order."""

    def __init__(self, order: str) -> None:
        self._order = order

    def elements(self, data: memoryview, position: int) -> Iterator[tuple[int, memoryview]]:
        """(type, bytes) of consecutive elements."""
        while position + 8 <= len(data):
            kind, length = struct.unpack_from(self._order + "II", data, position)
            start = position + 8
            end = start + (length if kind == _COMPRESSED else -(-length // 8) * 8)
            if kind >> 16:  # small format: length and type in one word, up to four bytes in the next
                kind, length, start, end = kind & 0xFFFF, min(4, kind >> 16), position + 4, position + 8
            if start + length > len(data):
                raise ValueError(
                    f"the element at byte {position:,} has {length:,} bytes, but only {len(data) - start:,} are left"
                )
            yield kind, data[start : start + length]
            position = end

    def matrix(self, body: memoryview, depth: int) -> tuple[str, Any]:
        """Name and value of a matrix element."""
        if not body:
            return "", np.zeros(0)
        if depth > _MAX_DEPTH:
            raise ValueError("structs are nested too deeply")
        parts = self.elements(body, 0)
        flags, shape, name = next(parts)[1], self._numbers(*next(parts)), bytes(next(parts)[1]).decode("latin-1")
        array_class, count = struct.unpack_from(self._order + "I", flags)[0] & 0xFF, math.prod(int(n) for n in shape)
        if array_class == _STRUCT:
            return name, self._structs(parts, count, depth)
        if array_class == _CELL:
            return name, [self._value(element, depth) for element in parts]
        if array_class == _CHAR:
            kind, text = next(parts)
            return name, bytes(text).decode(self._codec(kind), errors="replace")
        if array_class in _NUMERIC_CLASSES:
            return name, self._numbers(*next(parts))
        return name, None

    def _structs(self, parts: Iterator[tuple[int, memoryview]], count: int, depth: int) -> list[dict[str, Any]]:
        length = int(self._numbers(*next(parts))[0])
        names = bytes(next(parts)[1])
        if length < 1:
            raise ValueError("field names have no length")
        fields = [names[i : i + length].split(b"\0")[0].decode("latin-1") for i in range(0, len(names), length)]
        rest = list(parts)
        if count * len(fields) != len(rest):
            raise ValueError(f"{count:,} structs of {len(fields)} fields, but {len(rest):,} values")
        values = iter(rest)
        return [{field: self._value(next(values), depth) for field in fields} for _ in range(count if fields else 0)]

    def _value(self, element: tuple[int, memoryview], depth: int) -> Any:
        kind, body = element
        if kind != _MATRIX:
            raise ValueError(f"a value has type {kind}, but a matrix is expected")
        return self.matrix(body, depth + 1)[1]

    def _numbers(self, kind: int, body: memoryview) -> np.ndarray:
        return np.frombuffer(body, self._order + _NUMBERS[kind])

    def _codec(self, kind: int) -> str:
        codec = _TEXTS[kind]
        return codec if codec in ("latin-1", "utf-8") else f"{codec}-{'le' if self._order == '<' else 'be'}"
