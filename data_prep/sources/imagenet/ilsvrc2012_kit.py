"""The development kit of ILSVRC2012: classes with names and hierarchy, and the labels of the validation images.

The layout is described in ILSVRC2012_devkit_t12/readme.txt of the kit.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitline.data_prep.archives.archives import read_members
from vitline.data_prep.archives.matlab_file import read_mat
from vitline.data_prep.labels.classes import ClassInfo
from vitline.infra.storage import Store

KIT = "ILSVRC2012_devkit_t12.tar.gz"
_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
_MAX_KIT_FILE_BYTES = 64 << 20


def read_kit(store: Store) -> "Kit":
    """The kit in a folder. Raises ValueError if it is not as expected."""
    texts: dict[str, bytes] = {}
    for member, data in read_members(
        store, KIT, _MAX_KIT_FILE_BYTES, wanted=lambda member: member.path.endswith((_TRUTH, _META))
    ):
        if data is not None:
            texts[_TRUTH if member.path.endswith(_TRUTH) else _META] = data
    uri = store.uri_of(KIT)
    if missing := {_TRUTH, _META} - texts.keys():
        raise ValueError(
            f"{uri} lacks {', '.join(sorted(missing))}: it is truncated or another file. Download it again."
        )
    try:
        return Kit.parse(texts[_META], texts[_TRUTH])
    except ValueError as error:
        raise ValueError(f"{uri}: {error} Download it again.") from error


@dataclass(frozen=True)
class Synset:
    """A synset of the kit. Numbers 1 to 1,000 are classes, larger ones are their ancestors."""

    number: int
    wnid: str
    words: str
    children: tuple[int, ...]
    is_class: bool
    """Whether it has no children."""


@dataclass(frozen=True)
class Kit:
    """Content of the development kit: synsets by WNID, and the WNID of each validation image in order."""

    by_wnid: dict[str, Synset]
    truth: list[str]

    @classmethod
    def parse(cls, meta: bytes, truth: bytes) -> "Kit":
        """Parse meta.mat and the ground truth. Raises ValueError if they are not as expected."""
        rows = read_mat(meta).get("synsets")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{_META} has no struct array 'synsets'.")
        synsets = [_synset(row) for row in rows]
        wnids = {synset.number: synset.wnid for synset in synsets}
        if len(wnids) != len(rows) or len(set(wnids.values())) != len(rows):
            raise ValueError(f"{_META} has a synset twice.")
        labels: list[str] = []
        for number, line in enumerate(truth.decode("ascii", errors="replace").split("\n"), 1):
            text = line.strip()
            if not text:
                continue
            if len(labels) != number - 1 or not re.fullmatch(r"[0-9]{1,6}", text) or int(text) not in wnids:
                raise ValueError(
                    f"line {number} of {_TRUTH} is {text[:40]!r}, which is not the number of a synset in {_META}."
                )
            labels.append(wnids[int(text)])
        if not labels:
            raise ValueError(f"{_TRUTH} has no labels.")
        return cls({synset.wnid: synset for synset in synsets}, labels)

    @functools.cached_property
    def classes(self) -> list[str]:
        """WNIDs of the classes, sorted: the usual order of label ids."""
        return sorted(synset.wnid for synset in self.by_wnid.values() if synset.is_class)

    def class_info(self, wnid: str) -> ClassInfo:
        """Name and hierarchy of a class; the WNID alone if the kit lacks it."""
        synset = self.by_wnid.get(wnid)
        if synset is None:
            return ClassInfo(name=wnid, source_id=wnid)
        return ClassInfo(name=synset.words, source_id=wnid, parents=self.parents(synset))

    def parents(self, synset: Synset) -> tuple[str, ...]:
        """WNIDs of the ancestors from the root down; of several parents, the first by number."""
        path: list[str] = []
        above = self._parent_of.get(synset.number)
        while above is not None and above.wnid not in path:
            path.insert(0, above.wnid)
            above = self._parent_of.get(above.number)
        return tuple(path)

    @functools.cached_property
    def _parent_of(self) -> dict[int, Synset]:
        ordered = sorted(self.by_wnid.values(), key=lambda synset: synset.number, reverse=True)
        return {child: synset for synset in ordered for child in synset.children}


def _synset(row: Mapping[str, object]) -> Synset:
    number, wnid, words, children = (row.get(name) for name in ("ILSVRC2012_ID", "WNID", "words", "children"))
    number, num_children = _whole(number), _whole(row.get("num_children"))
    if number is None or num_children is None or not isinstance(wnid, str) or not re.fullmatch(r"n[0-9]{8}", wnid):
        raise ValueError(
            f"{_META} has an invalid synset: ILSVRC2012_ID {number!r:.40}, WNID {wnid!r:.40} and num_children {num_children}."
        )
    below = children.ravel().tolist() if isinstance(children, np.ndarray) and children.dtype.kind in "iuf" else []
    return Synset(
        number,
        wnid,
        words if isinstance(words, str) and words else wnid,
        tuple(int(child) for child in below if math.isfinite(child)),
        is_class=num_children == 0,
    )


def _whole(value: Any) -> int | None:
    """The number in an array of one element; None for anything else."""
    is_number = isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iuf"
    return int(value.item()) if is_number and math.isfinite(value.item()) else None
