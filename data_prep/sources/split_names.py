"""Splits in the names of folders and files: what one name says, what the names beside each other say together, and patterns of paths.

One name proves nothing: `train` may be a class, `lab-test-photos` a folder of photos. Only the names of all folders of one level, or of
all files of a source, say what is a split.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from vitline.data_prep.sources.raw import SplitRule

_OTHER_SETS = frozenset(
    {"pred", "preds", "prediction", "predictions", "unlabeled", "unlabelled", "unsupervised", "extra"}
    | {"holdout", "query", "gallery"}
)
_FILLERS = frozenset(
    {"of", "set", "sets", "data", "dataset", "split", "folder", "image", "images", "img", "imgs", "picture"}
    | {"pictures", "photo", "photos", "jpg", "jpeg", "png"}
)
_SETS = "|".join(sorted({*SplitRule.NAMES, *_OTHER_SETS}, key=len, reverse=True))
_GLUED = re.compile(rf"(?:{'|'.join(_FILLERS)})?({_SETS})(?:{'|'.join(_FILLERS)})?")
_HASH = re.compile(r"-[0-9a-f]{12,}$")  # train-00000-of-00001-b42c55aff497b4a3.parquet


class SplitWord(NamedTuple):
    """What one name says: `seg_train` is word and split `train`, rest `seg`."""

    word: str
    split: str | None
    """None: a set of images that is no split, such as `seg_pred`."""
    rest: tuple[str, ...]
    """The other words. Numbers, and words that any set may have (images, set), do not count."""


class Reading(NamedTuple):
    """What names beside each other say together."""

    splits: dict[str, str]
    """Split by name, where all of them are certain; empty: the names are no splits."""
    doubt: str = ""
    """Why neither is certain."""


def split_word(name: str) -> SplitWord | None:
    """The first word of a name that is the name of a split or of another set of images; None if there is none."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", _HASH.sub("", name)).lower()
    found, rest = "", []
    for token in re.split(r"[\W\d_]+", spaced):
        if not found and (word := _GLUED.fullmatch(token)):
            found = word[1]
        elif token and token not in _FILLERS:
            rest.append(token)
    return SplitWord(found, SplitRule.NAMES.get(found), tuple(rest)) if found else None


def is_filler(name: str) -> bool:
    """Whether a name says only that it holds images, such as `images` or `img_data`."""
    return all(token in _FILLERS for token in re.split(r"[\W\d_]+", name.lower()) if token) and name[:1].isalpha()


def read_names(names: Collection[str], what: str = "folder") -> Reading:
    """What the names of one level say; `what` they name. A split besides train needs train beside it, named in the same way."""
    words = {name: word for name in names if (word := split_word(name))}
    named = {name: word for name, word in words.items() if word.split}
    shown = ", ".join([*named][:5])
    if not any(word.split == "train" for word in named.values()):
        alone = len(named) == len(names) and any(not word.rest for word in named.values())
        return Reading({}, f"{shown} would be val or test, and nothing beside it names train" if alone else "")
    by_rest: dict[tuple[str, ...], set[str | None]] = {}
    for word in named.values():
        by_rest.setdefault(word.rest, set()).add(word.split)
    several = any("train" in splits and len(splits) > 1 for splits in by_rest.values())
    if stray := next((name for name in names if name not in words), ""):  # a lone train beside others is one of them
        return Reading({}, f"holds {shown}, which are names of splits, but also {what} {stray!r}" if several else "")
    if other := next((name for name in names if name not in named), ""):
        return Reading(
            {}, f"holds {shown}, which name splits, but also {what} {other!r}, which names a set that is no split"
        )
    if all(word.split == "train" for word in named.values()) and [*by_rest] != [()]:  # classes, such as steam_train
        return Reading({})
    if len(by_rest) > 1:
        return Reading({}, f"holds {shown}, which name splits in different ways")
    spelt: dict[str, str] = {}
    for name, word in named.items():
        first = spelt.setdefault(str(word.split), name)
        if named[first].word != word.word:
            return Reading({}, f"holds {first} and {name}, which would both be {word.split}")
    return Reading({name: str(word.split) for name, word in named.items()})


class SplitPatterns:
    """Splits by the first names of a path. In a pattern, `*` is any name and stays part of what follows, such as a class;
    other names, which may contain `*` and `?`, are taken away."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        found = [(tuple(pattern.strip("/").split("/")), split) for pattern, split in patterns.items()]
        self._patterns = sorted(found, key=lambda each: (-len(each[0]), each[0].count("*"), each[0]))

    def match(self, names: Sequence[str]) -> tuple[str, list[str]] | None:
        """The split, and the names that remain; None if no pattern matches."""
        for pattern, split in self._patterns:
            if len(pattern) <= len(names) and all(map(fnmatchcase, names, pattern)):
                kept = [name for name, wanted in zip(names, pattern, strict=False) if wanted == "*"]
                return split, [*kept, *names[len(pattern) :]]
        return None
