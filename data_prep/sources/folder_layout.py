"""Interprets paths of class folders: the split, the class, where links lead, and which files are no images by their names."""

import functools
import os
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from vitline.data_prep.archives.archive_members import LONGEST_PATH, Member
from vitline.data_prep.sources.raw import RawExample, SplitRule
from vitline.data_prep.sources.split_names import SplitPatterns

Refused = tuple[str, str]
_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "icon\r"})
# Extensions of files that are often next to images. Files with other extensions, or none, are judged by content.
_NO_IMAGE_ENDINGS = frozenset(
    "." + ending
    for line in (
        "txt md rst csv tsv json jsonl xml html htm css js py ipynb yaml yml toml ini log db sqlite lock",
        "pdf doc docx svg mat npy npz h5 pkl pt pth parquet arrow",
        "zip tar gz tgz bz2 xz 7z rar mp3 wav mp4 avi mov mkv",
    )
    for ending in line.split()
)
# Every name of an image is an example with its bytes: at most this many links to the image itself are considered,
_MAX_LINKS = 1000
# and at most this many further names, because links between folders can multiply.
_MAX_NAMES = 64
_MAX_LINK_STEPS = 40


@dataclass(frozen=True)
class FolderLayout:
    """How paths are interpreted; `FolderTree` finds it."""

    splits: Mapping[str, str] = field(default_factory=dict)
    """Split of paths by `SplitPatterns`."""
    wrapper: str = ""
    """Folders around all classes, where there are no splits."""
    container: str = ""
    """Last folder of every path that is not part of the class, as `images` in n01/images/1.jpg."""
    only_splits: bool = False
    """Whether files outside of split folders are left out."""
    description: str = ""

    def example(self, names: list[str], split_rule: SplitRule, refused: Refused | None) -> RawExample:
        """The example of a file with these paths, without its location. Id and split follow from the first path, labels from all."""
        example_id = readable_id(names[0])
        labels = tuple(sorted({"/".join(classes) for name in names if (classes := self._read(readable_id(name))[1])}))
        named = self._read(example_id)[0]
        if self.only_splits and named is None and not refused:
            refused = ("ignored_file", f"not in one of the split folders {', '.join(self.splits)}")
        if not labels and not refused:
            refused = ("no_label", "not in a class folder")
        split = split_rule.assign_split(example_id, named)
        return RawExample(example_id=example_id, labels=labels, split=split, base="", key="", refused=refused)

    def _read(self, example_id: str) -> tuple[str | None, list[str]]:
        return self.read(example_id.split("/")[:-1])

    def read(self, folders: list[str]) -> tuple[str | None, list[str]]:
        """The split that folders name, and the folders that form the class."""
        split, rest = None, folders
        if self.splits:
            split, rest = self._patterns.match(folders) or (None, [])
        elif self.wrapper and folders[: len(self._wrapper)] == self._wrapper:
            rest = folders[len(self._wrapper) :]
        return split, rest[:-1] if self.container and rest[-1:] == [self.container] else rest

    @functools.cached_property
    def _patterns(self) -> SplitPatterns:
        return SplitPatterns(self.splits)

    @functools.cached_property
    def _wrapper(self) -> list[str]:
        return self.wrapper.split("/")


class PathAliases(NamedTuple):
    """The paths that lead to a file, and which links, if any, give it more."""

    paths: list[str]
    more: Literal["", "links", "links to folders"] = ""

    def refusal(self) -> Refused:
        return "ignored_file", (
            f"{self.more} give {self.paths[0]} more than {len(self.paths):,} names; the others are ignored"
        )


