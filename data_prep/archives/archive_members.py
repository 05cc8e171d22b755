"""Members of archives, and checks of their names."""

import hashlib
import posixpath
import re
import unicodedata
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

LONGEST_PATH = 4096


class CorruptArchive(ValueError):
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


class RepeatedNames:
    """Names that are equal as ids, in Unicode NFC, among any number of them; the first one stays. Memory: 16 bytes a name, and the
    names that repeat."""

    def __init__(self, firsts: Mapping[int, int] | None = None) -> None:
        """`firsts`: as `firsts` has returned them where the names were added."""
        self._hashes, self._places = array("Q"), array("Q")
        self._firsts = firsts

    def add(self, path: str, place: int) -> None:
        """`place`: what distinguishes equal names, such as where a member begins."""
        self._hashes.append(name_hash(path))
        self._places.append(place)

    def firsts(self) -> Mapping[int, int]:
        """For the hash of each name that repeats, the place of the first one that was added."""
        if self._firsts is None:
            hashes, places = np.frombuffer(self._hashes, np.uint64), np.frombuffer(self._places, np.uint64)
            order = np.argsort(hashes, kind="stable")
            hashes, places = hashes[order], places[order]
            equal = np.concatenate([[False], hashes[1:] == hashes[:-1], [False]])  # whether each equals the one before
            first = np.flatnonzero(equal[1:] & ~equal[:-1])
            self._firsts = dict(zip(hashes[first].tolist(), places[first].tolist(), strict=True))
        return self._firsts

    def repeats(self, path: str, place: int) -> bool:
        """Whether another place came first with this name."""
        firsts = self.firsts()
        return bool(firsts) and firsts.get(name_hash(path), place) != place


def name_hash(path: str) -> int:
    """64 bits that are the same for equal ids, in every process."""
    return path_hash(unicodedata.normalize("NFC", path))


def path_hash(path: str) -> int:
    """64 bits of a path as it is spelled."""
    return int.from_bytes(hashlib.blake2b(path.encode(errors="surrogateescape"), digest_size=8).digest())


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
