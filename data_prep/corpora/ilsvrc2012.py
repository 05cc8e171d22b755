"""ImageNet-1k (ILSVRC2012) as it is distributed: two archives of images, and the development kit with the labels.

Layouts: ILSVRC2012_devkit_t12/readme.txt of the kit.
"""

import functools
import hashlib
import math
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_prep.config import CorpusRecipe, Ilsvrc2012
from data_prep.corpora.archive_members import Member
from data_prep.corpora.archives import index, read_members, stretches
from data_prep.corpora.class_folders import is_picture, readable_id, refusal_by_name
from data_prep.corpora.imagenet21k import SynsetTars, refused_tars, synset_examples, synset_part
from data_prep.corpora.matlab_file import read_mat
from data_prep.corpora.raw import Part, Place, RawCorpus, RawExample, SplitRule
from data_prep.labels import ClassInfo
from infra.storage import open_store

TRAIN, VAL, KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_([0-9]{8})\.JPEG", re.IGNORECASE)
_OTHERS = "train-others"
_MAX_KIT_FILE_BYTES = 64 << 20


class Ilsvrc2012Corpus(RawCorpus):
    """1,000 classes of one label each, by WNID. Parts: the tar of each synset, and stretches of the validation archive.

    Ids are `ILSVRC2012_img_train.tar!n01440764.tar!n01440764_18.JPEG` and
    `ILSVRC2012_img_val.tar!ILSVRC2012_val_00000001.JPEG`.
    """

    def __init__(self, source: Ilsvrc2012, recipe: CorpusRecipe) -> None:
        self._store, self._max_bytes = open_store(source.path), recipe.decode.max_bytes
        self.origin, self._val_split = self._store.uri, source.validation_is
        self._split_rule = SplitRule(recipe, frozenset({"train", source.validation_is}))
        self.views = {"trainval": ("train", "val")}

    def fingerprint(self) -> str:
        digest, missing = hashlib.sha256(), {TRAIN, VAL, KIT}
        for name in sorted(missing):
            for listed in self._store.scan(name):
                if listed.key == name:
                    missing.discard(name)
                    digest.update(f"{name}\0{listed.size}\0{listed.tag}\n".encode())
        if missing:
            raise ValueError(
                f"{self.origin} lacks {', '.join(sorted(missing))}; name the folder of the files as image-net.org gives them."
            )
        return digest.hexdigest()

    def parts(self, place: Place) -> Iterator[Part]:
        self.fingerprint()  # raises where a file is missing
        if not self._kit.truth:
            raise ValueError(f"{self._store.uri_of(KIT)} has no labels in {_TRUTH}; fetch it again.")
        tars, others = SynsetTars(), False
        for member in index(self._store, TRAIN):
            if synset := tars.synset_of(member):
                yield synset_part(f"train-{synset}", synset, TRAIN, member)
            others |= not synset and member.kind != "folder"
        if not tars.synsets:
            raise ValueError(f"{self._store.uri_of(TRAIN)} holds no n########.tar; fetch it again.")
        if others:
            yield Part(name=_OTHERS)
        for number, stretch in enumerate(stretches(index(self._store, VAL), place.examples_per_part)):
            where: dict[str, Any] = {"start": stretch.start, "end": stretch.end, "whole": stretch.whole}
            yield Part(
                name=f"val-{number:06d}", num_bytes=stretch.num_bytes, num_examples=stretch.num_members, where=where
            )

    def examples(self, part: Part, place: Place) -> Iterator[RawExample]:
        if part.name.startswith("val-"):
            stretch: Any = part.where
            for member, data in read_members(self._store, VAL, self._max_bytes, **stretch, wanted=is_picture):
                if member.kind != "folder":
                    yield self._validation_example(member, data)
            return
        if part.name == _OTHERS:
            found = refused_tars(self._store, TRAIN, index(self._store, TRAIN), f"{TRAIN}!")
        else:
            found = synset_examples(self._store, part, self._max_bytes, f"{TRAIN}!")
        for example in found:
            yield replace(example, split=self._split_rule.place(example.example_id, "train"))

    def class_info(self, source_id: str) -> ClassInfo:
        synset = self._kit.by_wnid.get(source_id)
        if synset is None:
            return super().class_info(source_id)
        return ClassInfo(name=synset.words, source_id=source_id, parents=self._kit.parents(synset))

    def _validation_example(self, member: Member, data: bytes | None) -> RawExample:
        labels: tuple[str, ...] = ()
        refused = member.refused or refusal_by_name(member.path)
        if not refused and member.kind != "file":
            refused = ("ignored_file", f"link to {member.target!r:.200}")
        if not refused:
            named = _VAL_IMAGE.fullmatch(posixpath.basename(member.path))
            number = int(named[1]) if named else 0
            if 1 <= number <= len(self._kit.truth):
                labels = (self._kit.truth[number - 1],)
            else:
                refused = ("no_label", f"the kit has labels of ILSVRC2012_val_00000001 to {len(self._kit.truth):08d}")
        return RawExample(
            example_id=f"{VAL}!{readable_id(member.path)}",
            labels=labels,
            split=self._val_split,
            base=self._store.uri,
            key=VAL,
            offset=member.offset or 0,
            length=member.size,
            refused=refused,
            data=None if refused else data,
        )

    @functools.cached_property
    def _kit(self) -> "Kit":
        texts: dict[str, bytes] = {}
        for member, data in read_members(
            self._store, KIT, _MAX_KIT_FILE_BYTES, wanted=lambda member: member.path.endswith((_TRUTH, _META))
        ):
            if data is not None:
                texts[_TRUTH if member.path.endswith(_TRUTH) else _META] = data
        uri = self._store.uri_of(KIT)
        if missing := {_TRUTH, _META} - texts.keys():
            raise ValueError(
                f"{uri} lacks {', '.join(sorted(missing))}; it is cut off, or another file. Fetch it again."
            )
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
        return cls({synset.wnid: synset for synset in synsets}, labels)

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
    numbered = isinstance(number, np.ndarray) and number.size == 1 and number.dtype.kind in "iuf"
    if not numbered or not isinstance(wnid, str) or not re.fullmatch(r"n[0-9]{8}", wnid):
        raise ValueError(f"{_META} has a synset of ILSVRC2012_ID {number!r:.40} and WNID {wnid!r:.40}.")
    below = children.ravel().tolist() if isinstance(children, np.ndarray) and children.dtype.kind in "iuf" else []
    return Synset(
        int(number.item()),  # type: ignore[union-attr]
        wnid,
        words if isinstance(words, str) and words else wnid,
        tuple(int(child) for child in below if math.isfinite(child)),
    )
