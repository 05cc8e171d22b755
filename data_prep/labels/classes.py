"""Class names and label ids. A class map is a file: ordered names, source ids, hierarchy, digest."""

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, cast

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
        """Classes sorted by source id, so label ids depend only on the set of classes; by value, where all are numbers and some have
        a decimal point. Raises ValueError on a repeated id and on two spellings of one."""
        ordered = sorted(classes, key=lambda info: info.source_id)
        numbers = [_NUMBER.fullmatch(info.source_id) for info in ordered]
        if all(numbers) and any(number and number["fraction"] for number in numbers):
            ordered.sort(key=lambda info: float(info.source_id))
        for before, after in itertools.pairwise(ordered):
            if before.source_id == after.source_id:
                raise ValueError(f"Two classes have the source id {after.source_id!r}: {before.name}, {after.name}.")
        require_one_spelling(info.source_id for info in ordered)
        return cls(classes=tuple(ordered))

    @classmethod
    def from_file(cls, content: Mapping[str, Any]) -> "ClassMap":
        """From the content of classes.json."""
        return cls.model_validate({"classes": content["classes"]})

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


_NUMBER = re.compile(r"\+?(?P<sign>-?)0*(?P<whole>[0-9]+)(?:\.(?P<fraction>[0-9]+))?")
_JOINERS = "\u200c\u200d"  # invisible, too, but part of words and emoji


def require_one_spelling(labels: Iterable[str]) -> None:
    """Raises ValueError if two labels differ in nothing that a reader sees or counts: `1` and `1.0`, `cat` and `cat` behind a byte
    order mark."""
    found = dict[str, str]()
    for label in labels:
        first = found.setdefault(_as_read(label), label)
        if first != label:
            raise ValueError(
                f"The labels {first!r} and {label!r} are two spellings of one, which would be two classes. Write it one way in "
                "the source and prepare again."
            )


def _as_read(label: str) -> str:
    """A label without invisible characters, repeated spaces, and zeros that do not change a number."""
    if number := _NUMBER.fullmatch(label):
        fraction = (number["fraction"] or "").rstrip("0")
        return f"{number['sign']}{number['whole'].lstrip('0') or '0'}.{fraction}"
    seen = "".join(c for c in label if c in _JOINERS or unicodedata.category(c) != "Cf")
    return " ".join(seen.split())


def number_label(number: int) -> str:
    """Label of a class that is only a number: padded with zeros, so that sorted labels are in numerical order."""
    return f"{number:06d}"
