"""WebDataset tars: files with the same name up to the first known extension form one example."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import JsonValue

from vitline.data_prep.archives.archive_members import Member
from vitline.data_prep.archives.archives import archive_kind, index, read_members
from vitline.data_prep.config import CorpusRecipe, WebDataset
from vitline.data_prep.labels.classes import ClassInfo
from vitline.data_prep.labels.label_texts import distinct_labels, label_texts, numbered_class, plain_text, short
from vitline.data_prep.sources.raw import ImageSource, Locator, RawExample, SourcePart, Spill, SplitRule, WorkFolder
from vitline.data_prep.sources.source_files import SourceFiles
from vitline.infra.storage import Listed, Store

_ENDINGS = (".tar", ".tar.gz", ".tgz")
# One worker reads a tar of up to this size as a whole. For a larger one, the headers are listed first, to divide it.
_LARGEST_WHOLE_BYTES = 16 << 30
_EXTENSIONS = frozenset(
    {"jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "pnm", "gif", "bmp", "tif", "tiff", "jp2", "j2k"}
    | {"avif", "heic", "heif"}
    | {"cls", "cls2", "txt", "json", "jsonl", "xml", "csv", "npy", "npz", "pth", "pt", "pyd", "pickle", "pkl"}
    | {"mp4", "mp3", "wav"}
)
"""Extensions that end a key besides those of the source. Keys may contain dots: cam.060.png, 2024.01.05.cls."""
# Files of one key that stand apart wait for each other: so many keys, and so many bytes of a compressed tar, which cannot be read again.
_MOST_WAITING, _MOST_WAITING_BYTES = 1 << 17, 256 << 20
_META = re.compile(r"__[^/]*__(?:$|/)")


class WebDatasetCorpus(ImageSource):
    """WebDataset tars, plain or gzipped. Files of one key need not stand together. A further image of an example is refused.

    The id of an example is `shard.tar!key`. Its image is its first file in the order of `image_keys`. Its label is a text (txt),
    a field of a json, or a number (cls), which becomes `number_label`, so that classes keep their order. The split of a tar is
    the one that its path names, if those of all tars do (`SourceFiles.splits`).
    """

    def __init__(self, source: WebDataset, recipe: CorpusRecipe) -> None:
        if re.search(r"\{.*\.\..*\}", source.path):
            raise ValueError(f"{source.path}: patterns in braces are not supported. Give the folder of the tars.")
        self._source, self._recipe = source, recipe
        self._files = SourceFiles(source.path, _ENDINGS, source.allowed_roots, source.splits)
        self.origin, self.single_label = self._files.uri, source.single_label

    def fingerprint(self) -> str:
        return self._files.fingerprint()

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        where: dict[str, JsonValue] = {"present": [*sorted(self._files.splits.present)]}
        for file in self._files.files():
            where |= {"key": file.key, "split": self._files.splits.of.get(file.key)}
            if file.size <= _LARGEST_WHOLE_BYTES or archive_kind(file.key) == "tar.gz":
                whole: dict[str, JsonValue] = {"start": 0, "end": None}
                yield SourcePart(name=file.key, num_bytes=file.size, where={**where, **whole})
                continue
            for start, end in _stretches(self._files.store, file, self._source, work.examples_per_part):
                name, num_bytes = f"{file.key}.{start:015d}", (file.size if end is None else end) - start
                yield SourcePart(name=name, num_bytes=num_bytes, where={**where, "start": start, "end": end})

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        where = cast(dict[str, Any], part.where)
        rule = SplitRule(self._recipe, frozenset(where["present"]))
        reader = _Reader(self._source, self._recipe, self._files.store, where["key"], rule, where["split"])
        with ExitStack() as stack:
            spilled = archive_kind(where["key"]) == "tar.gz"
            spill = stack.enter_context(Spill(work, part)) if spilled else None
            try:
                for found in reader.groups(where["start"], where["end"]):
                    yield from reader.examples(found, spill) if isinstance(found, _Group) else [found]
            except (FileNotFoundError, PermissionError) as error:
                yield reader.refused("(the tar)", "uncounted_loss", f"{error.strerror}")

    def structure(self, work: WorkFolder) -> str:
        return self._files.splits.description

    def class_info(self, source_id: str) -> ClassInfo:
        is_text = self._source.label_key.lower().endswith("txt")
        return super().class_info(source_id) if is_text else numbered_class(source_id)


def _named(path: str, source: WebDataset) -> tuple[str, str] | None:
    """Key and extension of a file; None if it has none. Without a known extension, the key ends at the last dot."""
    folder, slash, name = path.rpartition("/")
    first, *parts = name.split(".")
    wanted = {each.lower() for each in (*source.image_keys, source.label_key)}
    if not first or not parts or not parts[-1]:
        return None
    at = len(parts) - 1
    for i, part in enumerate(parts):
        if part.lower() in _EXTENSIONS or part.lower() in wanted or ".".join(parts[i:]).lower() in wanted:
            at = i
            break
    return folder + slash + ".".join((first, *parts[:at])), ".".join(parts[at:]).lower()


def _stretches(store: Store, file: Listed, source: WebDataset, examples_each: int) -> Iterator[tuple[int, int | None]]:
    """(first byte, end) of pieces of a tar with `examples_each` whole examples each, found by reading the headers. A tar in which
    files of one key stand apart is one piece."""
    cuts, num_examples, key, seen = [0], 0, "", set[int]()
    for member in index(store, file.key):
        named = _named(member.path, source)
        if not named or member.refused or member.kind != "file" or named[0] == key or named[0].startswith(f"{key}."):
            continue
        if hash(named[0]) in seen:
            cuts = [0]
            break
        if num_examples == examples_each:
            cuts, num_examples = [*cuts, member.header], 0
        num_examples, key = num_examples + 1, named[0]
        seen.add(hash(key))
    yield from zip(cuts, [*cuts[1:], None], strict=True)


@dataclass
class _Group:
    """The files of one example: images and label with their bytes, and the extensions of all files."""

    key: str
    files: dict[str, tuple[Member, bytes | None]] = field(default_factory=dict)
    """None: bytes of an image that must be read again."""
    endings: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(len(data or b"") for _, data in self.files.values())


class _Reader:
    """Reads the examples of one tar."""

    def __init__(
        self, source: WebDataset, recipe: CorpusRecipe, store: Store, key: str, rule: SplitRule, split: str | None
    ) -> None:
        self._source, self._store, self._key, self._rule, self._split = source, store, key, rule, split
        self._max_bytes, self._id = recipe.decode.max_bytes, plain_text(key)
        self._label_key = source.label_key.lower()
        self._image_keys = [key.lower() for key in source.image_keys]
        self._waiting, self._waiting_bytes = dict[str, _Group](), 0
        self._done = set[int]()  # hashes of the keys whose examples were given

    def groups(self, start: int, end: int | None) -> Iterator[_Group | RawExample]:
        """Examples of a piece of the tar, and refusals of files that belong to none. Holds one example at a time, and of groups that
        lack their image or their label what `_wait` keeps."""
        group: _Group | None = None
        for member, data in read_members(
            self._store, self._key, self._max_bytes, start, end, end is None, self._is_wanted
        ):
            if member.kind == "folder" and not member.refused:
                continue
            named = _named(member.path, self._source)
            if reason := self._foreign(member, named):
                yield self.refused(member.path, *reason)
                continue
            assert named is not None
            key, ending = named
            if group is None or group.key != key:
                if group is not None:
                    yield from self._leave(group)
                group = self._waiting.pop(key, None) or _Group(key)
                self._waiting_bytes -= group.num_bytes
            if ending in group.files:
                yield self.refused(member.path, "ignored_file", f"a second {ending} file of {group.key}")
            elif data is not None:
                group.files[ending] = member, data
            group.endings = [*group.endings[:20], ending]
        if group is not None:
            yield from self._leave(group)
        while self._waiting:
            yield from self._give_up()

    def _leave(self, group: _Group) -> Iterator[_Group | RawExample]:
        """A group whose next file, if there is one, stands apart: complete, or to wait for the rest."""
        if self._label_key in group.files and any(ending in group.files for ending in self._image_keys):
            self._done.add(hash(group.key))
            yield group
        elif hash(group.key) in self._done:
            yield from self._further_images(group, "")
        else:
            yield from self._wait(group)

    def _wait(self, group: _Group) -> Iterator[_Group | RawExample]:
        for ending, (member, _) in group.files.items():
            if member.offset is not None and ending != self._label_key:
                group.files[ending] = member, None
        self._waiting[group.key] = group
        self._waiting_bytes += group.num_bytes
        while len(self._waiting) > _MOST_WAITING or self._waiting_bytes > _MOST_WAITING_BYTES:
            yield from self._give_up()

    def _give_up(self) -> Iterator[_Group | RawExample]:
        """The group that waits longest: part of another example, as 000.seg.png is of 000, or refused as incomplete."""
        group = self._waiting.pop(next(iter(self._waiting)))
        self._waiting_bytes -= group.num_bytes
        dots = (at for at, letter in enumerate(group.key) if letter == ".")
        if not any(hash(group.key[:at]) in self._done and group.key[at + 1 :].isalpha() for at in dots):
            yield group

    def _further_images(self, group: _Group, image: str) -> Iterator[RawExample]:
        """Refusals of the images of a group besides its image, or of all if its example was given before."""
        for ending in self._image_keys:
            if ending in group.files and ending != image:
                detail = f"a further image of {group.key}; an example has one image, its first of source.image_keys"
                yield self.refused(group.files[ending][0].path, "ignored_file", detail)

    def examples(self, group: _Group, spill: Spill | None) -> Iterator[RawExample]:
        """The example of a group, and refusals of its further images."""
        image = next((ending for ending in self._image_keys if ending in group.files), "")
        yield self._example(group, image, spill)
        yield from self._further_images(group, image)

    def _example(self, group: _Group, image: str, spill: Spill | None) -> RawExample:
        if not image:
            endings, wanted = ", ".join(group.endings), ", ".join(self._image_keys)
            detail = f"no image: the example has {endings}, expected one of {wanted}"
            return self.refused(f"{group.key}.{group.endings[0]}", "unreadable", detail)
        member, data = group.files[image]
        if member.size > self._max_bytes:
            return self.refused(member.path, "too_many_bytes", f"{member.size:,} bytes, limit {self._max_bytes:,}")
        try:
            labels = self._labels(group)
        except (ValueError, RecursionError) as error:
            return self.refused(member.path, "no_label", str(error))
        example_id = f"{self._id}!{plain_text(group.key)}"
        offset = member.offset or 0  # none in a compressed tar, whose bytes are in hand
        if data is None:
            data = self._store.read(self._key, offset, offset + member.size)
        place = Locator(base=self._store.uri, key=self._key, offset=offset, length=len(data))
        split = self._rule.assign_split(example_id, self._split)
        return RawExample(example_id, labels, split, data=data, **(spill.keep(data) if spill else place))

    def refused(self, member: str, reason: str, detail: str) -> RawExample:
        example_id = plain_text(f"{self._id}!{member.encode(errors='replace').decode()}")
        split = self._rule.assign_split(example_id, self._split)
        return RawExample(example_id, (), split, self._store.uri, self._key, refused=(reason, detail))

    def _is_wanted(self, member: Member) -> bool:
        named = _named(member.path, self._source)
        return named is not None and named[1] in (*self._image_keys, self._label_key)

    def _foreign(self, member: Member, named: tuple[str, str] | None) -> tuple[str, str] | None:
        """Why a member does not belong to any example; None if it may."""
        if member.refused:
            return member.refused
        if member.kind != "file":
            return "ignored_file", f"a link to {short(member.target)}; a WebDataset must hold files"
        if named is None or _META.match(member.path):
            return "ignored_file", "the name does not belong to an example; expected KEY.EXTENSION"
        return None

    def _labels(self, group: _Group) -> tuple[str, ...]:
        """Labels of an example. Raises ValueError, and RecursionError for a json that is nested too deeply."""
        if self._label_key not in group.files:
            raise ValueError(f"no {self._label_key} file: the example has {', '.join(group.endings)}")
        text = (group.files[self._label_key][1] or b"").decode("utf-8-sig").strip()
        value: Any = text
        if self._label_key.rpartition(".")[2] == "json":
            value = _field(json.loads(text), self._source.label_field)
        elif not self._label_key.endswith("txt") and re.fullmatch(r"-?[0-9]{1,18}", text):
            value = int(text)
        return distinct_labels(label_texts(value), self._source.single_label)


def _field(value: Any, path: str) -> Any:
    """A field of a json object, or of nested objects by a path with dots. Raises ValueError."""
    if isinstance(value, dict) and path in value:
        return value[path]
    name, _, rest = path.partition(".")
    if not rest or not isinstance(value, dict) or name not in value:
        shown = ", ".join(value) if isinstance(value, dict) else short(value)
        raise ValueError(f"no field {path!r}: the json has {shown[:200]!a}")
    return _field(value[name], rest)
