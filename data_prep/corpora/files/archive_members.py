"""Members of archives, and checks of their names."""

import posixpath
import re
from dataclasses import dataclass
from typing import Literal

LONGEST_PATH = 4096


class ArchiveDamaged(ValueError):
    """The archive cannot be read beyond `byte`. Callers of `archives` get a refused member instead."""

    def __init__(self, archive: str, byte: int, what: str) -> None:
        super().__init__(f"{archive} at byte {byte:,}: {what}")
        self.byte = byte

    def as_member(self) -> "Member":
        path = f"(damaged at byte {self.byte})"
        return Member(path, kind="damage", refused=("uncounted_loss", str(self)), header=self.byte)


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an archive. The bytes of `refused` members must not be read."""

    path: str
    """Valid Unicode, separated by /, without './'. For a refused member it may contain anything."""
    size: int = 0
    """Decompressed bytes of the file."""
    offset: int | None = None
    """Position of the plain bytes in the archive; None if they are compressed, or in `index` of a zip."""
    kind: Literal["file", "folder", "link", "hard_link", "other", "damage"] = "file"
    """`damage` is not a member but the end of the readable archive; always refused."""
    target: str | None = None
    """Target of a link as stored; see `link_target`."""
    refused: tuple[str, str] | None = None
    """Reason (of `RejectReason`) and detail."""
    header: int = 0
    """Position of its headers: in the (decompressed) tar, or of the entry in a zip directory."""


def link_target(member: Member) -> str | None:
    """The path in the archive that a link points to; None if it is outside of the archive or not a path."""
    if len(member.target or "") > LONGEST_PATH:
        return None
    folder = "" if member.kind == "hard_link" else posixpath.dirname(member.path)
    path = posixpath.normpath(posixpath.join(folder, member.target or ""))
    return None if path.startswith(("/", "../")) or path in ("..", ".") or "\0" in path else path


def checked_path(name: str) -> tuple[str, tuple[str, str] | None]:
    """A name in an archive as a clean path, and the refusal if it is not text or could leave the folder."""
    readable = name.encode(errors="surrogateescape").decode(errors="replace")
    path = "/".join(part for part in readable.split("/") if part not in ("", "."))[:LONGEST_PATH]
    if len(readable) > LONGEST_PATH:
        return path, ("unsafe_path", f"the name has {len(readable):,} characters, limit {LONGEST_PATH:,}")
    if (
        readable.startswith("/")
        or "\\" in readable
        or "\0" in readable
        or ".." in readable.split("/")
        or re.match(r"[A-Za-z]:", readable)
    ):
        return readable, ("unsafe_path", f"the path {readable!r} could leave the target folder")
    if readable != name:
        return path, ("unreadable", "the name is not UTF-8")
    return path, None
