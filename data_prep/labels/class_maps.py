"""Class maps from files and from named releases, and conversions between maps.

A file is a classes.json of ours, or text with one source id per line, optionally followed by a tab and a name. Line n is label
id n.
"""

import hashlib
import importlib.util
import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vitline.data_prep.labels.classes import ClassInfo, ClassMap, require_one_spelling
from vitline.data_prep.labels.label_texts import labelled_number
from vitline.infra.config import FrozenConfig
from vitline.infra.html.text import shortened_list
from vitline.infra.storage import read_small


class Release(FrozenConfig):
    """A published list of classes. We may not distribute the list; `list_file` is its name in the package timm."""

    num_classes: int
    what: str
    list_file: str = ""
    sha256: str = ""
    """sha256 of the source ids, joined by newlines. Empty: we know no copy of the list."""


_MAX_BYTES = 64 * 1024 * 1024
RELEASES = {
    "imagenet1k": Release(
        num_classes=1000,
        what="ILSVRC2012",
        list_file="imagenet_synsets.txt",
        sha256="385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd",
    ),
    "imagenet12k": Release(
        num_classes=11_821,
        what="timm's part of the Fall 2011 release",
        list_file="imagenet12k_synsets.txt",
        sha256="009d4c9f19667ccf35878fb10718a90ccc9afe27004b4d42880d5feab073a3b1",
    ),
    "imagenet21k-fall11": Release(
        num_classes=21_841,
        what="ImageNet-21k of Fall 2011, all synsets of fall11_whole.tar",
        list_file="imagenet22k_synsets.txt",
        sha256="6320b72b72e43c09a768f0253d28c3b55707760bbf3b9d308887800b0d86658d",
    ),
    "imagenet21k-google": Release(
        num_classes=21_843,
        what="the label space of Google's models: Fall 2011 and n03931044, n09859684",
        list_file="imagenet21k_goog_synsets.txt",
        sha256="c03345e3490e010defaeac86b00012db28ecb79af13daba0b72525fa37c66e94",
    ),
    "imagenet21k-p": Release(
        num_classes=11_221,
        what="ImageNet-21k-P (arXiv:2104.10972) of Fall 2011",
        list_file="imagenet21k_miil_synsets.txt",
        sha256="e96927e3af1cf32cd60c35b4407ba6e16396a2696feefed66c4017b403c5596a",
    ),
    "imagenet21k-p-winter21": Release(
        num_classes=10_450,
        what="ImageNet-21k-P (arXiv:2104.10972) of Winter 2021",
        list_file="imagenet21k_miil_w21_synsets.txt",
        sha256="68202583aa200623fa7f326a1a4f8ff8f9a2e33ee8cd78ae16d52fb34e345dd4",
    ),
    "imagenet21k-winter21": Release(
        num_classes=19_167, what="ImageNet-21k of Winter 2021, all synsets of winter21_whole.tar.gz"
    ),
}


def load_class_map(named: str) -> ClassMap:
    """The class map of a release by name, of a file by URI, or of NAME=URI for a file that must match the release.

    Raises ValueError if there is none, or if the file does not match.
    """
    name, given, uri = named.partition("=")
    if name in RELEASES:
        return _release(name, uri if given else "")
    return _read(named)


def _release(name: str, uri: str) -> ClassMap:
    release = RELEASES[name]
    uri = uri or _list_of_timm(release)
    expected = f"{name} ({release.what}) has {release.num_classes:,} classes"
    if release.sha256:
        expected += f"; the sha256 of its source ids, joined by newlines, is {release.sha256}"
    if not uri:
        where = (
            f"it is timm/data/_info/{release.list_file} of the package timm"
            if release.list_file
            else "no package that we know contains it"
        )
        raise ValueError(
            f"The class list of {name} is not installed; {where}. Give a file with one synset id per line as {name}=URI. "
            f"{expected}."
        )
    found = _read(uri)
    digest = hashlib.sha256("\n".join(found.source_ids).encode()).hexdigest()
    if len(found.classes) != release.num_classes or (release.sha256 and digest != release.sha256):
        raise ValueError(
            f"{uri} has {len(found.classes):,} classes with sha256 {digest}, but {expected}. Give the list of that "
            f"release, in its order, or use the file as it is by giving its URI without {name}=."
        )
    return found


def _list_of_timm(release: Release) -> str:
    """Path of the list, or empty. timm is not imported, because that imports torch."""
    spec = importlib.util.find_spec("timm") if release.list_file else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "data", "_info", release.list_file)
        if path.is_file():
            return str(path)
    return ""


