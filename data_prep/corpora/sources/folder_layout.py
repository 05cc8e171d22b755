"""Interprets paths of class folders: which top-level folders are splits, what the class is, and where links lead."""

import os
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, NotRequired, TypedDict

from vitline.data_prep.config import TopFolders
from vitline.data_prep.corpora.files.archive_members import LONGEST_PATH, Member, link_target
from vitline.data_prep.corpora.raw import RawExample, SplitRule

Refused = tuple[str, str]
_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "icon\r"})
# Extensions of files that are often next to images. Files with other extensions, or none, are judged by content.
_NO_PICTURE_ENDINGS = frozenset(
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
    """How paths are interpreted: the folder around everything, if there is one, and the folders below it that are splits."""

    splits: dict[str, str]
    wrapper: str = ""
    only_splits: bool = False
    """Whether files outside of split folders are refused."""

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
        """The split named by the path, and the folders that form the class."""
        folders = example_id.split("/")[:-1]
        if self.wrapper and folders[:1] == [self.wrapper]:
            folders = folders[1:]
        split = self.splits.get(folders[0]) if folders else None
        if split:
            return split, folders[1:]
        return None, [] if self.only_splits else folders


class Tops:
    """Decides which top-level folders are splits: all or none, unless `top_folders` says so; a class may be named 'train'."""

    def __init__(self, top_folders: TopFolders) -> None:
        self._top_folders = top_folders
        self.splits: dict[str, str] = {}
        self.first, self.several, self._stray = "", False, ""

    def add(self, name: str, holds_pictures: bool) -> None:
        self.several |= self.first not in ("", name)
        self.first = self.first or name
        if split := SplitRule.NAMES.get(name.lower()):
            self.splits[name] = split
        elif holds_pictures:
            self._stray = self._stray or f"folder {name!r}"

    def add_picture(self, path: str) -> None:
        """An image next to the folders."""
        self._stray = self._stray or f"image {path!r}"

    def splits_at(self, uri: str) -> dict[str, str]:
        """The folders of `uri` that are splits. Raises ValueError if that is ambiguous."""
        found = set(self.splits.values())
        if self._top_folders == "splits":
            if "train" not in found:
                named = ", ".join(self.splits) or "no such folders"
                raise ValueError(
                    f"source.top_folders is 'splits', but {uri} holds {named}; "
                    "its top level must have train and, optionally, "
                    "val and test. Give the folder that holds them, or leave source.top_folders out."
                )
            return self.splits
        if self._top_folders == "classes" or "train" not in found:
            return {}
        if self._stray and len(found) > 1:
            raise ValueError(
                f"{uri} holds {', '.join(self.splits)}, which are names of splits, but also "
                f"{self._stray}. Move that elsewhere, "
                "or choose: with source.top_folders=splits these folders are splits and "
                "everything else is left out; with source.top_folders=classes each folder is a class."
            )
        return {} if self._stray else self.splits


class Names(NamedTuple):
    """The paths that lead to a file, and which links, if any, give it more."""

    paths: list[str]
    more: Literal["", "links", "links to folders"] = ""

    def refusal(self) -> Refused:
        return "ignored_file", (
            f"{self.more} give {self.paths[0]} more than {len(self.paths):,} names; the others are ignored"
        )


class Links:
    """Links of a source with their targets."""

    def __init__(self, targets: dict[str, str], existing: Iterable[str] = ()) -> None:
        self.targets, self.existing = targets, set(existing)
        self._ends: dict[str, _End] = {}
        self._by_target: dict[str, list[str]] = {}
        self._by_file: dict[str, list[str]] = {}  # links that lead to it, directly or through others
        for link in sorted(targets):
            if (found := self.resolved(link)) is not None:
                self._by_file.setdefault(found, []).append(link)
            if not link.startswith(f"{targets[link]}/"):  # skip links to a folder that contains the link
                self._by_target.setdefault(targets[link], []).append(link)

    def names_of(self, path: str) -> Names:
        """The paths that lead to a file: its own, up to _MAX_LINKS links to it, and up to _MAX_NAMES that go through links to
        folders above it."""
        links = self._by_file.get(path, [])
        found: dict[str, tuple[str, ...]] = dict.fromkeys([path, *links[:_MAX_LINKS]], ())
        if len(links) > _MAX_LINKS:
            return Names([*found], more="links")
        limit = len(found) + _MAX_NAMES
        waiting = deque(found) if self._by_target else deque[str]()
        while waiting:
            name = waiting.popleft()
            for target, rest in _beginnings(name):
                through = (*found[name], target)
                for link in self._by_target.get(target, ()) if rest else ():
                    other = link + rest
                    around = any(link == folder or link.startswith(f"{folder}/") for folder in through)
                    if other in found or around:
                        continue
                    if len(found) == limit:
                        return Names([*found], more="links to folders")
                    found[other] = through
                    waiting.append(other)
        return Names([*found])

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
            further = next((folder for folder, _ in _beginnings(path) if folder in self.targets), None)
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


class SurveyFile(TypedDict):
    """A `Survey` as JSON, kept in the work folder."""

    splits: dict[str, str]
    wrapper: str
    only_splits: NotRequired[bool]
    targets: dict[str, str]
    existing: list[str]
    damage: str
    damage_path: str


class Survey:
    """Layout and links of an archive, from one pass over its headers. Memory: the links."""

    def __init__(self, with_links: bool, top_folders: TopFolders = "auto", uri: str = "") -> None:
        self.num_members, self.damage, self.damage_path = 0, "", ""
        self.layout, self.links = FolderLayout({}), Links({})
        self._with_links, self._top_folders, self._uri = with_links, top_folders, uri
        self._outer, self._inner, self._bare = Tops(top_folders), Tops(top_folders), ""

    def through(self, members: Iterable[Member]) -> Iterator[Member]:
        """Yields the same members; the survey is complete after the last one."""
        targets: dict[str, str] = {}
        for member in members:
            if member.kind == "damage":
                self.damage, self.damage_path = (member.refused or ("", ""))[1], member.path
            else:
                self.num_members += 1
                self._see(member)
                target = link_target(member) if member.kind in ("link", "hard_link") else None
                if self._with_links and target and not member.refused and not refusal_by_name(member.path):
                    targets[member.path] = target
            yield member
        self.links = Links(targets)
        self.layout = self._found_layout()

    def _found_layout(self) -> FolderLayout:
        """The layout. Raises ValueError if it is ambiguous."""
        only_splits, named = self._top_folders == "splits", self._top_folders != "classes"
        wrapped = bool(self._outer.first and self._inner.first and not self._outer.several)
        if not wrapped or (named and "train" in self._outer.splits.values()):
            return FolderLayout(self._outer.splits_at(self._uri), only_splits=only_splits)
        if self._bare:
            self._inner.add_picture(self._bare)
        splits = self._inner.splits_at(f"{self._uri}!{self._outer.first}")
        return FolderLayout(splits, self._outer.first if splits or not self._bare else "", only_splits)

    def find_targets(self, members: Iterable[Member]) -> None:
        """Find the link targets that exist, in a second pass, which is skipped if there are no links."""
        wanted = {self.links.resolved(link) for link in self.links.targets}
        if wanted:
            found = (name for member in members if not member.refused for name, _ in _beginnings(member.path))
            self.links.existing = {name for name in found if name in wanted}

    def damaged_member(self) -> Member:
        return Member(self.damage_path, kind="damage", refused=("uncounted_loss", self.damage))

    def as_json(self) -> SurveyFile:
        return {
            "splits": self.layout.splits,
            "wrapper": self.layout.wrapper,
            "only_splits": self.layout.only_splits,
            "targets": self.links.targets,
            "existing": sorted(self.links.existing),
            "damage": self.damage,
            "damage_path": self.damage_path,
        }

    @classmethod
    def from_json(cls, value: SurveyFile) -> "Survey":
        survey = cls(True)
        survey.layout = FolderLayout(value["splits"], value["wrapper"], value.get("only_splits", False))
        survey.links = Links(value["targets"], value["existing"])
        survey.damage, survey.damage_path = value["damage"], value["damage_path"]
        return survey

    def _see(self, member: Member) -> None:
        path = readable_id(member.path)
        folders = path.split("/") if member.kind == "folder" else path.split("/")[:-1]
        if member.refused or not folders or any(is_hidden(name) for name in folders):
            return
        is_picture = member.kind != "folder" and not refusal_by_name(path)
        self._outer.add(folders[0], is_picture)
        if len(folders) > 1:
            self._inner.add(folders[1], is_picture)
        elif is_picture:
            self._bare = self._bare or path


def refusal_by_name(path: str) -> Refused | None:
    """Why a file is not an image by its path alone; None if it may be one."""
    *folders, name = path.split("/")
    if is_hidden(name) or any(is_hidden(folder) for folder in folders):
        return "ignored_file", "hidden file or system file"
    ending = os.path.splitext(name)[1].lower()
    return ("ignored_file", f"not an image by its extension {ending}") if ending in _NO_PICTURE_ENDINGS else None


def readable_id(path: str) -> str:
    """A path as an example id: Unicode NFC."""
    return unicodedata.normalize("NFC", path.encode(errors="surrogateescape").decode(errors="replace"))


def is_picture(member: Member) -> bool:
    """Whether the bytes of a member should be read, by its name."""
    return refusal_by_name(member.path) is None


def _beginnings(path: str) -> Iterator[tuple[str, str]]:
    """(folder, rest) for every folder of a path from the top down, and the path itself: ('a', '/b'), ('a/b', '')."""
    at = path.find("/")
    while at >= 0:
        yield path[:at], path[at:]
        at = path.find("/", at + 1)
    yield path, ""


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX" or name.lower() in _SYSTEM_FILES
