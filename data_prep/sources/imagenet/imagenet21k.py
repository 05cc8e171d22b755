"""ImageNet-21k as distributed: one tar per synset, all of them in one tar or in a folder.

These are fall11_whole.tar (21,841 synsets) and winter21_whole.tar.gz (19,167, below a folder) of image-net.org.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vitline.data_prep.archives.archive_members import Member, checked_path
from vitline.data_prep.archives.archives import archive_kind, index, read_members, read_tars_inside
from vitline.data_prep.config import CorpusRecipe, ImageNet21k
from vitline.data_prep.sources.folder_layout import is_image, readable_id, refusal_by_name
from vitline.data_prep.sources.raw import (
    ImageSource,
    RawExample,
    SourcePart,
    Spill,
    SplitRule,
    WorkFolder,
    files_digest,
)
from vitline.infra.storage import Store, open_store

_SYNSET_TAR = re.compile(r"(?:.*/)?(n[0-9]{8})\.tar", re.DOTALL)
OTHERS, _STREAM = "others", "stream"


class ImageNet21kCorpus(ImageSource):
    """The tar of every synset is one part and one class. The id of an image is `n01440764.tar!n01440764_10026.JPEG`.

    A compressed archive of tars has no random access, so it is one part, and its images are spilled.
    """

    def __init__(self, source: ImageNet21k, recipe: CorpusRecipe) -> None:
        self.origin = open_store(source.path).uri
        folder, _, name = self.origin.rpartition("/")
        self._kind = archive_kind(name)
        if self._kind == "zip":
            raise ValueError(
                f"{source.path}: ImageNet-21k must be a .tar, a .tar.gz or a folder of n########.tar files."
            )
        self._archive = name if self._kind else ""
        self._store, self._split_rule = open_store(folder if self._kind else self.origin), SplitRule(recipe)
        self._max_bytes = recipe.decode.max_bytes

    def fingerprint(self) -> str:
        found = [listed for listed in self._store.scan(self._archive) if self._archive in ("", listed.key)]
        if not found:
            raise ValueError(
                f"{self.origin} does not exist. Give ImageNet-21k's archive, or a folder of n########.tar files."
            )
        return files_digest(found)

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        self.fingerprint()  # raises if the source does not exist
        if self._kind == "tar.gz":
            yield SourcePart(name=_STREAM, num_bytes=self._store.size(self._archive))
            return
        nothing = f"{self.origin} holds no n########.tar. Give ImageNet-21k's archive, or a folder of such files."
        yield from synset_parts(self._members(), self._archive, nothing)

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        if part.name == _STREAM:
            found = self._streamed(part, work)
        elif part.name == OTHERS:
            found = refused_tars(self._store, self._archive, self._members())
        else:
            found = synset_examples(self._store, part, self._max_bytes)
        for example in found:
            yield replace(example, split=self._split_rule.assign_split(example.example_id))

    def _members(self) -> Iterator[Member]:
        """The members of the archive, or the files of the folder as members."""
        if self._archive:
            yield from index(self._store, self._archive)
        else:
            for listed in self._store.scan():
                yield Member(listed.key, listed.size, refused=checked_path(listed.key)[1])

    def _streamed(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        tars, name, num_inside = SynsetTars(), "", 0
        found = read_tars_inside(self._store, self._archive, self._max_bytes, lambda _: bool(tars.opened), is_image)
        with Spill(work, part) as spill:
            for member, inner, data in found:
                if inner is not None:
                    num_inside += 1
                    for example in synset_example(self._store, self._archive, tars.opened, inner, data):
                        yield self._spilled(spill, example)
                    continue
                if tars.opened and not num_inside:
                    yield empty_tar(self._store, self._archive, name)
                name, num_inside = member.path, 0
                if not tars.synset_of(member) and member.kind != "folder":
                    yield tars.refusal(self._store, self._archive, member)
            if tars.opened and not num_inside:
                yield empty_tar(self._store, self._archive, name)

    def _spilled(self, spill: Spill, example: RawExample) -> RawExample:
        if (
            example.data is None or len(example.data) > self._max_bytes
        ):  # too large: it will be refused and not read again
            return example
        return replace(example, **spill.keep(example.data))


class SynsetTars:
    """Distinguishes the tars of synsets from other members. Memory: the names of the synsets."""

    def __init__(self) -> None:
        self.synsets: set[str] = set()
        self.opened = ""
        """The latest result of `synset_of`."""

    def synset_of(self, member: Member) -> str:
        """n########, if the member is the first tar with this name; otherwise empty."""
        named = _SYNSET_TAR.fullmatch(member.path)
        first = member.kind == "file" and not member.refused and named and named[1] not in self.synsets
        self.opened = named[1] if named and first else ""
        self.synsets |= {self.opened} - {""}
        return self.opened

    @staticmethod
    def refusal(store: Store, archive: str, member: Member, prefix: str = "") -> RawExample:
        """The refusal of a member that is not the first tar of a synset."""
        if member.refused:
            refused = member.refused
        elif member.kind in ("link", "hard_link"):
            refused = ("ignored_file", f"link to {member.target!r:.200}")
        elif _SYNSET_TAR.fullmatch(member.path):
            refused = ("damaged_archive", "a second archive for this synset")
        elif member.path.endswith(".tar"):
            refused = ("no_label", "an archive whose name is not n########.tar")
        else:
            refused = ("ignored_file", "not an n########.tar file")
        return _example(store, archive or member.path, prefix + readable_id(member.path), refused=refused)


