"""Class names and label ids. A class map is a file: ordered names, source ids, hierarchy, digest."""

import itertools
from collections.abc import Iterable
from typing import TypedDict, cast

from vitline.infra.config import FrozenConfig, digest_of


class ClassInfo(FrozenConfig):
    """One class: its display name, its id in the source (a folder, a synset), and its ancestors in the hierarchy."""

    name: str
    source_id: str
    parents: tuple[str, ...] = ()
    """From the root of the hierarchy downwards, without the class itself."""


class ClassEntry(TypedDict):
    """A class in `classes.json`, `ClassInfo` as JSON."""

    name: str
    source_id: str
    parents: list[str]


class ClassesFile(TypedDict):
    """`classes.json` of a corpus."""

    digest: str
    classes: list[ClassEntry]


class ClassMap(FrozenConfig):
    """Classes in the order of their label ids."""

    classes: tuple[ClassInfo, ...]

    @classmethod
    def of(cls, classes: Iterable[ClassInfo]) -> "ClassMap":
        """Classes sorted by source id, so label ids depend only on the set of classes. Raises ValueError on a repeated id."""
        ordered = sorted(classes, key=lambda info: info.source_id)
        for before, after in itertools.pairwise(ordered):
            if before.source_id == after.source_id:
                raise ValueError(f"Two classes have the source id {after.source_id!r}: {before.name}, {after.name}.")
        return cls(classes=tuple(ordered))

    @property
    def digest(self) -> str:
        return digest_of(self.classes)

    @property
    def source_ids(self) -> list[str]:
        return [info.source_id for info in self.classes]

    def label_ids(self) -> dict[str, int]:
        """The label id of every source id."""
        return {info.source_id: label_id for label_id, info in enumerate(self.classes)}

    def as_file(self) -> ClassesFile:
        """Content of classes.json."""
        classes = [cast(ClassEntry, info.model_dump(mode="json")) for info in self.classes]
        return {"digest": self.digest, "classes": classes}


def number_label(number: int) -> str:
    """Label of a class that is only a number: padded with zeros, so that sorted labels are in numerical order."""
    return f"{number:06d}"
