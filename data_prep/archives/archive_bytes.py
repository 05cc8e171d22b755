"""Sequential bytes of an archive: from a range of an object, from gzip, or from a member of another archive."""

import zlib

from vitline.data_prep.archives.archive_members import CorruptArchive, Member
from vitline.infra.storage import Store

WINDOW_BYTES = 4 << 20
"""Largest read of consecutive bytes."""

_HEADER_WINDOW_BYTES = 4096
# Reading across a gap is faster than a new request if the gap is below latency x throughput: 1 MiB on S3, less on a disk.
_NEAR_BYTES, _NEAR_BYTES_ON_DISK = 1 << 20, 1 << 16
# Deflate can expand up to 1,032-fold. Tars of tiny images are mostly padding and reach about 50-fold.
_MAX_EXPANSION, _FREE_EXPANSION_BYTES = 250, 1 << 30
_PACKED_BYTES = 1 << 16  # zlib copies unused input at every call


class RangeReader:
    """Bytes [start, end) of an object, read in windows. Skipped bytes are not read if that saves time."""

    ranged = True  # positions are positions in the object

    def __init__(self, store: Store, key: str, start: int = 0, end: int | None = None) -> None:
        size = store.size(key)
        self.end: int = size if end is None else min(end, size)
        self.archive, self.position, self._taken_to = store.uri_of(key), start, start
        self._store, self._key, self._buffer, self._buffered_from = store, key, b"", start
        self._near = _NEAR_BYTES_ON_DISK if store.uri.startswith("file:") else _NEAR_BYTES

    def take(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the end."""
        count = max(0, min(count, self.end - self.position))
        buffered_to = self._buffered_from + len(self._buffer)
        if self.position < self._buffered_from or self.position + count > buffered_to:
            kept = self._buffer[self.position - self._buffered_from :] if self._holds(self.position) else b""
            window = WINDOW_BYTES if 0 <= self.position - self._taken_to <= self._near else _HEADER_WINDOW_BYTES
            at = self.position + len(kept)
            wanted_to = min(self.end, max(at + window, self.position + count))
            more = self._store.read_all_of(self._key, at, wanted_to) if wanted_to > at else b""
            self._buffer, self._buffered_from = kept + more if kept else more, self.position
        begin = self.position - self._buffered_from
        data = self._buffer[begin : begin + count]
        self.position = self._taken_to = self.position + len(data)
        return data

    def skip_to(self, position: int) -> None:
        self.position = position

    def remaining(self, position: int) -> int | None:
        """Number of bytes from `position` to the end; None if unknown."""
        return self.end - position

    def _holds(self, position: int) -> bool:
        return self._buffered_from <= position < self._buffered_from + len(self._buffer)


class Gunzipped:
    """The decompressed bytes of a gzip object, which may consist of several gzip members."""

    ranged = False

    def __init__(self, store: Store, key: str) -> None:
        self._packed = RangeReader(store, key)
        self.archive, self.position = self._packed.archive, 0
        self._gunzip = zlib.decompressobj(wbits=31)
        self._waiting, self._begun = b"", False

    def take(self, count: int) -> bytes:
        pieces = []
        while count > 0 and (piece := self._piece(min(count, WINDOW_BYTES))):
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def skip_to(self, position: int) -> None:
        while self.position < position and self._piece(min(position - self.position, WINDOW_BYTES)):
            pass

    def remaining(self, position: int) -> int | None:
        return None

    def _piece(self, at_most: int) -> bytes:
        """At least one byte; empty at the end. Raises CorruptArchive."""
        while True:
            if self._gunzip.eof:  # concatenated gzip files are valid, and padding may follow
                self._waiting, self._gunzip, self._begun = self._gunzip.unused_data, zlib.decompressobj(wbits=31), False
            self._waiting = self._waiting or self._packed.take(_PACKED_BYTES)
            if not self._begun and self.position:
                self._waiting = self._waiting.lstrip(b"\0")
                if not self._waiting and self._packed.position < self._packed.end:
                    continue
            if not self._waiting and not self._begun:
                return b""
            piece = self._inflate(at_most)
            if piece:
                return piece

    def _inflate(self, at_most: int) -> bytes:
        at, packed = self._packed.position - len(self._waiting), self._waiting
        try:
            piece = self._gunzip.decompress(packed, at_most)
        except zlib.error as error:
            raise CorruptArchive(self.archive, at, f"invalid gzip data: {error}") from error
        self._begun, self._waiting = True, self._gunzip.unconsumed_tail
        self.position += len(piece)
        if not packed and not piece and not self._gunzip.eof:
            raise CorruptArchive(self.archive, at, "the gzip data is truncated")
        if self.position > _FREE_EXPANSION_BYTES + _MAX_EXPANSION * self._packed.position:
            raise CorruptArchive(self.archive, at, f"the data expands more than {_MAX_EXPANSION}-fold")
        return piece


class NestedArchive:
    """The bytes of a member as an archive of its own; the source must be at the first byte of the member."""

    def __init__(self, source: "Source", member: Member) -> None:
        self.archive: str = f"{source.archive}!{member.path}"
        self.ranged: bool = source.ranged
        self._source, self._end = source, source.position + member.size

    @property
    def position(self) -> int:
        return self._source.position

    def take(self, count: int) -> bytes:
        return self._source.take(max(0, min(count, self._end - self.position)))

    def skip_to(self, position: int) -> None:
        self._source.skip_to(min(position, self._end))

    def remaining(self, position: int) -> int | None:
        return self._end - position


Source = RangeReader | Gunzipped | NestedArchive
