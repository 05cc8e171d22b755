"""Format and size of an image file as its first bytes say, without a decoder: what a decoder answers is compared with it.

Written in Python alone, so a hostile file can give it wrong numbers but not take it over. Where a header is unusual (BigTIFF, an
AVIF sequence, a JPEG whose height comes after its pixels) the size is unknown, never guessed.
"""

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

Read = Callable[[int, int], bytes]
"""read(offset, length): these bytes of the file, or fewer at its end."""
Size = tuple[int, int]
"""Width and height in pixels."""

_MOST_STEPS = 2_000  # segments, boxes and tags of ordinary files: a few dozen


class Header(NamedTuple):
    """What a file says about itself."""

    format: str
    """As Pillow names it; empty if unknown. TGA files have no signature."""
    sizes: frozenset[Size]
    """The sizes that it names; empty if unknown. Some formats may name several."""


def read_header(read: Read) -> Header:
    """The header of a file. Raises nothing, whatever the file holds."""
    head = read(0, 32)
    for name, start, sizes in _FORMATS:
        if re.match(start, head, re.DOTALL):
            try:
                found = sizes(read)
            except (struct.error, IndexError):
                found = set()
            return Header(name, frozenset(size for size in found if min(size) > 0))
    return Header("", frozenset())


def _unpack(read: Read, code: str, offset: int) -> tuple[int, ...]:
    return struct.unpack(code, read(offset, struct.calcsize(code)))


def _jpeg(read: Read) -> set[Size]:
    found, at = set[Size](), 2
    for _ in range(_MOST_STEPS):
        mark, kind = _unpack(read, "BB", at)
        if mark != 0xFF or kind == 0xFF:
            at += 1
        elif kind in (0x00, 0x01, *range(0xD0, 0xD9)):  # without content
            at += 2
        elif kind in (0xD9, 0xDA):
            return found if all(map(min, found)) else set()  # a height of 0 is given after the pixels
        else:
            (length,) = _unpack(read, ">H", at + 2)
            if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
                height, width = _unpack(read, ">HH", at + 5)
                found.add((width, height))
            at += 2 + length
    return set()


def _png(read: Read) -> set[Size]:
    width, height = _unpack(read, ">II", 16)
    return {(width, height)} if read(12, 4) == b"IHDR" else set()


def _webp(read: Read) -> set[Size]:
    kind = read(12, 4)
    if kind == b"VP8X":
        low_w, high_w, low_h, high_h = _unpack(read, "<HBHB", 24)
        return {(1 + low_w + (high_w << 16), 1 + low_h + (high_h << 16))}
    if kind == b"VP8L":
        (bits,) = _unpack(read, "<I", 21)
        return {(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))}
    if kind == b"VP8 " and read(23, 3) == b"\x9d\x01\x2a":
        width, height = _unpack(read, "<HH", 26)
        return {(width & 0x3FFF, height & 0x3FFF)}
    return set()


def _bmp(read: Read) -> set[Size]:
    if _unpack(read, "<I", 14) == (12,):
        width, height = _unpack(read, "<HH", 18)
    else:
        width, height = _unpack(read, "<ii", 18)
    return {(width, abs(height))}


def _tiff(read: Read) -> set[Size]:
    order = "<" if read(0, 1) == b"I" else ">"
    version, at = _unpack(read, f"{order}HI", 2)
    (num_tags,) = _unpack(read, f"{order}H", at)
    found: dict[int, list[int]] = {256: [], 257: []}
    for tag_at in range(at + 2, at + 2 + 12 * min(num_tags, _MOST_STEPS), 12):
        tag, kind, count = _unpack(read, f"{order}HHI", tag_at)
        if tag in found:
            if count != 1 or kind not in (3, 4):
                return set()
            found[tag] += _unpack(read, order + ("H" if kind == 3 else "I"), tag_at + 8)
    if version != 42 or any(len(values) != 1 for values in found.values()):
        return set()
    return {(found[256][0], found[257][0])}


_PPM = re.compile(rb"P[1-6]\s+(\d{1,9})\s+(\d{1,9})\s")


def _ppm(read: Read) -> set[Size]:
    match = _PPM.match(re.sub(rb"#[^\r\n]*[\r\n]", b"", read(0, 1024)))
    return {(int(match[1]), int(match[2]))} if match else set()


def _jpeg2000(read: Read) -> set[Size]:
    if read(0, 4) == b"\xff\x4f\xff\x51":
        right, bottom, left, top = _unpack(read, ">IIII", 8)
        return {(right - left, bottom - top)}
    found = set[Size]()
    for at in _boxes(read, 12, (b"jp2h",), b"ihdr"):
        height, width = _unpack(read, ">II", at)
        found.add((width, height))
    return found


def _avif(read: Read) -> set[Size]:
    if read(8, 4) == b"avis":
        return set()
    found = set[Size]()
    for at in _boxes(read, 0, (b"meta", b"iprp", b"ipco"), b"ispe"):
        width, height = _unpack(read, ">II", at + 4)
        found.add((width, height))
    return found


def _boxes(read: Read, start: int, inside: tuple[bytes, ...], wanted: bytes) -> list[int]:
    """Where the contents of the boxes `wanted` start, which are in boxes `inside` each other (ISO 14496-12)."""
    found, at = list[int](), start
    inside = tuple(inside)
    for _ in range(_MOST_STEPS):
        head = read(at, 8)
        if len(head) < 8:
            break
        size, kind = struct.unpack(">I4s", head)
        if kind == wanted and not inside:
            found.append(at + 8)
        if inside and kind == inside[0]:
            inside, at = inside[1:], at + (12 if kind == b"meta" else 8)
        elif size < 8:  # to the end of the file, or of 64 bits: not in a header
            break
        else:
            at += size
    return found


def _pair(read: Read, code: str, offset: int) -> set[Size]:
    width, height = _unpack(read, code, offset)
    return {(width, height)}


def _pcx(read: Read) -> set[Size]:
    left, top, right, bottom = _unpack(read, "<HHHH", 4)
    return {(right + 1 - left, bottom + 1 - top)}


# GIF: frames may be larger than the screen that the header names, so the size is unknown.
_FORMATS: tuple[tuple[str, bytes, Callable[[Read], set[Size]]], ...] = (
    ("JPEG", rb"\xff\xd8\xff", _jpeg),
    ("PNG", rb"\x89PNG\r\n\x1a\n", _png),
    ("GIF", rb"GIF8[79]a", lambda read: set()),
    ("WEBP", rb"RIFF....WEBP", _webp),
    ("BMP", rb"BM", _bmp),
    ("TIFF", rb"II[*+]\0|MM\0[*+]|II\0\*|MM\*\0", _tiff),
    ("PPM", rb"P[0-6fyPF]", _ppm),
    ("JPEG2000", rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n", _jpeg2000),
    ("AVIF", rb"....ftyp", _avif),
    ("SGI", rb"\x01\xda", lambda read: _pair(read, ">HH", 6)),
    ("QOI", rb"qoif", lambda read: _pair(read, ">II", 4)),
    ("PCX", rb"\x0a[\0\x02\x03\x05][\0\x01]", _pcx),
)
