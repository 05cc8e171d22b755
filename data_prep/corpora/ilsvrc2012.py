"""ImageNet-1k (ILSVRC2012) as it is distributed: two archives of images, and the development kit with the labels.

Layouts: ILSVRC2012_devkit_t12/readme.txt of the kit. The MATLAB file is read without MATLAB or scipy, by the
"MAT-File Format" of MathWorks, level 5.
"""

import functools
import hashlib
import math
import posixpath
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_prep.config import CorpusRecipe, Ilsvrc2012
from data_prep.corpora.archive_members import Member
from data_prep.corpora.archives import index, read_members, stretches
from data_prep.corpora.class_folders import is_picture, readable_id, refusal_by_name
from data_prep.corpora.imagenet21k import SynsetTars, refused_tars, synset_examples, synset_part
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


# MATLAB 5 files -------------------------------------------------------------------------------------------------------

_MAT_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
_CELL, _STRUCT, _CHAR = 1, 2, 4
_NUMERIC_CLASSES = range(6, 16)
_MAX_DEPTH, _MAX_MAT_BYTES = 8, 256 << 20


def read_mat(data: bytes) -> dict[str, Any]:
    """Variables of a MATLAB 5 file by name: struct arrays as lists of dicts and cells as lists, in column order,
    numbers as flat arrays, text as str; None for other classes. Raises ValueError; memory is bounded."""
    if len(data) < _MAT_HEADER_BYTES or data[126:128] not in (b"IM", b"MI"):
        raise ValueError("no MATLAB 5 file (a newer one, of version 7.3, is HDF5).")
    reader = _MatReader("<" if data[126:128] == b"IM" else ">")
    found: dict[str, Any] = {}
    try:
        for kind, body in reader.elements(data, _MAT_HEADER_BYTES):
            if kind == _COMPRESSED:
                inflate = zlib.decompressobj()
                inflated = inflate.decompress(body, _MAX_MAT_BYTES)
                if not inflate.eof:
                    raise ValueError("a variable that is cut off, or too large")
                kind, body = next(reader.elements(inflated, 0), (0, b""))
            if kind == _MATRIX:
                name, value = reader.matrix(body, 0)
                found[name] = value
    except (ValueError, ArithmeticError, LookupError, StopIteration, struct.error, zlib.error) as error:
        raise ValueError(f"a damaged MATLAB file: {error or 'it ends early'}.") from error
    return found


class _MatReader:
    """Data elements of one byte order."""

    def __init__(self, order: str) -> None:
        self._order = order

    def elements(self, data: bytes, position: int) -> Iterator[tuple[int, bytes]]:
        """(type, bytes) of the elements that follow each other."""
        while position + 8 <= len(data):
            kind, length = struct.unpack_from(self._order + "II", data, position)
            start = position + 8
            end = start + (length if kind == _COMPRESSED else -(-length // 8) * 8)
            if kind >> 16:  # the small form: length and type in one word, and up to four bytes in the next
                kind, length, start, end = kind & 0xFFFF, min(4, kind >> 16), position + 4, position + 8
            if start + length > len(data):
                raise ValueError(f"an element of {length:,} bytes at byte {position:,}, {len(data) - start:,} are left")
            yield kind, data[start : start + length]
            position = end

    def matrix(self, body: bytes, depth: int) -> tuple[str, Any]:
        """Name and value of a matrix element."""
        if not body:
            return "", np.zeros(0)
        if depth > _MAX_DEPTH:
            raise ValueError("structs in structs without end")
        parts = self.elements(body, 0)
        flags, shape, name = next(parts)[1], self._numbers(*next(parts)), next(parts)[1].decode("latin-1")
        array_class, count = struct.unpack_from(self._order + "I", flags)[0] & 0xFF, math.prod(int(n) for n in shape)
        if array_class == _STRUCT:
            return name, self._structs(parts, count, depth)
        if array_class == _CELL:
            return name, [self._value(element, depth) for element in parts]
        if array_class == _CHAR:
            kind, text = next(parts)
            return name, text.decode(self._codec(kind), errors="replace")
        if array_class in _NUMERIC_CLASSES:
            return name, self._numbers(*next(parts))
        return name, None

    def _structs(self, parts: Iterator[tuple[int, bytes]], count: int, depth: int) -> list[dict[str, Any]]:
        length = int(self._numbers(*next(parts))[0])
        names = next(parts)[1]
        if length < 1:
            raise ValueError("field names without length")
        fields = [names[i : i + length].split(b"\0")[0].decode("latin-1") for i in range(0, len(names), length)]
        rest = list(parts)
        if count * len(fields) != len(rest):
            raise ValueError(f"{count:,} structs of {len(fields)} fields, but {len(rest):,} values")
        values = iter(rest)
        return [{field: self._value(next(values), depth) for field in fields} for _ in range(count if fields else 0)]

    def _value(self, element: tuple[int, bytes], depth: int) -> Any:
        kind, body = element
        if kind != _MATRIX:
            raise ValueError(f"a value of type {kind} where a matrix should be")
        return self.matrix(body, depth + 1)[1]

    def _numbers(self, kind: int, body: bytes) -> np.ndarray:
        return np.frombuffer(body, self._order + _NUMBERS[kind])

    def _codec(self, kind: int) -> str:
        codec = _TEXTS[kind]
        return codec if codec in ("latin-1", "utf-8") else f"{codec}-{'le' if self._order == '<' else 'be'}"
