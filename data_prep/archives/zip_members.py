"""Members of a zip (APPNOTE 6.3.10): the directory is read first, then the members in the order of their bytes."""

import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from vitline.data_prep.archives.archive_bytes import WINDOW_BYTES, RangeReader
from vitline.data_prep.archives.archive_members import CorruptArchive, Member, checked_path
from vitline.infra.storage import Store

_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")  # 4.3.12
_LOCAL = struct.Struct("<4s22xHH")  # 4.3.7
_END = struct.Struct("<4sHHHHIIH")  # 4.3.16
_END64 = struct.Struct("<4s12xIIQQQQ")  # 4.3.14: disks, entries here and in all, size and offset of the directory
_LOCATOR64 = struct.Struct("<4sIQI")  # 4.3.15
_IN_64_BITS = 0xFFFFFFFF
_MAX_LINK_BYTES = 4096
_ENTRIES_SORTED_AT_ONCE = 4096
_UNLIKE_DIRECTORY = "size or checksum differ from the directory"


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """An entry of the directory: the member, and where and how its bytes are stored."""

    member: Member
    name: bytes
    start: int
    packed_size: int
    deflated: bool
    crc: int

    @property
    def claimed(self) -> int:
        """Bytes of the archive that the entry occupies at least."""
        return _LOCAL.size + len(self.name) + self.packed_size


