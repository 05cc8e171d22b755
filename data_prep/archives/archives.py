"""Streams members of tar, tar.gz and zip archives from a store. Nothing is unpacked to disk.

Archives are untrusted: sizes are compared with the available bytes, headers and members are read up to limits, and a path that
could leave the target folder is refused before its bytes are read. Damage ends an archive with one refused member that names
archive and byte, after all members before it. Memory: a window of the archive and one member.

- `index` returns members without their bytes, for planning; `stretches` divides them into pieces for workers.
- `read_members` returns members with their bytes: of a whole archive, of a stretch, or of a tar inside a tar.
- `member_pieces` streams one member of a zip that is too large for memory, `open_members` those of a tar.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from vitline.data_prep.archives.archive_bytes import Gunzipped, NestedArchive, RangeReader, Source
from vitline.data_prep.archives.archive_members import CorruptArchive, Member, RepeatedNames, name_hash
from vitline.data_prep.archives.tar_members import read_tar, tar_members
from vitline.data_prep.archives.zip_members import ZipDirectory, read_zip
from vitline.infra.storage import Store

ArchiveKind = Literal["tar", "tar.gz", "zip"]

_ENDINGS: tuple[tuple[str, ArchiveKind], ...] = (
    (".tar", "tar"),
    (".tar.gz", "tar.gz"),
    (".tgz", "tar.gz"),
    (".zip", "zip"),
)
_REMEMBERED_NAMES = 1 << 17
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", (257, 262)


@dataclass(frozen=True, slots=True)
class MemberRange:
    """Consecutive members of an archive: `read_members(..., start, end, whole)` reads exactly these."""

    start: int
    end: int | None
    """None: to the end of the archive."""
    whole: bool
    """Whether the end-of-archive marker belongs to it."""
    num_members: int
    """Number of members without folders."""
    num_bytes: int
    """Bytes of the files."""

    @property
    def where(self) -> dict[str, Any]:
        """The arguments of `read_members`."""
        return {"start": self.start, "end": self.end, "whole": self.whole}


def archive_kind(key: str) -> ArchiveKind | None:
    """The kind of archive by its name; None if it is not a supported archive."""
    return next((kind for ending, kind in _ENDINGS if key.lower().endswith(ending)), None)


def index(store: Store, key: str, start: int = 0, end: int | None = None, whole: bool = True) -> Iterator[Member]:
    """Every member in the order of the archive, without its bytes (those of a tar.gz are read and discarded).

    `start` and `end` are those of a stretch, or of a tar inside a tar; `whole` as in Stretch. Damage is the last member. Raises
    only FileNotFoundError and what the store raises.
    """
    try:
        if archive_kind(key) == "zip":
            yield from (entry.member for entry in ZipDirectory(store, key).entries(start, end))
        else:
            yield from tar_members(_tar_source(store, key, start, end), whole)
    except CorruptArchive as error:
        yield error.as_member()


def stretches(
    members: Iterable[Member], members_each: int, start: int = 0, end: int | None = None
) -> Iterator[MemberRange]:
    """Divide the members from `index` of a tar or zip into stretches of `members_each` members; the last one may be shorter.

    There is at least one stretch, so that a worker finds the damage of an archive without members. `start` and `end` as for
    `index`.
    """
    number, num_bytes = 0, 0
    for member in members:
        if member.kind == "damage":
            continue
        if number == members_each and member.kind != "folder":
            yield MemberRange(start, member.header, False, number, num_bytes)
            start, number, num_bytes = member.header, 0, 0
        number, num_bytes = number + (member.kind != "folder"), num_bytes + member.size
    yield MemberRange(start, end, True, number, num_bytes)


def read_members(
    store: Store,
    key: str,
    max_bytes: int,
    start: int = 0,
    end: int | None = None,
    whole: bool = True,
    wanted: Callable[[Member], bool] | None = None,
    names: RepeatedNames | None = None,
) -> Iterator[tuple[Member, bytes | None]]:
    """Members with their bytes; each byte of the archive is read once, in order, in windows of some MiB.

    Files that are `wanted` (default: all) and not refused come with their bytes, limited to the first `max_bytes` + 1. A
    second member of the same name is refused: among those of the stretch, or of all that were added to `names`. Zip entries
    come in the order of their bytes. Otherwise as `index`.
    """
    if archive_kind(key) == "zip":
        yield from _without_repeats(read_zip(store, key, max_bytes, start, end, wanted or _everything), names)
    else:
        source = _tar_source(store, key, start, end)
        yield from _without_repeats(read_tar(source, max_bytes, whole, wanted or _everything), names)


def member_pieces(store: Store, key: str, path: str) -> Iterator[bytes]:
    """The bytes of one file of a zip, some MiB at a time. Raises FileNotFoundError, and CorruptArchive; a wrong checksum is
    detected only after the last piece."""
    archive = ZipDirectory(store, key)
    for entry in archive.entries():
        if entry.member.kind == "file" and entry.member.path == path:
            yield from archive.pieces(entry)
            return
    raise FileNotFoundError(f"{store.uri_of(key)}!{path}")


def open_members(store: Store, key: str, opened: Callable[[Member], bool]) -> Iterator[tuple[Member, Source]]:
    """Files of a tar or tar.gz that are `opened`, each with its bytes as a source that must be read before the next file is
    requested; unread bytes are skipped. Raises CorruptArchive."""
    source = _tar_source(store, key)
    for member in tar_members(source, whole=True):
        if member.kind == "file" and not member.refused and opened(member):
            yield member, NestedArchive(source, member)


def read_tars_inside(
    store: Store,
    key: str,
    max_bytes: int,
    opened: Callable[[Member], bool],
    wanted: Callable[[Member], bool] | None = None,
) -> Iterator[tuple[Member, Member | None, bytes | None]]:
    """(member, None, None) for every member of a tar or tar.gz. A member that is `opened` is a tar itself and is followed by
    (member, inner member, its bytes). One level deep. Otherwise as `read_members`.

    For an inner tar that has a range of its own in an uncompressed tar, prefer `read_members` with `start` and `end`.
    """
    source = _tar_source(store, key)
    try:
        for member in tar_members(source, whole=True):
            yield member, None, None
            if member.kind == "file" and not member.refused and opened(member):
                inside = NestedArchive(source, member)
                for inner, data in _without_repeats(read_tar(inside, max_bytes, True, wanted or _everything)):
                    yield member, inner, data
    except CorruptArchive as error:
        yield error.as_member(), None, None


def _tar_source(store: Store, key: str, start: int = 0, end: int | None = None) -> Source:
    # Names can be wrong: ImageNetV2's official .tar.gz files have sizes in whole blocks of 512 bytes, as plain tars have.
    plain = archive_kind(key) != "tar.gz" or store.read(key, *_TAR_MAGIC_AT) == _TAR_MAGIC
    return RangeReader(store, key, start, end) if plain else Gunzipped(store, key)


def _without_repeats(
    found: Iterator[tuple[Member, bytes | None]], names: RepeatedNames | None = None
) -> Iterator[tuple[Member, bytes | None]]:
    """Refuse repeated names and convert damage to the last member.

    Without `names`, about the last hundred thousand are remembered, which is more than a stretch has.
    """
    recent: set[int] = set()
    try:
        for member, data in found:
            repeats = False
            if member.kind != "folder" and names:
                repeats = names.repeats(member.path, member.header)
            elif member.kind != "folder":
                repeats = (name := name_hash(member.path)) in recent
                recent = set() if len(recent) == _REMEMBERED_NAMES else recent
                recent.add(name)
            if repeats:
                refused = member.refused or ("repeated_name", f"a second member with the name {member.path!r}")
                yield replace(member, path=f"{member.path} (again at byte {member.header})", refused=refused), None
            else:
                yield member, data
    except CorruptArchive as error:
        yield error.as_member(), None


def _everything(member: Member) -> bool:
    return True
