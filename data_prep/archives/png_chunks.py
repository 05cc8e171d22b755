"""The chunks of a PNG file: those that hold no pixels are left out for the decoder, and checksums are compared."""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXTS = frozenset((b"tEXt", b"zTXt", b"iTXt", b"iCCP"))
_WITH_ORIENTATION = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0")


class _Chunk(NamedTuple):
    kind: bytes
    start: int
    """Of its length, which stands before the kind; the checksum stands in the 4 bytes before `end`."""
    end: int


def _chunks(data: bytes) -> Iterator[_Chunk]:
    """The complete chunks, up to IEND; none if this is no PNG."""
    at, kind = len(_SIGNATURE), b""
    while data.startswith(_SIGNATURE) and kind != b"IEND" and at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if at + 12 + length > len(data):
            return
        yield _Chunk(kind, at, at + 12 + length)
        at += 12 + length


def without_texts(data: bytes) -> bytes:
    """A file without its texts and colour profile, except those that may hold an orientation; other files as they are.

    Pillow unpacks each of them and refuses the file if one has more than 1 MiB, though an intact file may. None is used.
    """
    left_out = [
        chunk
        for chunk in _chunks(data)
        if chunk.kind in _TEXTS and not data.startswith(_WITH_ORIENTATION, chunk.start + 8)
    ]
    if not left_out:
        return data
    starts = [0, *(chunk.end for chunk in left_out)]
    ends = [*(chunk.start for chunk in left_out), len(data)]
    view = memoryview(data)
    return b"".join(view[start:end] for start, end in zip(starts, ends, strict=True))


def wrong_checksum(data: bytes) -> str | None:
    """Which chunk differs from its CRC, in words; None if all agree. Pillow compares only those before the pixels."""
    view = memoryview(data)
    for kind, start, end in _chunks(data):
        if zlib.crc32(view[start + 4 : end - 4]) != int.from_bytes(view[end - 4 : end]):
            return f"the PNG chunk {kind.decode('latin-1')} at byte {start:,} does not match its checksum"
    return None