class ZipDirectory:
    """The directory of a zip archive. Raises CorruptArchive if there is none."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self.archive = store, key, store.uri_of(key)
        size = store.size(key)
        tail_at = max(0, size - 65_535 - _END.size - _LOCATOR64.size)
        tail = store.read_all_of(key, tail_at, size)
        at = tail.rfind(b"PK\5\6")
        if at < 0 or len(tail) - at < _END.size:
            raise CorruptArchive(self.archive, size, "no zip directory at the end: the file is truncated or not a zip")
        _, disk, first_disk, _, num, length, offset, _ = _END.unpack_from(tail, at)
        end = tail_at + at
        if _IN_64_BITS in (length, offset) or num == 0xFFFF:
            end, disk, first_disk, num, length, offset = self._end_64(
                tail, at, end, (disk, first_disk, num, length, offset)
            )
        self.begin, self.end, self.num_entries = end - length, end, num
        self._shift = self.begin - offset  # above 0 if data precedes the archive, such as a self-extracting program
        if disk or first_disk or self.begin < 0 or self._shift < 0:
            raise CorruptArchive(self.archive, end, "the zip directory is outside of the archive or on another volume")
        self._link_source = RangeReader(store, key, 0, self.begin)

    def _end_64(self, tail: bytes, at: int, end: int, plain: tuple[int, ...]) -> tuple[int, ...]:
        """End of the directory (start of the zip64 record), and the content of the record."""
        if at < _LOCATOR64.size or tail[at - _LOCATOR64.size : at - _LOCATOR64.size + 4] != b"PK\6\7":
            return end, *plain
        stated = _LOCATOR64.unpack_from(tail, at - _LOCATOR64.size)[2]
        for position in (stated, end - _LOCATOR64.size - _END64.size):
            record = self._store.read(self._key, position, position + _END64.size) if position <= end else b""
            if len(record) == _END64.size and record[:4] == b"PK\6\6":
                _, disk, first_disk, _, num, length, offset = _END64.unpack(record)
                return position, disk, first_disk, num, length, offset
        raise CorruptArchive(self.archive, end, "the zip64 record is missing")

    def entries(self, start: int = 0, end: int | None = None) -> Iterator[ZipEntry]:
        """Entries whose position in the archive is in [start, end), by default all. Raises CorruptArchive."""
        first, last = max(self.begin, start), self.end if end is None else min(self.end, end)
        source, number, claimed = RangeReader(self._store, self._key, first, last), 0, 0
        while source.position < last:
            entry = self._next_entry(source)
            number, claimed = number + 1, claimed + (0 if entry.member.refused else entry.claimed)
            if claimed > self.begin:
                what = f"entries overlap: they claim {claimed:,} bytes of {self.begin:,}"
                raise CorruptArchive(self.archive, entry.member.header, what)
            yield entry
        if first == self.begin and last == self.end and (number - self.num_entries) % 65_536:
            what = f"the directory has {number:,} entries, but states {self.num_entries:,}"
            raise CorruptArchive(self.archive, last, what)

    def _next_entry(self, source: RangeReader) -> ZipEntry:
        at = source.position
        fixed = source.take(_ENTRY.size)
        if len(fixed) < _ENTRY.size or fixed[:4] != b"PK\1\2":
            raise CorruptArchive(self.archive, at, "invalid entry in the zip directory")
        _, made, _, flags, method, _, _, crc, packed, size, n, e, c, _, _, attributes, start = _ENTRY.unpack(fixed)
        rest = source.take(n + e + c)
        if len(rest) < n + e + c:
            raise CorruptArchive(self.archive, at, "the zip directory ends inside an entry")
        name, extra = rest[:n], _extra_fields(rest[n : n + e])
        wide = iter(_wide_numbers(extra.get(1, b"")))
        size, packed, start = (next(wide, _IN_64_BITS) if v == _IN_64_BITS else v for v in (size, packed, start))
        text = _zip_name(name, flags, extra)
        if "\\" in text and text.encode(errors="surrogateescape") == name and (made >> 8 != 3 or "/" not in text):
            text = text.replace(
                "\\", "/"
            )  # .NET on Windows, and old PowerShell; in a code page the byte may be half of a letter
        path, refused = checked_path(text)
        mode = attributes >> 16 if made >> 8 == 3 else 0
        kind: Literal["file", "folder", "link"] = "file"
        if text.endswith("/"):
            kind = "folder"
        elif stat.S_ISLNK(mode):
            kind = "link"
        elif not refused and not path:
            refused = ("unsafe_path", "the member has no name")
        elif not refused and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            refused = ("ignored_file", "a device or pipe")
        if not refused and kind != "folder":
            refused = self._refused(flags, method, self._shift + start + _LOCAL.size + n + packed)
        member = Member(path, size, None, kind, None, refused, at)
        entry = ZipEntry(member, name, self._shift + start, packed, method == 8, crc)
        return self._with_target(entry) if kind == "link" and not refused else entry

    def _refused(self, flags: int, method: int, end: int) -> tuple[str, str] | None:
        if flags & 0x2041:
            return "unreadable", "encrypted"
        if method not in (0, 8):
            return (
                "unreadable",
                f"unsupported zip compression method {method}; supported: stored and deflated members",
            )
        if end > self.begin:
            return (
                "damaged_archive",
                f"the member claims bytes up to {end:,}, but the zip directory begins at {self.begin:,}",
            )
        return None

    def _with_target(self, entry: ZipEntry) -> ZipEntry:
        member, data = self.read(entry, self._link_source, _MAX_LINK_BYTES)
        if data is not None and len(data) > _MAX_LINK_BYTES:
            member, data = replace(member, refused=("damaged_archive", "the target of the link is too long")), None
        target = None if data is None else data.decode(errors="replace")
        return replace(entry, member=replace(member, target=target, offset=None))

    def read(self, entry: ZipEntry, source: RangeReader, max_bytes: int) -> tuple[Member, bytes | None]:
        """The member with its offset (if stored plainly) and its first `max_bytes` + 1 bytes; or refused."""
        if refused := self._go_to(entry, source):
            return replace(entry.member, refused=refused), None
        offset = source.position
        try:
            data = b"".join(_unpacked(entry, source, max_bytes + 1))
        except zlib.error as error:
            return replace(entry.member, refused=("damaged_archive", f"deflated data: {error}")), None
        if len(data) <= max_bytes and (len(data) != entry.member.size or zlib.crc32(data) != entry.crc):
            return replace(entry.member, refused=("damaged_archive", _UNLIKE_DIRECTORY)), None
        return replace(entry.member, offset=None if entry.deflated else offset), data

    def pieces(self, entry: ZipEntry) -> Iterator[bytes]:
        """All bytes of a member in order, some MiB at a time. Raises CorruptArchive if they contradict the directory; a wrong
        size or checksum is detected after the last piece."""
        source, size, crc = RangeReader(self._store, self._key, 0, self.begin), 0, 0
        if refused := entry.member.refused or self._go_to(entry, source):
            raise CorruptArchive(self.archive, entry.start, f"{entry.member.path}: {refused[1]}")
        try:
            for piece in _unpacked(entry, source, entry.member.size + 1):
                size, crc = size + len(piece), zlib.crc32(piece, crc)
                yield piece
        except zlib.error as error:
            raise CorruptArchive(self.archive, entry.start, f"{entry.member.path}: deflated data: {error}") from error
        if (size, crc) != (entry.member.size, entry.crc):
            raise CorruptArchive(self.archive, entry.start, f"{entry.member.path}: {_UNLIKE_DIRECTORY}")

    def _go_to(self, entry: ZipEntry, source: RangeReader) -> tuple[str, str] | None:
        """Move the source to the first byte of the member, or return the reason why there is none."""
        source.skip_to(entry.start)
        fixed = source.take(_LOCAL.size)
        if len(fixed) < _LOCAL.size or fixed[:4] != b"PK\3\4":
            return "damaged_archive", f"there is no zip member at byte {entry.start:,}"
        _, name_length, extra_length = _LOCAL.unpack(fixed)
        if source.take(name_length) != entry.name:
            return "damaged_archive", "the name differs from the zip directory"
        source.skip_to(source.position + extra_length)
        if source.position + entry.packed_size > self.begin:
            return "damaged_archive", "the member claims more bytes than the archive has"
        return None


def read_zip(
    store: Store, key: str, max_bytes: int, start: int, end: int | None, wanted: Callable[[Member], bool]
) -> Iterator[tuple[Member, bytes | None]]:
    """Members whose entries are in [start, end), with bytes as in `read_tar`. Raises CorruptArchive."""
    archive = ZipDirectory(store, key)
    source = RangeReader(store, key, 0, archive.begin)
    for batch in _batches(archive.entries(start, end), _ENTRIES_SORTED_AT_ONCE):
        free_from = 0
        for entry in sorted(batch, key=lambda entry: (entry.start, entry.member.header)):
            member, data = entry.member, None
            if member.kind == "file" and not member.refused:
                if entry.start < free_from:
                    member = replace(member, refused=("damaged_archive", "the member overlaps another zip member"))
                elif wanted(member):
                    member, data = archive.read(entry, source, max_bytes)
                free_from = max(free_from, entry.start + entry.claimed)
            yield member, data


def _batches(entries: Iterator[ZipEntry], size: int) -> Iterator[list[ZipEntry]]:
    """Lists of `size` entries; damage is raised after all entries before it."""
    batch: list[ZipEntry] = []
    try:
        for entry in entries:
            batch.append(entry)
            if len(batch) == size:
                yield batch
                batch = []
    except CorruptArchive:
        yield batch
        raise
    yield batch


def _unpacked(entry: ZipEntry, source: RangeReader, at_most: int) -> Iterator[bytes]:
    """The first bytes of a member; the source must be at its first byte. Raises zlib.error."""
    packed = _packed(source, entry.packed_size if entry.deflated else min(entry.packed_size, at_most))
    yield from _inflated(packed, at_most) if entry.deflated else packed


def _packed(source: RangeReader, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := source.take(min(size, WINDOW_BYTES))):
        size -= len(piece)
        yield piece


def _inflated(packed: Iterator[bytes], at_most: int) -> Iterator[bytes]:
    inflate, waiting = zlib.decompressobj(-15), b""
    while at_most > 0 and not inflate.eof:
        waiting = waiting or next(packed, b"")
        piece = inflate.decompress(waiting, min(at_most, WINDOW_BYTES))
        if not waiting and not piece:  # truncated
            return
        waiting, at_most = inflate.unconsumed_tail, at_most - len(piece)
        if piece:
            yield piece


def _extra_fields(data: bytes) -> dict[int, bytes]:
    """Extra fields by their id (4.5.1); a field that does not fit is left out."""
    found, position = dict[int, bytes](), 0
    while position + 4 <= len(data):
        key, length = struct.unpack_from("<HH", data, position)
        found.setdefault(key, data[position + 4 : position + 4 + length])
        position += 4 + length
    return found


def _wide_numbers(data: bytes) -> tuple[int, ...]:
    return struct.unpack_from(f"<{min(3, len(data) // 8)}Q", data)


def _zip_name(name: bytes, flags: int, extra: dict[int, bytes]) -> str:
    """The name: Unicode from an extra field of Info-ZIP (4.6.9), or UTF-8 if valid (macOS does not set the flag)."""
    unicode_name = extra.get(0x7075, b"")
    if unicode_name[:1] == b"\1" and unicode_name[1:5] == struct.pack("<I", zlib.crc32(name)):
        name, flags = unicode_name[5:], 0x800
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode(errors="surrogateescape") if flags & 0x800 else name.decode("cp437")
