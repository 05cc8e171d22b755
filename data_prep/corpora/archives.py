"""Members of tar, tar.gz and zip archives in a store, streamed. Nothing is unpacked to disk.

What an archive claims is not believed: sizes are compared with the bytes that are there, headers and members are read
up to limits, and a path that could lead out of a folder is refused before its bytes are read. Damage ends an archive
with one refused member that names archive and byte; every member before it is given. Memory: a window of the archive
and one member.

- `index` gives members without their bytes, for planning; `stretches` cuts what it gives into pieces for workers.
- `read_members` gives members with their bytes: of a whole archive, of a stretch, or of a tar inside a tar.
"""

import posixpath
import re
import stat
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from infra.storage import Store

ArchiveKind = Literal["tar", "tar.gz", "zip"]
MAX_HEADER_BYTES = 1 << 20
"""Longest name or pax header that is read. A longer one is damage."""

_ENDINGS: tuple[tuple[str, ArchiveKind], ...] = (
    (".tar", "tar"),
    (".tar.gz", "tar.gz"),
    (".tgz", "tar.gz"),
    (".zip", "zip"),
)
_WINDOW_BYTES, _HEADER_WINDOW_BYTES = 4 << 20, 4096
# Reading on is faster than a new request over a gap of about latency x throughput: 1 MiB of S3, less of a disk.
_NEAR_BYTES, _NEAR_BYTES_ON_DISK = 1 << 20, 1 << 16
_LONGEST_PATH = 4096
_REMEMBERED_NAMES = 1 << 17
# Deflate can expand 1,032-fold. Tars of tiny pictures, mostly padding, come to some 50-fold.
_MAX_EXPANSION, _FREE_EXPANSION_BYTES = 250, 1 << 30
_PACKED_BYTES = 1 << 16  # zlib copies what it has not yet used of its input at every call


class ArchiveDamaged(ValueError):
    """The archive cannot be read on from `byte`. Raised inside this module; callers get a refused member instead."""

    def __init__(self, archive: str, byte: int, what: str) -> None:
        super().__init__(f"{archive} at byte {byte:,}: {what}")
        self.byte = byte

    def as_member(self) -> "Member":
        path = f"(damaged at byte {self.byte})"
        return Member(path, kind="damage", refused=("damaged_archive", str(self)), header=self.byte)


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an archive. `refused` members have no bytes that anybody should read."""

    path: str
    """Valid Unicode, `/`-separated, without './'. Of a refused member it may hold anything."""
    size: int = 0
    """Bytes of the file, decompressed."""
    offset: int | None = None
    """Where the bytes stand in the archive as they are; none where they are compressed, or in `index` of a zip."""
    kind: Literal["file", "folder", "link", "hard_link", "other", "damage"] = "file"
    """Damage is no member but the end of what can be read; always refused."""
    target: str | None = None
    """What a link points to, as it is written; see `link_target`."""
    refused: tuple[str, str] | None = None
    """Reason (of `RejectReason`) and detail."""
    header: int = 0
    """Where its headers begin: in the tar, decompressed, or in the archive for an entry of a zip's directory."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring members of an archive: `read_members(..., start, end, whole)` reads exactly these."""

    start: int
    end: int | None
    """None: to the end of the archive."""
    whole: bool
    """Whether the mark of the archive's end belongs to it."""
    num_members: int
    """Without folders."""
    num_bytes: int
    """Of the files."""


def archive_kind(key: str) -> ArchiveKind | None:
    """What an archive is by its name; none: no archive that is read here."""
    return next((kind for ending, kind in _ENDINGS if key.lower().endswith(ending)), None)


def index(store: Store, key: str, start: int = 0, end: int | None = None, whole: bool = True) -> Iterator[Member]:
    """Every member in the order of the archive, without reading their bytes (those of a tar.gz pass by, unkept).

    `start` and `end` are those of a stretch, or of a tar inside a tar; `whole` as in Stretch. Damage comes as the last
    member. Raises FileNotFoundError and what the store raises, nothing else.
    """
    try:
        if archive_kind(key) == "zip":
            yield from (entry.member for entry in _Zip(store, key).entries(start, end))
        else:
            yield from _tar_members(_tar_source(store, key, start, end), whole)
    except ArchiveDamaged as error:
        yield error.as_member()


