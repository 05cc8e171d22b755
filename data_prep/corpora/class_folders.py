"""Class folders of any depth, or one archive of them: the path below the folder is the class, and the hierarchy.

Links, hidden files, AppleDouble files, empty files, foreign files, odd names and endings are ordinary life: what is
no picture by its name is listed as refused, everything else is judged by its content.
"""

import contextlib
import hashlib
import os
import posixpath
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from data_prep.config import ClassFolders, CorpusRecipe, TopFolders
from data_prep.corpora.archive_members import Member, link_target
from data_prep.corpora.archives import archive_kind, index, read_members, stretches
from data_prep.corpora.raw import ListedCorpus, Part, Place, RawExample, Spill, SplitRule
from data_prep.labels import ClassInfo
from infra.storage import checked_key, open_store

Refused = tuple[str, str]
_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "icon\r"})
# Files that lie beside pictures everywhere. Any other ending, and none, is judged by content.
_NO_PICTURE_ENDINGS = frozenset(
    "." + ending
    for line in (
        "txt md rst csv tsv json jsonl xml html htm css js py ipynb yaml yml toml ini log db sqlite lock",
        "pdf doc docx svg mat npy npz h5 pkl pt pth parquet arrow",
        "zip tar gz tgz bz2 xz 7z rar mp3 wav mp4 avi mov mkv",
    )
    for ending in line.split()
)
_SURVEY_KEY = "archive.json"
# Links among folders can multiply: so many names of one picture are looked at.
_MAX_NAMES = 64
_MAX_LINK_STEPS = 40


@dataclass(frozen=True, slots=True)
class Entry:
    """A file found: its path below the folder as the disk spells it, and why it is refused, if so."""

    path: str
    size: int = 0
    tag: str = ""
    """Another text when the file was replaced: mtime in ns, or ETag."""
    refused: Refused | None = None
    target: str | None = None
    """Path below the folder that a link gives a second label; such a link is refused itself."""


