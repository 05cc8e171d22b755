"""Members of a tar: POSIX ustar and pax, GNU and old formats; of tars one after another, as of one."""

import re
import tarfile
from collections.abc import Callable, Iterator

from vitline.data_prep.archives.archive_bytes import Source
from vitline.data_prep.archives.archive_members import CorruptArchive, Member, checked_path

_MAX_HEADER_BYTES = 1 << 20  # limit of a long name or pax header
_BLOCK = tarfile.BLOCKSIZE
_MAX_PADDING_BYTES = 1 << 20
_WITHOUT_BYTES = frozenset({b"1", b"2", b"3", b"4", b"5", b"6"})
_KINDS = {b"0": "file", b"\0": "file", b"7": "file", b"1": "hard_link", b"2": "link", b"5": "folder"}
_PAX_RECORD = re.compile(rb"(\d{1,8}) ([^=\n]+)=", re.ASCII)


def read_tar(
    source: Source, max_bytes: int, whole: bool, wanted: Callable[[Member], bool]
) -> Iterator[tuple[Member, bytes | None]]:
    """The members, with the first `max_bytes` + 1 bytes of files that are `wanted`. Raises CorruptArchive."""
    for member in tar_members(source, whole):
        data = None
        if member.kind == "file" and not member.refused and wanted(member):
            expected = min(member.size, max_bytes + 1)
            data = source.take(expected)
            if len(data) < expected:
                raise CorruptArchive(
                    source.archive, source.position, f"the archive ends inside the member {member.path!r}"
                )
        yield member, data


def tar_members(source: Source, whole: bool) -> Iterator[Member]:
    """The members; `whole` as in Stretch. The source is at the bytes of the current member. Raises CorruptArchive."""
    while (found := _next_tar_member(source, whole)) is not None:
        member, size = found
        data_at = source.position
        left = source.remaining(data_at)
        if left is not None and size > left:
            what = f"the member {member.path!r} claims {size:,} bytes, but only {max(0, left):,} are left"
            raise CorruptArchive(source.archive, member.header, what)
        yield member
        source.skip_to(data_at + _padded(size))


def _next_tar_member(source: Source, whole: bool) -> tuple[Member, int] | None:
    """A member and the size of the data after its header; None at the end. What follows an end-of-archive marker is another tar, as
    `cat a.tar b.tar` makes it, or damage."""
    header, names = source.position, dict[str, str]()
    ended: int | None = None  # position of the end-of-archive marker
    while True:
        at = source.position
        block = source.take(_BLOCK)
        if at == header and (ended is not None or not whole) and not block.strip(b"\0") and len(block) < _BLOCK:
            return None
        if len(block) < _BLOCK and ended is None:
            raise CorruptArchive(source.archive, at, "the end-of-archive marker is missing: the archive is truncated")
        if block.count(0) == _BLOCK:
            if at != header:
                raise CorruptArchive(source.archive, at, "a long name is not followed by a member")
            header, ended = source.position, at if ended is None else ended
            if header - ended > _MAX_PADDING_BYTES:
                what = f"more than {_MAX_PADDING_BYTES:,} zero bytes follow the end-of-archive marker, as in an incomplete download"
                raise CorruptArchive(source.archive, ended, what)
            continue
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            hint = "; the file is compressed, so its name should end in .tar.gz" if block[:2] == b"\x1f\x8b" else ""
            hint = "; these bytes follow the end-of-archive marker and are no tar" if ended is not None else hint
            raise CorruptArchive(source.archive, at, f"invalid tar header ({error}){hint}") from error
        if info.size < 0:
            raise CorruptArchive(source.archive, at, f"a member has size {info.size}")
        if info.type in (b"L", b"K"):
            text = _extension(source, info, at).partition(b"\0")[0]
            names["path" if info.type == b"L" else "linkpath"] = text.decode(errors="surrogateescape")
        elif info.type in (b"x", b"X"):
            names |= _pax_records(source, info, at)
        elif info.type == b"g":
            if records := _pax_records(source, info, at):
                raise CorruptArchive(
                    source.archive, at, f"a global pax header sets {sorted(records)}, which is not supported"
                )
        else:
            return _tar_member(source, info, block, header, names)


def _extension(source: Source, info: tarfile.TarInfo, at: int) -> bytes:
    """The bytes of a header that precedes a member: a long name, or pax records."""
    if info.size > _MAX_HEADER_BYTES:
        what = f"a header has {info.size:,} bytes, limit {_MAX_HEADER_BYTES:,}"
        raise CorruptArchive(source.archive, at, what)
    data = source.take(_padded(info.size))
    if len(data) < info.size:
        raise CorruptArchive(source.archive, at, "the archive ends inside a header")
    return data[: info.size]


def _pax_records(source: Source, info: tarfile.TarInfo, at: int) -> dict[str, str]:
    """The relevant pax records (POSIX pax, "Extended Header"): path, linkpath, size, and whether the file is sparse."""
    data, position, found = _extension(source, info, at), 0, dict[str, str]()
    while position < len(data) and data[position] != 0:
        record = _PAX_RECORD.match(data, position)
        end = position + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise CorruptArchive(source.archive, at, "invalid pax header")
        name = record[2].decode(errors="replace")
        if name in ("path", "linkpath", "size") or name.startswith("GNU.sparse."):
            found[name] = data[record.end() : end - 1].decode(errors="surrogateescape")
        position = end
    return found


def _tar_member(
    source: Source, info: tarfile.TarInfo, block: bytes, header: int, names: dict[str, str]
) -> tuple[Member, int]:
    size = info.size
    if "size" in names:
        if not re.fullmatch(r"[0-9]{1,19}", names["size"]):
            raise CorruptArchive(source.archive, header, f"a member has size {names['size']!r:.40}")
        size = int(names["size"])
    size = 0 if info.type in _WITHOUT_BYTES else size
    sparse = info.type == b"S" or any(name.startswith("GNU.sparse.") for name in names)
    if info.type == b"S":
        _skip_sparse_map(source, block, header)
    path, refused = checked_path(names.get("GNU.sparse.name") or names.get("path") or info.name)
    kind = _KINDS.get(info.type, "other")
    if not refused and not path and kind != "folder":
        refused = ("unsafe_path", "the member has no name")
    if not refused and sparse:
        refused = ("damaged_archive", "sparse files are not supported")
    if not refused and kind == "other":
        refused = (
            "ignored_file",
            "a device or pipe" if info.type in b"346" else f"unsupported tar member type {info.type!r}",
        )
    target = None
    if kind in ("link", "hard_link"):
        target = names.get("linkpath") or info.linkname
        target = target.encode(errors="surrogateescape").decode(errors="replace")
    offset = source.position if source.ranged and kind == "file" else None
    return Member(path, size, offset, kind, target, refused, header), size  # type: ignore[arg-type]


def _skip_sparse_map(source: Source, block: bytes, header: int) -> None:
    """Skip the map of holes after the header of an old GNU sparse file."""
    goes_on = block[482]
    for _ in range(_MAX_HEADER_BYTES // _BLOCK):
        if not goes_on:
            return
        block = source.take(_BLOCK)
        if len(block) < _BLOCK:
            break
        goes_on = block[504]
    raise CorruptArchive(source.archive, header, "the map of a sparse file does not end")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