def stretches(
    members: Iterable[Member], members_each: int, start: int = 0, end: int | None = None
) -> Iterator[Stretch]:
    """Cut what `index` of a tar or zip gives into stretches of so many members, the last one shorter.

    There is always one, so that a worker meets the damage of an archive without members, too. `start` and `end` as
    given to `index`.
    """
    number, num_bytes = 0, 0
    for member in members:
        if member.kind == "damage":
            continue
        if number == members_each and member.kind != "folder":
            yield Stretch(start, member.header, False, number, num_bytes)
            start, number, num_bytes = member.header, 0, 0
        number, num_bytes = number + (member.kind != "folder"), num_bytes + member.size
    yield Stretch(start, end, True, number, num_bytes)


def read_members(
    store: Store,
    key: str,
    max_bytes: int,
    start: int = 0,
    end: int | None = None,
    whole: bool = True,
    wanted: Callable[[Member], bool] | None = None,
) -> Iterator[tuple[Member, bytes | None]]:
    """Members with their bytes; each byte of the archive is read once, in order, in windows of some MiB.

    Bytes are given of files that are `wanted` (all, if it is left out) and not refused. Of a file larger than
    `max_bytes` the first `max_bytes` + 1 are given. A second member of one name is refused. Zip entries come in the
    order of their bytes. Otherwise as `index`.
    """
    if archive_kind(key) == "zip":
        yield from _without_repeats(_read_zip(store, key, max_bytes, start, end, wanted or _everything))
    else:
        source = _tar_source(store, key, start, end)
        yield from _without_repeats(_read_tar(source, max_bytes, whole, wanted or _everything))


def read_tars_inside(
    store: Store,
    key: str,
    max_bytes: int,
    opened: Callable[[Member], bool],
    wanted: Callable[[Member], bool] | None = None,
) -> Iterator[tuple[Member, Member | None, bytes | None]]:
    """(member, none, none) for every member of a tar or tar.gz; behind one that is `opened`, as it is a tar itself,
    (member, member of it, its bytes). One level deep, whatever is inside. Otherwise as `read_members`.

    A tar that has a range of its own in an uncompressed one is read better by `read_members` with `start` and `end`.
    """
    source = _tar_source(store, key)
    try:
        for member in _tar_members(source, whole=True):
            yield member, None, None
            if member.kind == "file" and not member.refused and opened(member):
                inside = _Inside(source, member)
                for inner, data in _without_repeats(_read_tar(inside, max_bytes, True, wanted or _everything)):
                    yield member, inner, data
    except ArchiveDamaged as error:
        yield error.as_member(), None, None


def link_target(member: Member) -> str | None:
    """The path in the archive that a link points to; none where it leads out of the archive, or is no path."""
    if len(member.target or "") > _LONGEST_PATH:
        return None
    folder = "" if member.kind == "hard_link" else posixpath.dirname(member.path)
    path = posixpath.normpath(posixpath.join(folder, member.target or ""))
    return None if path.startswith(("/", "../")) or path in ("..", ".") or "\0" in path else path


def checked_path(name: str) -> tuple[str, tuple[str, str] | None]:
    """A name of an archive as a clean path, and why it is refused, if so: it is no text, or not below one folder."""
    readable = name.encode(errors="surrogateescape").decode(errors="replace")
    path = "/".join(part for part in readable.split("/") if part not in ("", "."))[:_LONGEST_PATH]
    if len(readable) > _LONGEST_PATH:
        return path, ("unsafe_path", f"a name of {len(readable):,} characters")
    if (
        readable.startswith("/")
        or "\\" in readable
        or "\0" in readable
        or ".." in readable.split("/")
        or re.match(r"[A-Za-z]:", readable)
    ):
        return readable, ("unsafe_path", f"{readable!r} could lead out of a folder")
    if readable != name:
        return path, ("unreadable", "the name is not UTF-8")
    return path, None


