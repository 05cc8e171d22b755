"""A member of an archive, and what its names may be."""

import posixpath
import re
from dataclasses import dataclass
from typing import Literal

_LONGEST_PATH = 4096


class ArchiveDamaged(ValueError):
    """The archive cannot be read on from `byte`. Callers of `archives` get a refused member instead."""

    def __init__(self, archive: str, byte: int, what: str) -> None:
        super().__init__(f"{archive} at byte {byte:,}: {what}")
        self.byte = byte

    def as_member(self) -> "Member":
        path = f"(damaged at byte {self.byte})"
        return Member(path, kind="damage", refused=("uncounted_loss", str(self)), header=self.byte)


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
