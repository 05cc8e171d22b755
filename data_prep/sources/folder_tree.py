"""Understands a tree of class folders: which folders are splits, which surround everything, and which are classes.

What is certain is recognised: folders of one level whose names say together that they are splits (`train`/`val`, `seg_train`/`seg_test`,
`training_set`/`test_set`), below folders that surround everything, or in every class (`cats/train`, `dogs/train`). What is not certain
is a ValueError with the setting that answers. The tree is that of the images alone, so a folder, a prefix of a store and an archive
of the same images are understood alike.
"""

import glob
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vitline.data_prep.archives.archive_members import Member, RepeatedNames, link_target
from vitline.data_prep.config import ClassFolders
from vitline.data_prep.sources.folder_layout import (
    FolderLayout,
    Links,
    beginnings,
    readable_id,
    refusal_by_name,
)
from vitline.data_prep.sources.split_names import SplitPatterns, SplitWord, is_filler, read_names, split_word

_ANSWERS = (
    "Move what does not belong there, or choose: with source.top_folders=splits folders with such names are splits and everything else is "
    "left out; with source.top_folders=classes names have no special meaning; "
    '--set \'source.splits={"FOLDER": "train"}\' says which folders are which splits, and leaves out the others.'
)


class FolderTree:
    """The folders that hold images. Memory: these folders, not the images."""

    def __init__(self) -> None:
        self._num_images = Counter[str]()

    def add(self, path: str) -> None:
        """An image."""
        self._num_images[readable_id(path).rpartition("/")[0]] += 1

    def add_links(self, links: Links) -> None:
        """Links to images and to folders, which give their images further paths."""
        folders = dict(self._num_images)
        above = {name for folder in folders for name, _ in beginnings(folder)}
        for link in links.targets:
            target = links.resolved(link)
            if target is None or target not in above:
                self.add(link)
                continue
            for folder, number in folders.items():
                if folder == target or folder.startswith(f"{target}/"):
                    self._num_images[readable_id(link + folder[len(target) :])] += number

    def layout(self, source: ClassFolders, uri: str) -> FolderLayout:
        """How paths are to be read. Raises ValueError if that is not certain and the source does not say it."""
        root = _Node.of(self._num_images)
        splits = dict[str, str](source.splits)
        for pattern in splits:
            one = SplitPatterns({pattern: ""})
            if not any(one.match(folder.split("/")) for folder in self._num_images):
                raise ValueError(
                    f"source.splits names {pattern!r}, but {uri} has no such folder with images. Its folders are "
                    f"{', '.join([*root.children][:20])}. Give paths below the source."
                )
        if not splits and source.top_folders != "classes":
            splits = _split_folders(root, source.top_folders == "splits", uri)
        only_splits = bool(source.splits) or source.top_folders == "splits"
        layout = FolderLayout(splits, "" if splits else _wrapper(root), only_splits=only_splits)
        return self._described(self._without_container(layout), uri)

    def _classes(self, layout: FolderLayout) -> dict[str, Counter[str]]:
        """Images of each class of each split, "" for none."""
        found: dict[str, Counter[str]] = {}
        for folder, number in self._num_images.items():
            split, names = layout.read(folder.split("/") if folder else [])
            if split or not layout.splits:
                found.setdefault(split or "", Counter())["/".join(names)] += number
        return found

    def _without_container(self, layout: FolderLayout) -> FolderLayout:
        """The layout without the last folder of every path, if that is the same everywhere and says only `images`."""
        classes = {name for names in self._classes(layout).values() for name in names}
        last = {name.rpartition("/")[2] for name in classes}
        if len(last) != 1 or not is_filler(name := last.pop()):
            return layout
        outside = [each for each in classes if "/" not in each]
        return (
            layout
            if len(outside) == len(classes) or (outside and not layout.splits)
            else replace(layout, container=name)
        )

    def _described(self, layout: FolderLayout, uri: str) -> FolderLayout:
        """The layout with its description. Raises ValueError if splits were recognised that have no class in common."""
        classes = self._classes(layout)
        if layout.splits and not layout.only_splits:
            _check_classes(classes, layout.splits, uri)
        places = layout.splits or {layout.wrapper: ""}
        parts = []
        for place, split in places.items():
            names = [place.replace("*", "<class>")] if "*" in place else [place, "<class>"]
            shown = "/".join(name for name in (*names, layout.container) if name)
            num_classes, num_images = len(+classes.get(split, Counter())), classes.get(split, Counter()).total()
            parts.append(f"{shown}{f' is {split}' if split else ''} ({num_classes:,} classes, {num_images:,} files)")
        return replace(layout, description="; ".join(parts) + ("" if layout.splits else "; no folder is a split"))


