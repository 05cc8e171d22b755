"""The development kit of ILSVRC2012: its classes with names and hierarchy, and the labels of the validation images.

Layout: ILSVRC2012_devkit_t12/readme.txt of the kit.
"""

import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep.corpora.files.archives import read_members
from data_prep.corpora.files.matlab_file import read_mat
from data_prep.labels.classes import ClassInfo
from infra.storage import Store

KIT = "ILSVRC2012_devkit_t12.tar.gz"
_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
_MAX_KIT_FILE_BYTES = 64 << 20


def read_kit(store: Store) -> "Kit":
    """The kit in a folder. Raises ValueError where it is not what it should be."""
    texts: dict[str, bytes] = {}
    for member, data in read_members(
        store, KIT, _MAX_KIT_FILE_BYTES, wanted=lambda member: member.path.endswith((_TRUTH, _META))
    ):
        if data is not None:
            texts[_TRUTH if member.path.endswith(_TRUTH) else _META] = data
    uri = store.uri_of(KIT)
    if missing := {_TRUTH, _META} - texts.keys():
        raise ValueError(f"{uri} lacks {', '.join(sorted(missing))}; it is cut off, or another file. Fetch it again.")
    try:
        return Kit.parse(texts[_META], texts[_TRUTH])
    except ValueError as error:
        raise ValueError(f"{uri}: {error} Fetch it again.") from error


@dataclass(frozen=True)
class Synset:
    """One of the kit's synsets: its number, 1 to 1,000 for the classes and above for what they are kinds of."""

    number: int
    wnid: str
    words: str
    children: tuple[int, ...]
    is_class: bool
    """Nothing is a kind of it."""


@dataclass(frozen=True)
class Kit:
    """What the development kit tells: synsets by WNID, and the WNID of each validation image in turn."""

    by_wnid: dict[str, Synset]
    truth: list[str]

    @classmethod
    def parse(cls, meta: bytes, truth: bytes) -> "Kit":
        """From meta.mat and the ground truth. Raises ValueError where they are not what they should be."""
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
                raise ValueError(f"line {number} of {_TRUTH} is {text[:40]!r}, no number of a synset in {_META}.")
            labels.append(wnids[int(text)])
        if not labels:
            raise ValueError(f"{_TRUTH} has no labels.")
        return cls({synset.wnid: synset for synset in synsets}, labels)

    @functools.cached_property
    def classes(self) -> list[str]:
        """WNIDs of the classes, sorted: label ids as everyone counts them."""
        return sorted(synset.wnid for synset in self.by_wnid.values() if synset.is_class)

    def class_info(self, wnid: str) -> ClassInfo:
        """Name and hierarchy of a class; of a WNID that the kit lacks, the WNID alone."""
        synset = self.by_wnid.get(wnid)
        if synset is None:
            return ClassInfo(name=wnid, source_id=wnid)
        return ClassInfo(name=synset.words, source_id=wnid, parents=self.parents(synset))

    def parents(self, synset: Synset) -> tuple[str, ...]:
        """WNIDs from the root down to what the synset is a kind of; of several parents, the first by number."""
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


def _synset(row: dict[str, Any]) -> Synset:
    number, wnid, words, children = (row.get(name) for name in ("ILSVRC2012_ID", "WNID", "words", "children"))
    number, num_children = _whole(number), _whole(row.get("num_children"))
    if number is None or num_children is None or not isinstance(wnid, str) or not re.fullmatch(r"n[0-9]{8}", wnid):
        raise ValueError(
            f"{_META} has a synset of ILSVRC2012_ID {number!r:.40}, WNID {wnid!r:.40} and num_children {num_children}."
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
    """A number of one element; none: it is something else."""
    is_number = isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iuf"
    return int(value.item()) if is_number and math.isfinite(value.item()) else None
