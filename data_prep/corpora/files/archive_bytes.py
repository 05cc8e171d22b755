"""The bytes of an archive in order, from a range of an object, from gzip, or from a member of another archive."""

import zlib

from data_prep.corpora.files.archive_members import ArchiveDamaged, Member
from infra.storage import Store

WINDOW_BYTES = 4 << 20
"""Most that is read at once where bytes follow each other."""

_HEADER_WINDOW_BYTES = 4096
# Reading on is faster than a new request over a gap of about latency x throughput: 1 MiB of S3, less of a disk.
_NEAR_BYTES, _NEAR_BYTES_ON_DISK = 1 << 20, 1 << 16
# Deflate can expand 1,032-fold. Tars of tiny pictures, mostly padding, come to some 50-fold.
_MAX_EXPANSION, _FREE_EXPANSION_BYTES = 250, 1 << 30
_PACKED_BYTES = 1 << 16  # zlib copies what it has not yet used of its input at every call


class Ranges:
    """Bytes [start, end) of an object, read in windows. Skipped bytes are not read where that pays."""

    ranged = True  # positions are those of the object

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
            more = self._store.read(self._key, at, min(self.end, max(at + window, self.position + count)))
            self._buffer, self._buffered_from = kept + more if kept else more, self.position
        begin = self.position - self._buffered_from
        data = self._buffer[begin : begin + count]
        self.position = self._taken_to = self.position + len(data)
        return data

    def skip_to(self, position: int) -> None:
        self.position = position

    def bytes_after(self, position: int) -> int | None:
        """How many bytes there are from `position` on; none: unknown."""
        return self.end - position

    def _holds(self, position: int) -> bool:
        return self._buffered_from <= position < self._buffered_from + len(self._buffer)


class Gunzipped:
    """The decompressed bytes of a gzip object of one or several gzip members."""

    ranged = False

    def __init__(self, store: Store, key: str) -> None:
        self._packed = Ranges(store, key)
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

    def bytes_after(self, position: int) -> int | None:
        return None

    def _piece(self, at_most: int) -> bytes:
        """Some bytes, at least one; none at the end. Raises ArchiveDamaged."""
        while True:
            if self._gunzip.eof:  # several gzip files end to end are one, and padding may follow
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
            raise ArchiveDamaged(self.archive, at, f"no gzip data: {error}") from error
        self._begun, self._waiting = True, self._gunzip.unconsumed_tail
        self.position += len(piece)
        if not packed and not piece and not self._gunzip.eof:
            raise ArchiveDamaged(self.archive, at, "the gzip data are cut off")
        if self.position > _FREE_EXPANSION_BYTES + _MAX_EXPANSION * self._packed.position:
            raise ArchiveDamaged(self.archive, at, f"expands more than {_MAX_EXPANSION}-fold")
        return piece


class Inside:
    """The bytes of a member, of which an archive source stands at the first, as an archive of their own."""

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

    def bytes_after(self, position: int) -> int | None:
        return self._end - position


Source = Ranges | Gunzipped | Inside
