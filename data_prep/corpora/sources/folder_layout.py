"""Interprets paths of class folders: which top-level folders are splits, what the class is, and where links lead."""

import os
import posixpath
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, NotRequired, TypedDict

from data_prep.config import TopFolders
from data_prep.corpora.files.archive_members import Member, link_target
from data_prep.corpora.raw import RawExample, SplitRule

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
# Links between folders can multiply: besides the links to the file itself, at most this many names of an image are considered.
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
    """The paths that lead to a file, and whether there are more, because of links between folders."""

    paths: list[str]
    more: bool

    def refusal(self) -> Refused:
        return "ignored_file", (
            f"links to folders give {self.paths[0]} more than {len(self.paths):,} names; the others are ignored"
        )


class Links:
    """Links of a source with their targets."""

    def __init__(self, targets: dict[str, str], existing: Iterable[str] = ()) -> None:
        self.targets, self.existing = targets, set(existing)
        self._by_target: dict[str, list[str]] = {}
        self._by_file: dict[str, list[str]] = {}  # links that lead to it, directly or through others
        for link in sorted(targets):
            self._by_file.setdefault(self.resolved(link), []).append(link)
            if not link.startswith(f"{targets[link]}/"):  # skip links to a folder that contains the link
                self._by_target.setdefault(targets[link], []).append(link)

    def names_of(self, path: str) -> Names:
        """The paths that lead to a file: its own, all links to it, and up to _MAX_NAMES that go through links to folders
        above it."""
        found: dict[str, tuple[str, ...]] = dict.fromkeys([path, *self._by_file.get(path, ())], ())
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
                        return Names([*found], more=True)
                    found[other] = through
                    waiting.append(other)
        return Names([*found], more=False)

    def resolved(self, path: str) -> str:
        """The path after following links (up to _MAX_LINK_STEPS); the path itself if it has none."""
        for _ in range(_MAX_LINK_STEPS):
            link = next((link for link, _ in _beginnings(path) if link in self.targets), None)
            if link is None:
                break
            path = posixpath.normpath(self.targets[link] + path[len(link) :])
        return path


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
            self.links = Links(self.links.targets, {name for name in found if name in wanted})

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