def _without_repeats(found: Iterator[tuple[Member, bytes | None]]) -> Iterator[tuple[Member, bytes | None]]:
    """Refuses names that come again, and gives damage as the last member.

    The last hundred thousand names or so are remembered, which is more than a stretch has.
    """
    names: set[int] = set()
    try:
        for member, data in found:
            if member.kind == "folder" or (name := hash(member.path)) not in names:
                yield member, data
            else:
                refused = member.refused or ("damaged_archive", f"a second member of the name {member.path!r}")
                yield replace(member, path=f"{member.path} (again at byte {member.header})", refused=refused), None
            if member.kind != "folder":
                names = set() if len(names) == _REMEMBERED_NAMES else names
                names.add(name)
    except ArchiveDamaged as error:
        yield error.as_member(), None


def _everything(member: Member) -> bool:
    return True


# Bytes of an archive, in order ---------------------------------------------------------------------------------------


class _Ranges:
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
            window = _WINDOW_BYTES if 0 <= self.position - self._taken_to <= self._near else _HEADER_WINDOW_BYTES
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


class _Gunzipped:
    """The decompressed bytes of a gzip object of one or several gzip members."""

    ranged = False

    def __init__(self, store: Store, key: str) -> None:
        self._packed = _Ranges(store, key)
        self.archive, self.position = self._packed.archive, 0
        self._gunzip = zlib.decompressobj(wbits=31)
        self._waiting, self._begun = b"", False

    def take(self, count: int) -> bytes:
        pieces = []
        while count > 0 and (piece := self._piece(min(count, _WINDOW_BYTES))):
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def skip_to(self, position: int) -> None:
        while self.position < position and self._piece(min(position - self.position, _WINDOW_BYTES)):
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


class _Inside:
    """The bytes of a member, of which an archive source stands at the first, as an archive of their own."""

    def __init__(self, source: "_Source", member: Member) -> None:
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


_Source = _Ranges | _Gunzipped | _Inside


# tar -----------------------------------------------------------------------------------------------------------------

_BLOCK = tarfile.BLOCKSIZE
_MAX_PADDING_BYTES = 1 << 20
_WITHOUT_BYTES = frozenset({b"1", b"2", b"3", b"4", b"5", b"6"})
_KINDS = {b"0": "file", b"\0": "file", b"7": "file", b"1": "hard_link", b"2": "link", b"5": "folder"}
_PAX_RECORD = re.compile(rb"(\d{1,8}) ([^=\n]+)=", re.ASCII)


def _tar_source(store: Store, key: str, start: int = 0, end: int | None = None) -> _Source:
    return _Gunzipped(store, key) if archive_kind(key) == "tar.gz" else _Ranges(store, key, start, end)


def _read_tar(
    source: _Source, max_bytes: int, whole: bool, wanted: Callable[[Member], bool]
) -> Iterator[tuple[Member, bytes | None]]:
    for member in _tar_members(source, whole):
        data = None
        if member.kind == "file" and not member.refused and wanted(member):
            expected = min(member.size, max_bytes + 1)
            data = source.take(expected)
            if len(data) < expected:
                raise ArchiveDamaged(source.archive, source.position, f"ends inside the member {member.path!r}")
        yield member, data


def _tar_members(source: _Source, whole: bool) -> Iterator[Member]:
    """The members; while one is given the source stands at its bytes. Raises ArchiveDamaged."""
    while (found := _next_tar_member(source, whole)) is not None:
        member, size = found
        data_at = source.position
        left = source.bytes_after(data_at)
        if left is not None and size > left:
            what = f"the member {member.path!r} claims {size:,} bytes, {max(0, left):,} are left"
            raise ArchiveDamaged(source.archive, member.header, what)
        yield member
        source.skip_to(data_at + _padded(size))