class Links:
    """Links of a source with their targets."""

    def __init__(self, targets: dict[str, str], existing: Iterable[str] = (), hard: Iterable[str] = ()) -> None:
        """`hard`: the hard links, which are files like the file that they share."""
        self.targets, self.existing, self.hard = targets, set(existing), set(hard)
        self._ends: dict[str, _End] = {}
        self._by_target: dict[str, list[str]] = {}
        self._by_file: dict[str, list[str]] = {}  # links that lead to it, directly or through others
        for link in sorted(targets):
            if (found := self.resolved(link)) is not None:
                self._by_file.setdefault(found, []).append(link)
            if not link.startswith(f"{targets[link]}/"):  # skip links to a folder that contains the link
                self._by_target.setdefault(targets[link], []).append(link)

    def names_of(self, path: str) -> PathAliases:
        """The paths that lead to a file: its own, up to _MAX_LINKS links to it, and up to _MAX_NAMES that go through links to
        folders above it."""
        links = self._by_file.get(path, [])
        found: dict[str, tuple[str, ...]] = dict.fromkeys([path, *links[:_MAX_LINKS]], ())
        if len(links) > _MAX_LINKS:
            return PathAliases([*found], more="links")
        limit = len(found) + _MAX_NAMES
        waiting = deque(found) if self._by_target else deque[str]()
        while waiting:
            name = waiting.popleft()
            for target, rest in beginnings(name):
                through = (*found[name], target)
                for link in self._by_target.get(target, ()) if rest else ():
                    other = link + rest
                    around = any(link == folder or link.startswith(f"{folder}/") for folder in through)
                    if other in found or around:
                        continue
                    if len(found) == limit:
                        return PathAliases([*found], more="links to folders")
                    found[other] = through
                    waiting.append(other)
        return PathAliases([*found])

    def resolved(self, link: str) -> str | None:
        """The path that a link leads to, through up to _MAX_LINK_STEPS links; None if there are more, as in a circle, or if the
        path is too long to be that of a file."""
        waiting = [] if link in self._ends else [link]  # each but the first is a link that the one before it needs
        known = {link}
        while waiting:
            at = waiting[-1]
            end = self._end(at)
            if isinstance(end, str) and end not in known:
                waiting.append(end)
                known.add(end)
            else:
                self._ends[at] = None if isinstance(end, str) else end  # a link that waits for itself: a circle
                waiting.pop()
        found = self._ends[link]
        return found and found[0]

    def _end(self, link: str) -> "_End | str":
        """Where a link leads, or the link on the way whose own end must be found first."""
        path, num_steps = link, 0
        while num_steps <= _MAX_LINK_STEPS and len(path) <= LONGEST_PATH:
            further = next((folder for folder, _ in beginnings(path) if folder in self.targets), None)
            if further is None:
                return path, num_steps
            if further == link and not num_steps:
                path, num_steps = self.targets[link], 1
                continue
            if further not in self._ends:
                return further
            if (end := self._ends[further]) is None:
                return None
            path, num_steps = end[0] + path[len(further) :], num_steps + end[1]
        return None


_End = tuple[str, int] | None  # a path and the number of links on the way


def refusal_by_name(path: str) -> Refused | None:
    """Why a file is not an image by its path alone; None if it may be one."""
    *folders, name = path.split("/")
    if is_hidden(name) or any(is_hidden(folder) for folder in folders):
        return "ignored_file", "hidden file or system file"
    ending = os.path.splitext(name)[1].lower()
    return ("ignored_file", f"not an image by its extension {ending}") if ending in _NO_IMAGE_ENDINGS else None


def readable_id(path: str) -> str:
    """A path as an example id: Unicode NFC."""
    return unicodedata.normalize("NFC", path.encode(errors="surrogateescape").decode(errors="replace"))


def is_image(member: Member) -> bool:
    """Whether the bytes of a member should be read, by its name."""
    return refusal_by_name(member.path) is None


def beginnings(path: str) -> Iterator[tuple[str, str]]:
    """(folder, rest) for every folder of a path from the top down, and the path itself: ('a', '/b'), ('a/b', '')."""
    at = path.find("/")
    while at >= 0:
        yield path[:at], path[at:]
        at = path.find("/", at + 1)
    yield path, ""


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX" or name.lower() in _SYSTEM_FILES