def _read(uri: str) -> ClassMap:
    if not uri.rpartition("/")[2]:
        raise ValueError(f"{uri!r} is neither a file of classes nor a release: {', '.join(RELEASES)}.")
    try:
        data = read_small(uri, _MAX_BYTES)
    except FileNotFoundError as error:
        raise ValueError(
            f"There is no class map {uri}. Give the URI of a classes.json, or of a text file with one source id per line, or "
            f"the name of a release: {', '.join(RELEASES)}."
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{uri} is not UTF-8 ({error}). Store the class map as UTF-8 text.") from error
    classes = _from_json(uri, text) if text.lstrip().startswith("{") else _from_lines(text)
    if not classes:
        raise ValueError(f"{uri} holds no classes. Give a classes.json, or a text file with one source id per line.")
    at: dict[str, int] = {}
    for label_id, info in enumerate(classes):
        if (first := at.setdefault(info.source_id, label_id)) != label_id:
            raise ValueError(f"{uri}: {info.source_id!r} is class {first} and class {label_id}. Remove one of them.")
    return ClassMap(classes=classes)


def _from_json(uri: str, text: str) -> tuple[ClassInfo, ...]:
    try:
        content = json.loads(text)
        found = ClassMap.from_file(content)
    except (ValueError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{uri} is not a classes.json: {error}. It must have the keys 'digest' and 'classes'."
        ) from error
    if content.get("digest", found.digest) != found.digest:
        raise ValueError(
            f"{uri} was changed after it was written: its classes have digest {found.digest[:12]}, but the file says "
            f"{content['digest']!s:.12}. If the change is intended, remove the entry 'digest'."
        )
    return found.classes


def _from_lines(text: str) -> tuple[ClassInfo, ...]:
    # NFC and inner spaces are kept, as for labels of folders.
    lines = (unicodedata.normalize("NFC", line.rstrip("\r")) for line in text.split("\n"))
    pairs = (line.partition("\t") for line in lines if line.strip())
    return tuple(ClassInfo(name=name.strip() or source_id, source_id=source_id) for source_id, _, name in pairs)


def applied(class_map: ClassMap, classes: Iterable[ClassInfo]) -> ClassMap:
    """Exactly the classes of the map, in its order, including empty ones. `classes` of a source provide names and parents for
    entries of the map that have only a source id."""
    known = {info.source_id: info for info in classes}

    def named(info: ClassInfo) -> ClassInfo:
        bare = info.name == info.source_id and not info.parents
        return known.get(info.source_id, info) if bare else info

    return ClassMap(classes=tuple(named(info) for info in class_map.classes))


def extended(class_map: ClassMap, new: Iterable[ClassInfo]) -> ClassMap:
    """The map with the missing classes of `new` appended, sorted by source id, so existing label ids do not change. Raises
    ValueError if the map has a class number without leading zeros and `new` has it with zeros."""
    known = class_map.label_ids()
    added = ClassMap.of(info for info in new if info.source_id not in known)
    for label in added.source_ids:
        if (number := labelled_number(label)) is not None and str(number) in known:
            raise ValueError(
                f"The new images have class {label!r}, but the corpus has class {str(number)!r}: only tables fill "
                "numbers with zeros. Prepare everything again as one corpus."
            )
    require_one_spelling(class_map.source_ids + added.source_ids)
    return ClassMap(classes=class_map.classes + added.classes)


@dataclass(frozen=True)
class Mapping:
    """How the label ids of one map correspond to those of another, by source id."""

    label_ids: tuple[int | None, ...]
    """For every label id of the first map, the label id in the second; None if it has no such class."""
    lost: tuple[str, ...]
    """Source ids that only the first map has."""
    unmet: tuple[str, ...]
    """Source ids that only the second map has."""

    @property
    def summary(self) -> str:
        """The counts in one line, with the first few classes by name."""
        kept = len(self.label_ids) - len(self.lost)
        first, second = (shortened_list(ids, 3) or "none" for ids in (self.lost, self.unmet))
        return f"{kept:,} classes are in both; only in the first: {first}; only in the second: {second}"


def mapping(from_map: ClassMap, to_map: ClassMap) -> Mapping:
    """Translation of label ids of `from_map` to `to_map`."""
    to_ids, from_ids = to_map.label_ids(), from_map.label_ids()
    return Mapping(
        label_ids=tuple(to_ids.get(source_id) for source_id in from_map.source_ids),
        lost=tuple(source_id for source_id in from_map.source_ids if source_id not in to_ids),
        unmet=tuple(source_id for source_id in to_map.source_ids if source_id not in from_ids),
    )