def _next_tar_member(source: _Source, whole: bool) -> tuple[Member, int] | None:
    """A member and the size of what follows its header; none at the end."""
    header, names = source.position, dict[str, str]()
    while True:
        at = source.position
        block = source.take(_BLOCK)
        if not block and not whole and at == header:
            return None
        if len(block) < _BLOCK:
            raise ArchiveDamaged(source.archive, at, "ends without the mark of its end: it is cut off")
        if block.count(0) == _BLOCK:
            if at != header:
                raise ArchiveDamaged(source.archive, at, "a name, but no member after it")
            _check_the_end(source)
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            hint = "; it is compressed, its name should end in .tar.gz" if block[:2] == b"\x1f\x8b" else ""
            raise ArchiveDamaged(source.archive, at, f"no tar header ({error}){hint}") from error
        if info.size < 0:
            raise ArchiveDamaged(source.archive, at, f"a member of {info.size} bytes")
        if info.type in (b"L", b"K"):
            text = _extension(source, info, at).partition(b"\0")[0]
            names["path" if info.type == b"L" else "linkpath"] = text.decode(errors="surrogateescape")
        elif info.type in (b"x", b"X"):
            names |= _pax_records(source, info, at)
        elif info.type == b"g":
            if told := _pax_records(source, info, at):
                raise ArchiveDamaged(source.archive, at, f"a header for all members sets {sorted(told)}")
        else:
            return _tar_member(source, info, block, header, names)


def _check_the_end(source: _Source) -> None:
    left = source.bytes_after(source.position)
    if left is not None and left > _MAX_PADDING_BYTES:
        what = f"{left:,} bytes after the mark of the end are not read; was another archive appended?"
        raise ArchiveDamaged(source.archive, source.position, what)


def _extension(source: _Source, info: tarfile.TarInfo, at: int) -> bytes:
    """The bytes of a header that goes before a member: a long name, or pax records."""
    if info.size > MAX_HEADER_BYTES:
        what = f"a header of {info.size:,} bytes; up to {MAX_HEADER_BYTES:,} are read"
        raise ArchiveDamaged(source.archive, at, what)
    data = source.take(_padded(info.size))
    if len(data) < info.size:
        raise ArchiveDamaged(source.archive, at, "ends inside a header")
    return data[: info.size]


def _pax_records(source: _Source, info: tarfile.TarInfo, at: int) -> dict[str, str]:
    """The pax records that matter here (POSIX pax, "Extended Header"): path, linkpath, size, and that it is sparse."""
    data, position, found = _extension(source, info, at), 0, dict[str, str]()
    while position < len(data) and data[position] != 0:
        record = _PAX_RECORD.match(data, position)
        end = position + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise ArchiveDamaged(source.archive, at, "a pax header that is none")
        name = record[2].decode(errors="replace")
        if name in ("path", "linkpath", "size") or name.startswith("GNU.sparse."):
            found[name] = data[record.end() : end - 1].decode(errors="surrogateescape")
        position = end
    return found


def _tar_member(
    source: _Source, info: tarfile.TarInfo, block: bytes, header: int, names: dict[str, str]
) -> tuple[Member, int]:
    size = info.size
    if "size" in names:
        if not re.fullmatch(r"[0-9]{1,19}", names["size"]):
            raise ArchiveDamaged(source.archive, header, f"a member of {names['size']!r:.40} bytes")
        size = int(names["size"])
    size = 0 if info.type in _WITHOUT_BYTES else size
    sparse = info.type == b"S" or any(name.startswith("GNU.sparse.") for name in names)
    if info.type == b"S":
        _skip_sparse_map(source, block, header)
    path, refused = checked_path(names.get("GNU.sparse.name") or names.get("path") or info.name)
    kind = _KINDS.get(info.type, "other")
    if not refused and not path and kind != "folder":
        refused = ("unsafe_path", "a member without a name")
    if not refused and sparse:
        refused = ("damaged_archive", "a sparse file: its bytes do not stand in one piece")
    if not refused and kind == "other":
        refused = ("ignored_file", "a device or pipe" if info.type in b"346" else f"a tar member of type {info.type!r}")
    target = None
    if kind in ("link", "hard_link"):
        target = names.get("linkpath") or info.linkname
        target = target.encode(errors="surrogateescape").decode(errors="replace")
    offset = source.position if source.ranged and kind == "file" else None
    return Member(path, size, offset, kind, target, refused, header), size  # type: ignore[arg-type]