class ClassFolderCorpus(ListedCorpus):
    """A folder of class folders, local or in a store, or one archive of it.

    In an archive one folder that holds everything, and no picture directly, is the folder itself: `tar cf pets.tar pets`.
    Links in archives lead to other members only.
    """

    # So that the corpus is a task too: a setting is chosen on train -> val, and the last training takes both.
    views: Mapping[str, tuple[str, ...]] = {"trainval": ("train", "val")}

    def __init__(self, source: ClassFolders, recipe: CorpusRecipe) -> None:
        self._store, self._links, self._recipe = open_store(source.path), source.links, recipe
        self._top_folders = source.top_folders
        self.origin = self._store.uri
        self.single_label = source.links != "second_label"
        local = self.origin.startswith("file://")
        self._folder = Path(self.origin.removeprefix("file://")) if local else None
        self._archive: _Archive | None = None
        if archive_kind(self.origin) and not (self._folder and self._folder.is_dir()):
            self._archive = _Archive(self.origin, source, recipe)

    def fingerprint(self) -> str:
        if self._archive:
            return self._archive.fingerprint()
        digest = hashlib.sha256()
        for entry in self._walk():
            text = f"{entry.path}\0{entry.size}\0{entry.tag}\0{entry.refused}\n"
            digest.update(text.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def parts(self, place: Place) -> Iterator[Part]:
        return self._archive.parts(place) if self._archive else super().parts(place)

    def examples(self, part: Part, place: Place) -> Iterator[RawExample]:
        return self._archive.examples(part, place) if self._archive else super().examples(part, place)

    def listing(self, place: Place) -> Iterator[RawExample]:
        entries = self._walk()
        layout = Layout(self._split_folders(), only_splits=self._top_folders == "splits")
        split_rule = SplitRule(self._recipe, frozenset(layout.splits.values()))
        with_targets = self._walk() if self._folder and self._links == "second_label" else iter(())
        links = Links({entry.path: entry.target for entry in with_targets if entry.target})
        for entry in entries:
            names = [entry.path] if entry.refused else links.names_of(entry.path)
            example = layout.example(names, split_rule, entry.refused)
            key = example.example_id if entry.refused else entry.path
            yield replace(example, base=self.origin, key=key, num_bytes=entry.size)

    def class_info(self, source_id: str) -> ClassInfo:
        return ClassInfo(name=source_id, source_id=source_id, parents=tuple(source_id.split("/")[:-1]))

    def _split_folders(self) -> dict[str, str]:
        """Top-level folders that are splits. Raises ValueError where that is not certain."""
        tops = Tops(self._top_folders)
        if self._top_folders != "classes":
            for name, holds_pictures in self._folders_on_top() if self._folder else self._prefixes_on_top():
                tops.add(name, holds_pictures)
        return tops.splits_at(self.origin)

    def _folders_on_top(self) -> Iterator[tuple[str, bool]]:
        """Names of the folders and whether they hold a picture; behind the first that does and is no split: no."""
        folder, found = cast(Path, self._folder), False
        for child in sorted(os.scandir(folder), key=lambda child: child.name):
            is_dir = os.path.isdir(child.path) if child.is_symlink() else child.is_dir()  # false of links that go round
            if is_dir and not _hidden(child.name):
                stray = not found and child.name.lower() not in SplitRule.NAMES and not self._refused(child, child.name)
                holds_pictures = stray and self._holds_pictures(child)
                found |= holds_pictures
                yield child.name, holds_pictures

    def _holds_pictures(self, child: os.DirEntry[str]) -> bool:
        if child.is_symlink() and self._links == "second_label":
            return True
        above = frozenset({os.path.realpath(self._folder or ""), os.path.realpath(child.path)})
        entries = self._below(Path(child.path), f"{child.name}/", above)
        return any(not entry.refused or entry.target for entry in entries)

    def _prefixes_on_top(self) -> Iterator[tuple[str, bool]]:
        """As `_folders_on_top`, of objects: from the first picture that is in no split on, splits are asked for by name,
        as a list of all would cost a request a thousand objects."""
        for entry in self._walk():
            top, below, _ = entry.path.partition("/")
            if below and not _hidden(top):
                yield top, not entry.refused
                if not entry.refused and top.lower() not in SplitRule.NAMES:
                    break
        spellings = (spelt for word in SplitRule.NAMES for spelt in (word, word.capitalize(), word.upper()))
        for name in spellings:
            if any(True for _ in self._store.scan(f"{name}/")):
                yield name, True

    def _walk(self) -> Iterator[Entry]:
        if self._folder is None:
            return self._objects()
        if not self._folder.is_dir():
            raise ValueError(
                f"{self._folder} is no folder and no archive (.tar, .tar.gz, .tgz, .zip); "
                "name one that holds a folder of pictures per class."
            )
        return self._below(self._folder, "", frozenset({os.path.realpath(self._folder)}))

    def _objects(self) -> Iterator[Entry]:
        """The objects of a store, in its order."""
        found = False
        for listed in self._store.scan():
            found = True
            yield Entry(listed.key, listed.size, listed.tag, refusal_by_name(listed.key) or _no_key(listed.key))
        if not found:
            raise ValueError(
                f"{self.origin} holds no objects; name a prefix that holds a folder of pictures per class."
            )

    def _below(self, folder: Path, prefix: str, above: frozenset[str]) -> Iterator[Entry]:
        try:
            children = sorted(os.scandir(folder), key=lambda child: child.name)
        except PermissionError as error:
            yield Entry(prefix.rstrip("/"), refused=("uncounted_loss", f"folder: {error.strerror}"))
            return
        for child in children:
            path = prefix + child.name
            if refused := self._refused(child, path):
                yield Entry(path, refused=refused)
            elif child.is_symlink() and self._links == "second_label":
                yield self._second_label(child, path)
            elif child.is_dir():
                real = os.path.realpath(child.path)
                if real in above:
                    yield Entry(path, refused=("ignored_file", f"link to {real}, a folder that holds this one"))
                else:
                    yield from self._below(Path(child.path), path + "/", above | {real})
            else:
                status = child.stat()
                yield Entry(path, status.st_size, str(status.st_mtime_ns))

    def _refused(self, child: os.DirEntry[str], path: str) -> Refused | None:
        if _hidden(child.name):
            return "ignored_file", "hidden, or of the system"
        if child.is_symlink():
            if self._links == "skip":
                return "ignored_file", "symbolic link"
            if not os.path.exists(child.path):
                return "unreadable", f"link to {os.readlink(child.path)!r}, which does not exist"
        if child.is_dir():
            return None
        if not child.is_file():
            return "ignored_file", "neither file nor folder"
        return refusal_by_name(path) or _no_key(path)

    def _second_label(self, child: os.DirEntry[str], path: str) -> Entry:
        target = os.path.relpath(os.path.realpath(child.path), os.path.realpath(self._folder or ""))
        if target == ".." or target.startswith("../"):
            return Entry(path, refused=("ignored_file", f"link to {os.readlink(child.path)!r}, outside of the folder"))
        if target == "." or path.startswith(f"{target}/"):
            return Entry(path, refused=("ignored_file", f"link to {target}, a folder that holds this one"))
        return Entry(path, refused=("ignored_file", f"second label of {readable_id(target)}"), target=target)


class _Archive:
    """One archive of class folders: stretches of a tar or of a zip's directory, or a whole tar.gz, are parts."""

    def __init__(self, uri: str, source: ClassFolders, recipe: CorpusRecipe) -> None:
        folder, _, self._key = uri.rpartition("/")
        self._store, self._links, self._recipe = open_store(folder), source.links, recipe
        self._top_folders = source.top_folders
        self._kind = archive_kind(self._key)

    def fingerprint(self) -> str:
        for listed in self._store.scan(self._key):
            if listed.key == self._key:
                return hashlib.sha256(f"{listed.size}\0{listed.tag}".encode()).hexdigest()
        raise ValueError(
            f"{self._store.uri_of(self._key)} does not exist; name a folder or an archive of class folders."
        )

    def parts(self, place: Place) -> Iterator[Part]:
        self.fingerprint()  # raises where there is none
        if self._kind == "tar.gz":
            # No random access: one worker reads it, once for the layout (and once for links), once for the bytes.
            yield Part(
                name="000000", num_bytes=self._store.size(self._key), where={"start": 0, "end": None, "whole": True}
            )
            return
        survey = self._empty_survey()
        cut = list(stretches(survey.through(index(self._store, self._key)), place.examples_per_part))
        if not survey.num_members:
            raise ValueError(
                f"{self._store.uri_of(self._key)} holds no members{survey.damage and ': '}{survey.damage}. "
                "Name a folder, or an archive of class folders."
            )
        survey.find_targets(index(self._store, self._key))
        place.work.write_json(_SURVEY_KEY, survey.as_json())
        for number, stretch in enumerate(cut):
            where: dict[str, Any] = {"start": stretch.start, "end": stretch.end, "whole": stretch.whole}
            yield Part(name=f"{number:06d}", num_bytes=stretch.num_bytes, num_examples=stretch.num_members, where=where)

    def examples(self, part: Part, place: Place) -> Iterator[RawExample]:
        survey = self._survey(place)
        with contextlib.nullcontext() if self._kind == "tar" else Spill(place, part) as spill:
            damage = survey.damage_path if part.where["whole"] else ""
            stretch: Any = part.where
            for member, data in read_members(
                self._store, self._key, self._recipe.decode.max_bytes, **stretch, wanted=is_picture
            ):
                damage = "" if member.path == damage else damage
                yield from self._of_member(survey, member, data, spill)
            if damage:  # seen in the whole zip directory only
                yield from self._of_member(survey, survey.damaged_member(), None, spill)

    def _empty_survey(self) -> "Survey":
        return Survey(self._links != "skip", self._top_folders, self._store.uri_of(self._key))

    def _survey(self, place: Place) -> "Survey":
        if self._kind != "tar.gz":
            return Survey.from_json(place.work.read_json(_SURVEY_KEY))
        survey = self._empty_survey()
        for _ in survey.through(index(self._store, self._key)):
            pass
        survey.find_targets(index(self._store, self._key))
        return survey

    def _of_member(
        self, survey: "Survey", member: Member, data: bytes | None, spill: Spill | None
    ) -> Iterator[RawExample]:
        """The examples or the refusal that come of a member."""
        split_rule, layout = SplitRule(self._recipe, frozenset(survey.layout.splits.values())), survey.layout
        refused = member.refused or (None if member.kind == "folder" else refusal_by_name(member.path))
        if not refused and member.kind in ("link", "hard_link"):
            refused = self._of_link(survey.links, member)
        if refused:
            example = layout.example([member.path], split_rule, refused)
            yield replace(example, base=self._store.uri, key=self._key)
        elif member.kind == "file" and data is not None:
            names = [name for name in survey.links.names_of(member.path) if not refusal_by_name(name)]
            groups = [names] if self._links == "second_label" else [[name] for name in names]
            examples = [layout.example(group, split_rule, None) for group in groups]
            read = not all(example.refused for example in examples)
            locator = self._locator(member, data, spill if read else None)
            for example in examples:
                yield replace(example, **locator, data=None if example.refused else data)

    def _locator(self, member: Member, data: bytes, spill: Spill | None) -> dict[str, Any]:
        if member.offset is not None:
            return {"base": self._store.uri, "key": self._key, "offset": member.offset, "length": member.size}
        if spill is None or len(data) > self._recipe.decode.max_bytes:  # refused: never read again
            return {"base": self._store.uri, "key": self._key, "num_bytes": member.size}
        return {"base": spill.base, "key": spill.key, "offset": spill.keep(data), "length": len(data)}

    def _of_link(self, links: "Links", member: Member) -> Refused | None:
        """Why a link is no example; none: its examples come with the member that it leads to."""
        if self._links == "skip":
            return "ignored_file", "symbolic link" if member.kind == "link" else "hard link"
        target = link_target(member)
        if target is None:
            return "ignored_file", f"link to {member.target!r:.200}, outside of the archive"
        if member.path.startswith(f"{target}/"):
            return "ignored_file", f"link to {target}, a folder that holds this one"
        found = links.resolved(member.path)
        if found not in links.existing:
            return "unreadable", f"link to {member.target!r:.200}, which does not exist"
        return ("ignored_file", f"second label of {readable_id(found)}") if self._links == "second_label" else None


@dataclass(frozen=True)
class Layout:
    """How paths are read: the folder around everything, if there is one, and the folders below it that are splits."""

    splits: dict[str, str]
    wrapper: str = ""
    only_splits: bool = False
    """Whether what lies in no split folder is refused."""

    def example(self, names: list[str], split_rule: SplitRule, refused: Refused | None) -> RawExample:
        """The example of a file with these paths, without its place. Id and split are of the first, labels of all."""
        example_id = readable_id(names[0])
        labels = tuple(sorted({"/".join(classes) for name in names if (classes := self._read(readable_id(name))[1])}))
        named = self._read(example_id)[0]
        if self.only_splits and named is None and not refused:
            refused = ("ignored_file", f"in none of the split folders {', '.join(self.splits)}")
        if not labels and not refused:
            refused = ("no_label", "lies in no class folder")
        split = split_rule.place(example_id, named)
        return RawExample(example_id=example_id, labels=labels, split=split, base="", key="", refused=refused)

    def _read(self, example_id: str) -> tuple[str | None, list[str]]:
        """The split that is named, and the folders that are the class."""
        folders = example_id.split("/")[:-1]
        if self.wrapper and folders[:1] == [self.wrapper]:
            folders = folders[1:]
        split = self.splits.get(folders[0]) if folders else None
        return split, folders[1:] if split else folders


class Tops:
    """Top-level folders: splits all of them or none, unless `top_folders` says it, as a class may be called 'train'."""

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
            self._stray = self._stray or f"the folder {name!r}"

    def add_picture(self, path: str) -> None:
        """One beside the folders."""
        self._stray = self._stray or f"the picture {path!r}"

    def splits_at(self, uri: str) -> dict[str, str]:
        """The folders that are splits, `uri` being what holds them all. Raises ValueError where that is not certain."""
        found = set(self.splits.values())
        if self._top_folders == "splits":
            if "train" not in found:
                named = ", ".join(self.splits) or "no folder named so"
                raise ValueError(
                    f"source.top_folders is 'splits', but {uri} holds {named}: expected are train and, if there are any, "
                    "val and test at its top. Name the folder that holds them, or leave the setting out."
                )
            return self.splits
        if self._top_folders == "classes" or "train" not in found:
            return {}
        if self._stray and len(found) > 1:
            raise ValueError(
                f"{uri} holds {', '.join(self.splits)}, which are called as splits are, and beside them "
                f"{self._stray}, which is none. Take it away, or say what they are: with source.top_folders=splits they are "
                "splits and all else is left out, with source.top_folders=classes each is a class."
            )
        return {} if self._stray else self.splits


class Links:
    """Links of a source by their paths, and what each of them points to."""

    def __init__(self, targets: dict[str, str], existing: Iterable[str] = ()) -> None:
        self.targets, self.existing = targets, set(existing)
        self._by_target: dict[str, list[str]] = {}
        for link in sorted(targets):
            if not link.startswith(f"{targets[link]}/"):  # a folder that holds the link
                self._by_target.setdefault(targets[link], []).append(link)

    def names_of(self, path: str) -> list[str]:
        """Every path by which a file is reached, its own first: links to it, and to folders above it."""
        found: dict[str, tuple[str, ...]] = {path: ()}
        waiting = [path] if self._by_target else []
        while waiting:
            name = waiting.pop(0)
            for target, rest in _beginnings(name):
                through = (*found[name], target)
                for link in self._by_target.get(target, ()):
                    other = link + rest
                    around = any(link == folder or link.startswith(f"{folder}/") for folder in through)
                    if other not in found and not around and len(found) < _MAX_NAMES:
                        found[other] = through
                        waiting.append(other)
        return [*found]

    def resolved(self, path: str) -> str:
        """Where a path leads when links are followed; itself, if it passes none."""
        for _ in range(_MAX_LINK_STEPS):
            link = next((link for link, _ in _beginnings(path) if link in self.targets), None)
            if link is None:
                break
            path = posixpath.normpath(self.targets[link] + path[len(link) :])
        return path


class Survey:
    """What one pass over the headers of an archive tells: the layout, and the links. Memory: that of the links."""

    def __init__(self, with_links: bool, top_folders: TopFolders = "auto", uri: str = "") -> None:
        self.num_members, self.damage, self.damage_path = 0, "", ""
        self.layout, self.links = Layout({}), Links({})
        self._with_links, self._top_folders, self._uri = with_links, top_folders, uri
        self._outer, self._inner, self._bare = Tops(top_folders), Tops(top_folders), ""

    def through(self, members: Iterable[Member]) -> Iterator[Member]:
        """The same members; when they are through, the survey is made."""
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

    def _found_layout(self) -> Layout:
        """Raises ValueError where it is not certain."""
        only_splits, named = self._top_folders == "splits", self._top_folders != "classes"
        wrapped = bool(self._outer.first and self._inner.first and not self._outer.several)
        if not wrapped or (named and "train" in self._outer.splits.values()):
            return Layout(self._outer.splits_at(self._uri), only_splits=only_splits)
        if self._bare:
            self._inner.add_picture(self._bare)
        splits = self._inner.splits_at(f"{self._uri}!{self._outer.first}")
        return Layout(splits, self._outer.first if splits or not self._bare else "", only_splits)

    def find_targets(self, members: Iterable[Member]) -> None:
        """Which targets of links there are, by a second pass; none is made where there are no links."""
        wanted = {self.links.resolved(link) for link in self.links.targets}
        if wanted:
            found = (name for member in members if not member.refused for name, _ in _beginnings(member.path))
            self.links = Links(self.links.targets, {name for name in found if name in wanted})

    def damaged_member(self) -> Member:
        return Member(self.damage_path, kind="damage", refused=("uncounted_loss", self.damage))

    def as_json(self) -> dict[str, Any]:
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
    def from_json(cls, value: dict[str, Any]) -> "Survey":
        survey = cls(True)
        survey.layout = Layout(value["splits"], value["wrapper"], value.get("only_splits", False))
        survey.links = Links(value["targets"], value["existing"])
        survey.damage, survey.damage_path = value["damage"], value["damage_path"]
        return survey

    def _see(self, member: Member) -> None:
        path = readable_id(member.path)
        folders = path.split("/") if member.kind == "folder" else path.split("/")[:-1]
        if member.refused or not folders or any(_hidden(name) for name in folders):
            return
        is_picture = member.kind != "folder" and not refusal_by_name(path)
        self._outer.add(folders[0], is_picture)
        if len(folders) > 1:
            self._inner.add(folders[1], is_picture)
        elif is_picture:
            self._bare = self._bare or path


def refusal_by_name(path: str) -> Refused | None:
    """Why a file is no picture by its path alone."""
    *folders, name = path.split("/")
    if _hidden(name) or any(_hidden(folder) for folder in folders):
        return "ignored_file", "hidden, or of the system"
    ending = os.path.splitext(name)[1].lower()
    return ("ignored_file", f"no picture by its ending {ending}") if ending in _NO_PICTURE_ENDINGS else None


def readable_id(path: str) -> str:
    """A path as an example id: Unicode NFC."""
    return unicodedata.normalize("NFC", path.encode(errors="surrogateescape").decode(errors="replace"))


def is_picture(member: Member) -> bool:
    """Whether the bytes of a member are worth reading, by its name."""
    return refusal_by_name(member.path) is None


def _no_key(path: str) -> Refused | None:
    try:
        checked_key(path)
        path.encode()
    except ValueError as error:  # UnicodeEncodeError is one
        return "unreadable", f"file name: {error}"
    return None


def _beginnings(path: str) -> Iterator[tuple[str, str]]:
    """(folder, rest) for every folder of a path from the top down, and the path itself: ('a', '/b'), ('a/b', '')."""
    at = path.find("/")
    while at >= 0:
        yield path[:at], path[at:]
        at = path.find("/", at + 1)
    yield path, ""


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX" or name.lower() in _SYSTEM_FILES
