"""Icons of open sets, drawn in white on black at 64 pixels; the class is what an icon shows: its name without the words for style and size.

Pre-training and the task share neither a set nor a class, so the task asks for other things, drawn by other hands. Variants of an
icon (outlined, filled) and icons that are equal once they are drawn are one group. A group is in one split of the task, and no group
of the task is in pre-training.
"""

import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from vitline.data_prep.config import CorpusRecipe, Icons
from vitline.data_prep.examples.drawings import DrawnCorpus, Shape, draw
from vitline.data_prep.examples.npm_package import NpmPackage, fetch_packages
from vitline.data_prep.examples.packed_files import PackedFile
from vitline.data_prep.sources.raw import RawExample, WorkFolder
from vitline.data_prep.sources.splits import filled_splits, hashed_split
from vitline.infra.storage import Store

VARIANTS = 2
"""So many variants of an icon at most: further ones hardly differ, such as six widths of its lines."""
_MIN_SETS = {"task": 16, "pretrain": 8}
_VAL_FRACTION = 0.05
_DATA = "icons.json"
_STYLE = re.compile(
    r"-(bold|broken|duo|duotone|fill|filled|light|line|linear|outline|outlined|regular|round|rounded|sharp|solid|thin|twotone|\d+)$"
)
_STYLE_IN_FRONT = re.compile(r"^(baseline|bx|bxs|ios|md|outline|round|sharp|twotone)-")


@dataclass(frozen=True)
class IconSet:
    """A set of icons as Iconify publishes it on npm."""

    name: str
    role: Literal["pretrain", "task"]
    package: NpmPackage
    credit: str


@cache
def icon_sets() -> tuple[IconSet, ...]:
    """All sets, by role and name."""
    with Path(__file__).with_name("icon_sets.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            IconSet(
                name=row["set"],
                role="task" if row["role"] == "task" else "pretrain",
                package=NpmPackage(name=f"@iconify-json/{row['set']}", version=row["version"], sha256=row["sha256"]),
                credit=f"{row['name']}, {row['author']}, {row['licence']}",
            )
            for row in csv.DictReader(file)
        )


class _SetData(TypedDict):
    """icons.json, as far as it is read here. Sizes hold for icons without their own."""

    icons: dict[str, Shape]
    width: NotRequired[float]
    height: NotRequired[float]


@dataclass(frozen=True)
class Icon:
    """An icon: its set, and its name there."""

    set: str
    name: str

    @property
    def id(self) -> str:
        return f"{self.set}/{self.name}"

    @property
    def shows(self) -> str:
        """What it shows: `home` for `home-outline`, `outline-home` and `home-24-filled`."""
        name = self.name
        for style in (_STYLE, _STYLE_IN_FRONT):
            while (shorter := style.sub("", name)) != name:
                name = shorter
        return name

    @property
    def variants(self) -> str:
        """What all variants of this icon share."""
        return f"{self.set}/{self.shows}"


class IconCorpus(DrawnCorpus):
    """The sets of one role, as the pre-training corpus or as a task."""

    name = "icons"

    def __init__(self, source: Icons, recipe: CorpusRecipe) -> None:
        super().__init__(source.cache)
        self._source = source
        mine = [found for found in icon_sets() if found.role == source.role]
        self.packages = f"{len(icon_sets())} sets of icons"
        self.origin = f"{len(mine)} icon sets of npm:@iconify-json"
        self.credit = "; ".join(found.credit for found in mine)
        if source.role == "task":
            train, val = f"train{source.num_train}", f"val{source.num_val}"
            self.views = {train: ("train",), val: ("val",), train + val: ("train", "val")}

    @staticmethod
    def made_from() -> tuple[list[str], tuple[Any, ...]]:
        rule = (VARIANTS, sorted(_MIN_SETS.items()), _STYLE.pattern, _STYLE_IN_FRONT.pattern)
        return [found.package.sha256 for found in icon_sets()], rule

    @staticmethod
    def draw_all(cache: Store) -> Iterator[tuple[str, bytes]]:
        data = {found.name: _icons_json(cache, found.package, files[_DATA]) for found, files in _fetched_sets(cache)}
        for icon in choose_icons({name: found["icons"] for name, found in data.items()}):
            found = data[icon.set]
            yield icon.id, draw(found["icons"][icon.name], found.get("width", 16), found.get("height", 16))

    def listing(self, work: WorkFolder) -> Iterator[RawExample]:
        source, cache = self._source, self.cache_below(work.root)
        files = {Icon(*file.name.split("/", 1)): file for file in self.files(cache)}
        groups = group_icons({icon: file.sha256 for icon, file in files.items()})
        task = {found.name for found in icon_sets() if found.role == "task"}
        sizes = Counter(groups[icon.variants] for icon in files if icon.set in task)
        splits = filled_splits(sizes, source.num_val, source.num_train) if source.role == "task" else {}
        for icon, file in files.items():
            group = groups[icon.variants]
            if (icon.set in task) == (source.role == "task") and not (source.role == "pretrain" and group in sizes):
                split = splits.get(group) or hashed_split(group, _VAL_FRACTION, 0.0)
                yield self.example(cache, file, icon.shows, split, group)


def choose_icons(names: Mapping[str, Iterable[str]]) -> list[Icon]:
    """What at least 16 sets of the task show, and of the rest what at least 8 sets of pre-training show.

    `names`: the names of the icons of each set. Ordered by role, by what they show, then by set; of each icon the variants with the
    shortest names.
    """
    shown: defaultdict[str, defaultdict[str, list[Icon]]] = defaultdict(lambda: defaultdict(list))
    for set_name, icons in names.items():
        for icon in (Icon(set_name, name) for name in icons):
            shown[icon.shows][set_name].append(icon)
    chosen = list[Icon]()
    taken = set[str]()
    for role, min_sets in _MIN_SETS.items():
        mine = {found.name for found in icon_sets() if found.role == role}
        for thing in sorted(shown.keys() - taken):
            sets = sorted(mine & shown[thing].keys())
            if len(sets) >= min_sets:
                taken.add(thing)
                for name in sets:
                    chosen += sorted(shown[thing][name], key=lambda icon: (len(icon.name), icon.name))[:VARIANTS]
    return chosen


def group_icons(sha256: Mapping[Icon, str]) -> dict[str, str]:
    """The group of all variants of an icon, named by one of them: those of two icons are joined if two of them are equal.

    `sha256`: of the PNG of each icon.
    """
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    first: dict[str, str] = {}
    for icon, digest in sha256.items():
        low, high = sorted((root(icon.variants), root(first.setdefault(digest, icon.variants))))
        parent[high] = low
    return {name: root(name) for name in parent}


def _fetched_sets(cache: Store) -> Iterator[tuple[IconSet, dict[str, PackedFile]]]:
    packages = [found.package for found in icon_sets()]
    return zip(icon_sets(), fetch_packages(packages, cache, lambda name: name == _DATA), strict=True)


def _icons_json(cache: Store, package: NpmPackage, file: PackedFile) -> _SetData:
    data: _SetData = json.loads(cache.read(package.members_key, file.offset, file.offset + file.length))
    return data