def _skip_sparse_map(source: _Source, block: bytes, header: int) -> None:
    """The blocks of holes that follow the header of an old GNU sparse file."""
    goes_on = block[482]
    for _ in range(MAX_HEADER_BYTES // _BLOCK):
        if not goes_on:
            return
        block = source.take(_BLOCK)
        if len(block) < _BLOCK:
            break
        goes_on = block[504]
    raise ArchiveDamaged(source.archive, header, "a sparse file whose map does not end")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


# zip (APPNOTE 6.3.10) ------------------------------------------------------------------------------------------------

_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")  # 4.3.12
_LOCAL = struct.Struct("<4s22xHH")  # 4.3.7
_END = struct.Struct("<4sHHHHIIH")  # 4.3.16
_END64 = struct.Struct("<4s12xIIQQQQ")  # 4.3.14: disks, entries here and in all, size and offset of the directory
_LOCATOR64 = struct.Struct("<4sIQI")  # 4.3.15
_IN_64_BITS = 0xFFFFFFFF
_MAX_LINK_BYTES = 4096
_ENTRIES_SORTED_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the directory: the member, and where and how its bytes are kept."""

    member: Member
    name: bytes
    start: int
    packed_size: int
    deflated: bool
    crc: int

    @property
    def claimed(self) -> int:
        """Bytes of the archive that it takes at least."""
        return _LOCAL.size + len(self.name) + self.packed_size


class _Zip:
    """The directory of a zip archive. Raises ArchiveDamaged where there is none."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self.archive = store, key, store.uri_of(key)
        size = store.size(key)
        tail_at = max(0, size - 65_535 - _END.size - _LOCATOR64.size)
        tail = store.read(key, tail_at, size)
        at = tail.rfind(b"PK\5\6")
        if at < 0 or len(tail) - at < _END.size:
            raise ArchiveDamaged(self.archive, size, "no zip directory at the end: it is cut off, or no zip")
        _, disk, first_disk, _, num, length, offset, _ = _END.unpack_from(tail, at)
        end = tail_at + at
        if _IN_64_BITS in (length, offset) or num == 0xFFFF:
            end, disk, first_disk, num, length, offset = self._end_64(
                tail, at, end, (disk, first_disk, num, length, offset)
            )
        self.begin, self.end, self.num_entries = end - length, end, num
        self._shift = (
            self.begin - offset
        )  # above 0 where something stands before the archive, as a program that unpacks it
        if disk or first_disk or self.begin < 0 or self._shift < 0:
            raise ArchiveDamaged(self.archive, end, "the zip directory lies outside the archive, or on another volume")
        self._link_source = _Ranges(store, key, 0, self.begin)

    def _end_64(self, tail: bytes, at: int, end: int, plain: tuple[int, ...]) -> tuple[int, ...]:
        """Where the directory ends (behind it stands the zip64 record), and what the record says."""
        if at < _LOCATOR64.size or tail[at - _LOCATOR64.size : at - _LOCATOR64.size + 4] != b"PK\6\7":
            return end, *plain
        stated = _LOCATOR64.unpack_from(tail, at - _LOCATOR64.size)[2]
        for position in (stated, end - _LOCATOR64.size - _END64.size):
            record = self._store.read(self._key, position, position + _END64.size) if position <= end else b""
            if len(record) == _END64.size and record[:4] == b"PK\6\6":
                _, disk, first_disk, _, num, length, offset = _END64.unpack(record)
                return position, disk, first_disk, num, length, offset
        raise ArchiveDamaged(self.archive, end, "no zip64 directory where there should be one")

    def entries(self, start: int = 0, end: int | None = None) -> Iterator[_Entry]:
        """Entries whose place in the archive is in [start, end), by default all. Raises ArchiveDamaged."""
        first, last = max(self.begin, start), self.end if end is None else min(self.end, end)
        source, number, claimed = _Ranges(self._store, self._key, first, last), 0, 0
        while source.position < last:
            entry = self._next_entry(source)
            number, claimed = number + 1, claimed + (0 if entry.member.refused else entry.claimed)
            if claimed > self.begin:
                what = f"entries overlap: {claimed:,} bytes are claimed of {self.begin:,}"
                raise ArchiveDamaged(self.archive, entry.member.header, what)
            yield entry
        if first == self.begin and last == self.end and (number - self.num_entries) % 65_536:
            what = f"{number:,} entries in a directory of {self.num_entries:,}"
            raise ArchiveDamaged(self.archive, last, what)

    def _next_entry(self, source: _Ranges) -> _Entry:
        at = source.position
        fixed = source.take(_ENTRY.size)
        if len(fixed) < _ENTRY.size or fixed[:4] != b"PK\1\2":
            raise ArchiveDamaged(self.archive, at, "no entry where the zip directory should have one")
        _, made, _, flags, method, _, _, crc, packed, size, n, e, c, _, _, attributes, start = _ENTRY.unpack(fixed)
        rest = source.take(n + e + c)
        if len(rest) < n + e + c:
            raise ArchiveDamaged(self.archive, at, "the zip directory ends inside an entry")
        name, extra = rest[:n], _extra_fields(rest[n : n + e])
        wide = iter(_wide_numbers(extra.get(1, b"")))
        size, packed, start = (next(wide, _IN_64_BITS) if v == _IN_64_BITS else v for v in (size, packed, start))
        path, refused = checked_path(_zip_name(name, flags, extra))
        mode = attributes >> 16 if made >> 8 == 3 else 0
        kind: Literal["file", "folder", "link"] = "file"
        if name.endswith(b"/"):
            kind = "folder"
        elif stat.S_ISLNK(mode):
            kind = "link"
        elif not refused and not path:
            refused = ("unsafe_path", "a member without a name")
        elif not refused and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            refused = ("ignored_file", "a device or pipe")
        if not refused and kind != "folder":
            refused = self._refused(flags, method, self._shift + start + _LOCAL.size + n + packed)
        member = Member(path, size, None, kind, None, refused, at)
        entry = _Entry(member, name, self._shift + start, packed, method == 8, crc)
        return self._with_target(entry) if kind == "link" and not refused else entry

    def _refused(self, flags: int, method: int, end: int) -> tuple[str, str] | None:
        if flags & 0x2041:
            return "unreadable", "encrypted"
        if method not in (0, 8):
            return "unreadable", f"zip compression method {method}; stored and deflated members are read"
        if end > self.begin:
            return "damaged_archive", f"claims bytes up to {end:,}; the zip directory begins at {self.begin:,}"
        return None

    def _with_target(self, entry: _Entry) -> _Entry:
        member, data = self.read(entry, self._link_source, _MAX_LINK_BYTES)
        if data is not None and len(data) > _MAX_LINK_BYTES:
            member, data = replace(member, refused=("damaged_archive", "a link of many bytes")), None
        target = None if data is None else data.decode(errors="replace")
        return replace(entry, member=replace(member, target=target, offset=None))

    def read(self, entry: _Entry, source: _Ranges, max_bytes: int) -> tuple[Member, bytes | None]:
        """The member with its offset, if it has one, and its first `max_bytes` + 1 bytes; or refused."""
        source.skip_to(entry.start)
        fixed = source.take(_LOCAL.size)
        if len(fixed) < _LOCAL.size or fixed[:4] != b"PK\3\4":
            return replace(entry.member, refused=("damaged_archive", f"no zip member at byte {entry.start:,}")), None
        _, name_length, extra_length = _LOCAL.unpack(fixed)
        if source.take(name_length) != entry.name:
            return replace(entry.member, refused=("damaged_archive", "named otherwise in the zip directory")), None
        source.skip_to(source.position + extra_length)
        offset = source.position
        if offset + entry.packed_size > self.begin:
            return replace(entry.member, refused=("damaged_archive", "claims more bytes than the archive has")), None
        try:
            data = _inflated(source, entry.packed_size, max_bytes) if entry.deflated else None
        except zlib.error as error:
            return replace(entry.member, refused=("damaged_archive", f"deflated data: {error}")), None
        if data is None:
            data = source.take(min(entry.packed_size, max_bytes + 1))
        if len(data) <= max_bytes and (len(data) != entry.member.size or zlib.crc32(data) != entry.crc):
            return replace(
                entry.member, refused=("damaged_archive", "size or checksum differ from the directory")
            ), None
        return replace(entry.member, offset=None if entry.deflated else offset), data


def _read_zip(
    store: Store, key: str, max_bytes: int, start: int, end: int | None, wanted: Callable[[Member], bool]
) -> Iterator[tuple[Member, bytes | None]]:
    archive = _Zip(store, key)
    source = _Ranges(store, key, 0, archive.begin)
    for batch in _batches(archive.entries(start, end), _ENTRIES_SORTED_AT_ONCE):
        free_from = 0
        for entry in sorted(batch, key=lambda entry: (entry.start, entry.member.header)):
            member, data = entry.member, None
            if member.kind == "file" and not member.refused:
                if entry.start < free_from:
                    member = replace(member, refused=("damaged_archive", "overlaps another zip member"))
                elif wanted(member):
                    member, data = archive.read(entry, source, max_bytes)
                free_from = max(free_from, entry.start + entry.claimed)
            yield member, data


def _batches(entries: Iterator[_Entry], size: int) -> Iterator[list[_Entry]]:
    """Lists of `size`; what damage is raised comes after all entries before it."""
    batch: list[_Entry] = []
    try:
        for entry in entries:
            batch.append(entry)
            if len(batch) == size:
                yield batch
                batch = []
    except ArchiveDamaged:
        yield batch
        raise
    yield batch


def _inflated(source: _Ranges, packed_size: int, max_bytes: int) -> bytes:
    """At most `max_bytes` + 1 bytes. Raises zlib.error."""
    inflate, pieces, room, left = zlib.decompressobj(-15), list[bytes](), max_bytes + 1, packed_size
    while room > 0 and left > 0 and not inflate.eof:
        packed = source.take(min(left, _WINDOW_BYTES))
        left -= len(packed)
        while packed and room > 0:
            pieces.append(inflate.decompress(packed, room))
            room -= len(pieces[-1])
            packed = inflate.unconsumed_tail
        if not packed and left and source.position >= source.end:
            break
    return b"".join(pieces)


def _extra_fields(data: bytes) -> dict[int, bytes]:
    """Extra fields by their id (4.5.1); what does not fit is left out."""
    found, position = dict[int, bytes](), 0
    while position + 4 <= len(data):
        key, length = struct.unpack_from("<HH", data, position)
        found.setdefault(key, data[position + 4 : position + 4 + length])
        position += 4 + length
    return found


def _wide_numbers(data: bytes) -> tuple[int, ...]:
    return struct.unpack_from(f"<{min(3, len(data) // 8)}Q", data)


def _zip_name(name: bytes, flags: int, extra: dict[int, bytes]) -> str:
    """The name: in Unicode by an extra field of Info-ZIP (4.6.9), or UTF-8 if it can be (macOS does not set the flag)."""
    unicode_name = extra.get(0x7075, b"")
    if unicode_name[:1] == b"\1" and unicode_name[1:5] == struct.pack("<I", zlib.crc32(name)):
        name, flags = unicode_name[5:], 0x800
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode(errors="surrogateescape") if flags & 0x800 else name.decode("cp437")