def synset_parts(members: Iterator[Member], archive: str, nothing: str, prefix: str = "") -> Iterator[SourcePart]:
    """The tar of every synset: a member of the archive, or a file of its own if there is no archive; then a part for all other
    members. `nothing`: the ValueError if there is no synset. `prefix`: of the names of parts."""
    tars, others = SynsetTars(), False
    for member in members:
        if synset := tars.synset_of(member):
            key, start = archive or member.path, member.offset or 0
            where: dict[str, Any] = {"key": key, "start": start, "end": start + member.size, "synset": synset}
            yield SourcePart(name=f"{prefix}{synset}", num_bytes=member.size, where=where)
        others |= not synset and member.kind != "folder"
    if not tars.synsets:
        raise ValueError(nothing)
    if others:
        yield SourcePart(name=f"{prefix}{OTHERS}")


def synset_examples(store: Store, part: SourcePart, max_bytes: int, prefix: str = "") -> Iterator[RawExample]:
    """The images of the tar of a synset, without splits. Ids: `prefix`, name of the tar, `!`, path of the member."""
    where: Any = part.where
    found = False
    for member, data in read_members(store, where["key"], max_bytes, where["start"], where["end"], wanted=is_image):
        found = True
        yield from synset_example(store, where["key"], where["synset"], member, data, prefix)
    if not found:
        yield empty_tar(store, where["key"], f"{where['synset']}.tar", prefix)


def refused_tars(store: Store, archive: str, members: Iterator[Member], prefix: str = "") -> Iterator[RawExample]:
    """A refusal for every member that is not the tar of a synset."""
    tars = SynsetTars()
    for member in members:
        if member.kind != "folder" and not tars.synset_of(member):
            yield tars.refusal(store, archive, member, prefix)


def synset_example(
    store: Store, key: str, synset: str, member: Member, data: bytes | None, prefix: str = ""
) -> Iterator[RawExample]:
    """The example or refusal for a member of the tar of a synset; nothing for a folder."""
    if member.kind == "folder" and not member.refused:
        return
    refused = member.refused or refusal_by_name(member.path)
    if not refused and member.kind != "file":
        refused = ("ignored_file", f"link to {member.target!r:.200}")
    example_id = f"{prefix}{synset}.tar!{readable_id(member.path)}"
    yield _example(store, key, example_id, (synset,), refused, member.offset, member.size, data)


def empty_tar(store: Store, key: str, name: str, prefix: str = "") -> RawExample:
    """The refusal of a tar without members."""
    refused = ("damaged_archive", "the archive is empty")
    return _example(store, key, prefix + readable_id(name.rpartition("/")[2]), refused=refused)


def _example(
    store: Store,
    key: str,
    example_id: str,
    labels: tuple[str, ...] = (),
    refused: tuple[str, str] | None = None,
    offset: int | None = None,
    length: int | None = None,
    data: bytes | None = None,
) -> RawExample:
    return RawExample(example_id, labels, "train", store.uri, key, offset or 0, length, refused=refused, data=data)