def _check_classes(classes: Mapping[str, Counter[str]], splits: Mapping[str, str], uri: str) -> None:
    with_classes = {place: split for place, split in splits.items() if any(classes[split])}
    for split, found in classes.items():
        if not any(found):
            answer = f"leave them out: --set 'source.splits={json.dumps(with_classes)}'"
            raise ValueError(
                f"{uri}: {found.total():,} images are in {split}, but in no class folder. If a file lists their labels, make it a "
                "table (source kind 'table'), or sort the images into class folders, or "
                f"{answer if with_classes else 'set source.top_folders=classes, if the folders are classes'}."
            )
        if split != "train" and found.keys().isdisjoint(classes["train"]):
            raise ValueError(
                f"{uri}: {split} and train have no class in common: {min(found)!r} is in {split}, {min(classes['train'])!r} in train. "
                f"{_ANSWERS}"
            )


@dataclass
class _Node:
    """A folder: its images, and the folders in it that hold images at any depth."""

    num_images: int = 0
    children: dict[str, "_Node"] = field(default_factory=dict)

    @classmethod
    def of(cls, num_images: Mapping[str, int]) -> "_Node":
        root = cls()
        for folder in sorted(num_images):
            node = root
            for name in folder.split("/") if folder else ():
                node = node.children.setdefault(name, cls())
            node.num_images += num_images[folder]
        return root

    def only(self) -> tuple[str, "_Node"] | None:
        """The only folder, if there is one."""
        return next(iter(self.children.items())) if len(self.children) == 1 else None

    def below(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], "_Node"]]:
        waiting = [(path, self)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            waiting += [((*path, name), child) for name, child in node.children.items()]


def _wrapper(root: _Node) -> str:
    """The folders that surround all class folders, as `pets` in pets/cat/1.jpg and pets/dog/2.jpg."""
    names, node = list[str](), root
    while (only := node.only()) and only[1].children and not only[1].num_images:
        names.append(only[0])
        node = only[1]
    return "/".join(names)


def _split_folders(root: _Node, only_splits: bool, uri: str) -> dict[str, str]:
    """Patterns of the folders that are splits. Raises ValueError if that is not certain."""
    path, node = tuple[str, ...](), root
    while node.children:
        place = "/".join((uri.rstrip("/"), *path))
        reading = read_names(node.children)
        named = {n: str(word.split) for n in node.children if (word := split_word(n)) and word.split}
        if only_splits and "train" in named.values():
            return _deepened(path, node, named)
        if not only_splits and reading.doubt:
            raise ValueError(f"{place}: {reading.doubt}. {_ANSWERS}")
        if not only_splits and reading.splits:
            found = _deepened(path, node, reading.splits)
            _check_no_others(node, path, uri)
            return found
        if not (only := node.only()):
            if only_splits:
                raise ValueError(
                    f"source.top_folders is 'splits', but {place} holds {', '.join(named) or 'no such folders'}; "
                    "its top level must have train and, optionally, val and test. Give the folder that holds them, leave "
                    "source.top_folders out, or name the folders in source.splits."
                )
            _check_lone_train(node, place)
            break
        path, node = (*path, only[0]), only[1]
    return {} if only_splits else _splits_in_classes(node, path, uri)


def _deepened(path: tuple[str, ...], node: _Node, splits: Mapping[str, str]) -> dict[str, str]:
    """Patterns of split folders, with folders in them that repeat the split (`seg_train/seg_train`), or that surround the classes of
    every split and say only `images`."""
    ends = dict[tuple[str, ...], tuple[_Node, str]]()
    for name, split in splits.items():
        names: tuple[str, ...] = (name,)
        child = node.children[name]
        while (only := child.only()) and not child.num_images and (word := split_word(only[0])) and word.split == split:
            names, child = (*names, only[0]), only[1]
        ends[names] = child, split
    inner = [child.only() for child, _ in ends.values()]
    container = inner[0][0] if inner[0] and is_filler(inner[0][0]) else ""
    if not all(each and each[0] == container and each[1].children and not each[1].num_images for each in inner):
        container = ""
    return {_pattern((*path, *names, *([container] if container else []))): split for names, (_, split) in ends.items()}


def _splits_in_classes(top: _Node, path: tuple[str, ...], uri: str) -> dict[str, str]:
    """Patterns of splits in every class, as cats/train and dogs/train. Raises ValueError if only some classes have them."""
    level, depth = [*top.children.values()], 1
    while level and all(node.children and not node.num_images for node in level):
        splits = read_names({name for node in level for name in node.children}).splits
        if len({*splits.values()}) > 1 and all("train" in {splits[name] for name in node.children} for node in level):
            return {_pattern((*path, *[None] * depth, name)): split for name, split in splits.items()}
        level, depth = [child for node in level for child in node.children.values()], depth + 1
    _check_no_others(top, path, uri)
    return {}


def _check_lone_train(node: _Node, place: str) -> None:
    """Raises ValueError for a folder `train` beside another one with the same folders in it: a class has folders of its own."""
    train = next((name for name in node.children if split_word(name) == SplitWord("train", "train", ())), None)
    for name, child in node.children.items() if train else ():
        if name != train and (shared := child.children.keys() & node.children[str(train)].children.keys()):
            raise ValueError(
                f"{place} holds {train}, the name of a split, and {name!r}, in which there are the same folders, such as {min(shared)!r}. "
                f"{_ANSWERS}"
            )


def _check_no_others(top: _Node, path: tuple[str, ...], uri: str) -> None:
    """Raises ValueError for folders below `top` that look like splits and were not recognised."""
    for at, node in top.below(path):
        if node is not top and len({*read_names(node.children).splits.values()}) > 1:
            place = "/".join((uri.rstrip("/"), *at))
            raise ValueError(
                f"{place} holds {', '.join(node.children)}, which are names of splits, where folders of classes are. {_ANSWERS}"
            )


def _pattern(names: tuple[str | None, ...]) -> str:
    """A pattern of a path; None: any name."""
    return "/".join("*" if name is None else glob.escape(name) for name in names)


class ArchiveIndex:
    """Layout, links and repeated names of an archive, from one pass over its headers. Memory: folders, links, 16 bytes a name."""

    def __init__(self, source: ClassFolders, uri: str) -> None:
        self.num_members, self.damage, self.damage_path = 0, "", ""
        self.layout, self.links, self.names = FolderLayout(), Links({}), RepeatedNames()
        self._source, self._uri = source, uri

    def through(self, members: Iterable[Member]) -> Iterator[Member]:
        """Yields the same members; the survey is complete after the last one. Raises ValueError if the layout is not certain."""
        targets, hard, tree = dict[str, str](), list[str](), FolderTree()
        for member in members:
            if member.kind == "damage":
                self.damage, self.damage_path = (member.refused or ("", ""))[1], member.path
            else:
                self.num_members += 1
                if member.kind != "folder":
                    self.names.add(member.path, member.header)
                if member.refused or refusal_by_name(member.path):
                    pass
                elif member.kind == "file":
                    tree.add(member.path)
                elif self._source.links != "skip" and member.kind != "folder" and (target := link_target(member)):
                    targets[member.path] = target
                    hard += [member.path] if member.kind == "hard_link" else []
            yield member
        self.links = Links(targets, hard=hard)
        tree.add_links(self.links)
        self.layout = tree.layout(self._source, self._uri)

    def find_targets(self, members: Iterable[Member]) -> None:
        """Find the link targets that exist, in a second pass, which is skipped if there are no links."""
        wanted = {self.links.resolved(link) for link in self.links.targets}
        if wanted:
            found = (name for member in members if not member.refused for name, _ in beginnings(member.path))
            self.links.existing = {name for name in found if name in wanted}

    def damaged_member(self) -> Member:
        return Member(self.damage_path, kind="damage", refused=("uncounted_loss", self.damage))

    def as_json(self) -> dict[str, Any]:
        """For the work folder."""
        return {
            "layout": asdict(self.layout),
            "targets": self.links.targets,
            "existing": sorted(self.links.existing),
            "hard": sorted(self.links.hard),
            "damage": self.damage,
            "damage_path": self.damage_path,
            "repeated": {str(name): place for name, place in self.names.firsts().items()},
        }

    @classmethod
    def from_json(cls, source: ClassFolders, uri: str, value: Mapping[str, Any]) -> "ArchiveIndex":
        survey = cls(source, uri)
        survey.layout = FolderLayout(**value["layout"])
        survey.links = Links(value["targets"], value["existing"], value["hard"])
        survey.damage, survey.damage_path = value["damage"], value["damage_path"]
        survey.names = RepeatedNames({int(name): place for name, place in value["repeated"].items()})
        return survey
