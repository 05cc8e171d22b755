"""Class folders of any depth, or one archive of them: the path below the folder is the class and its hierarchy.

Links, hidden files, AppleDouble files, empty files, other files, unusual names and extensions are normal: files that are not images by
their names are listed as refused, everything else is judged by its content.
"""

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitline.data_prep.archives.archive_members import Member, RepeatedNames, link_target, path_hash
from vitline.data_prep.archives.archives import archive_kind, index, read_members, stretches
from vitline.data_prep.config import ClassFolders, CorpusRecipe
from vitline.data_prep.labels.classes import ClassInfo
from vitline.data_prep.sources.allowed_roots import AllowedRoots
from vitline.data_prep.sources.folder_layout import (
    Links,
    PathAliases,
    Refused,
    is_hidden,
    is_image,
    readable_id,
    refusal_by_name,
)
from vitline.data_prep.sources.folder_tree import ArchiveIndex, FolderTree
from vitline.data_prep.sources.raw import ListedCorpus, RawExample, SourcePart, Spill, SplitRule, WorkFolder
from vitline.infra.storage import checked_key, open_store

_SURVEY_KEY, _STRUCTURE_KEY = "archive.json", "structure.json"
_MAX_DEPTH = 200  # folders in folders: each is a level of recursion
_MAX_VISITS = 64  # times that links lead to a folder of a disk: links between folders can multiply


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A file: its path below the folder as on disk, and the refusal, if it is refused."""

    path: str
    size: int = 0
    tag: str = ""
    """Differs when the file was replaced: mtime in ns, or ETag."""
    refused: Refused | None = None
    is_link: bool = False
    """Whether it, or a folder above it, is a link."""
    target: str | None = None
    """Path below the folder to which a link adds a second label; the link itself is refused."""


class ClassFolderCorpus(ListedCorpus):
    """A folder of class folders, local or in a store, or one archive of it.

    Folders that surround all class folders are not part of a class, as in `tar cf pets.tar pets`: see `FolderTree`. Links in
    archives may lead to other members only.
    """

    def __init__(self, source: ClassFolders, recipe: CorpusRecipe) -> None:
        self._source, self._links, self._recipe = source, source.links, recipe
        self._store = open_store(source.path)
        self.origin = self._store.uri
        self.single_label = source.links != "second_label"
        self._allowed = AllowedRoots([self.origin, *source.allowed_roots])
        local = self.origin.startswith("file://")
        self._folder = Path(self.origin.removeprefix("file://")) if local else None
        self._archive: _Archive | None = None
        if archive_kind(self.origin) and not (self._folder and self._folder.is_dir()):
            self._archive = _Archive(self.origin, source, recipe)
            self.lists_ids = False

    def fingerprint(self) -> str:
        if self._archive:
            return self._archive.fingerprint()
        digest = hashlib.sha256()
        for entry in self._walk():
            text = f"{entry.path}\0{entry.size}\0{entry.tag}\0{entry.refused}\n"
            digest.update(text.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        return self._archive.parts(work) if self._archive else super().parts(work)

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        return self._archive.examples(part, work) if self._archive else super().examples(part, work)

    def listing(self, work: WorkFolder) -> Iterator[RawExample]:
        tree, targets, twins = FolderTree(), dict[str, str](), RepeatedNames()
        for entry in self._walk():
            if not entry.refused and not entry.path.isascii():  # only such names can be equal to another in NFC
                twins.add(entry.path, path_hash(entry.path))
            if entry.target:
                targets[entry.path] = entry.target
            elif not entry.refused:
                tree.add(entry.path)
        links = Links(targets)
        tree.add_links(links)
        layout = tree.layout(self._source, self.origin)
        work.store.write_json(_STRUCTURE_KEY, layout.description)
        split_rule = SplitRule(self._recipe, frozenset(layout.splits.values()))
        for entry in self._walk():
            if not entry.refused and twins.repeats(entry.path, path_hash(entry.path)):
                why = ("repeated_name", f"a second file with the name {readable_id(entry.path)!r}")
                entry = replace(entry, path=f"{entry.path} (spelled {entry.path!a})", refused=why)
            names = PathAliases([entry.path]) if entry.refused else links.names_of(entry.path)
            example = layout.example(names.paths, split_rule, entry.refused)
            key = example.example_id if entry.refused else entry.path
            yield replace(example, base=self.origin, key=key, num_bytes=entry.size, is_link=entry.is_link)
            if names.more:
                further = layout.example([f"{entry.path} (more names)"], split_rule, names.refusal())
                yield replace(further, base=self.origin, key=key)

    def structure(self, work: WorkFolder) -> str:
        """Empty for a compressed tar that was not read yet."""
        try:
            return str(work.store.read_json(_STRUCTURE_KEY))
        except FileNotFoundError:
            return ""

    def class_info(self, source_id: str) -> ClassInfo:
        return ClassInfo(name=source_id, source_id=source_id, parents=tuple(source_id.split("/")[:-1]))

    def _walk(self) -> Iterator[FolderEntry]:
        if self._folder is None:
            return self._objects()
        if not self._folder.is_dir():
            raise ValueError(
                f"{self._folder} is neither a folder nor an archive (.tar, .tar.gz, .tgz, .zip). "
                "Give a folder or archive with one folder of images per class."
            )
        return self._below(self._folder, "", frozenset({os.path.realpath(self._folder)}), Counter())

    def _objects(self) -> Iterator[FolderEntry]:
        """The objects of a store, in the order of the store."""
        found = False
        for listed in self._store.scan():
            found = True
            yield FolderEntry(listed.key, listed.size, listed.tag, refusal_by_name(listed.key) or _no_key(listed.key))
        if not found:
            raise ValueError(f"{self.origin} holds no objects. Give a prefix with one folder of images per class.")

    def _below(
        self, folder: Path, prefix: str, above: frozenset[str], visits: Counter[str], linked: bool = False
    ) -> Iterator[FolderEntry]:
        """The files below a folder. `above` are the real paths of the folder and those above it; `visits` counts, for the whole
        walk, how often links led to a folder; `linked`: whether the folder or one above it is a link."""
        if len(above) > _MAX_DEPTH:
            why = f"folder: below more than {_MAX_DEPTH} folders, so its files are not read"
            yield FolderEntry(prefix.rstrip("/"), refused=("uncounted_loss", why))
            return
        try:
            children = sorted(os.scandir(folder), key=lambda child: child.name)
        except PermissionError as error:
            yield FolderEntry(prefix.rstrip("/"), refused=("uncounted_loss", f"folder: {error.strerror}"))
            return
        for child in children:
            path = prefix + child.name
            if refused := self._refused(child, path):
                yield FolderEntry(path, refused=refused)
            elif child.is_symlink() and self._links == "second_label":
                yield self._second_label(child, path)
            elif child.is_dir():
                real = os.path.realpath(child.path)
                visits[real] += child.is_symlink()
                if real in above:
                    yield FolderEntry(
                        path, refused=("ignored_file", f"link to {real}, a folder that contains the link")
                    )
                elif child.is_symlink() and visits[real] > _MAX_VISITS:
                    yield FolderEntry(path, refused=self._too_often(child))
                else:
                    is_link = linked or child.is_symlink()
                    yield from self._below(Path(child.path), path + "/", above | {real}, visits, is_link)
            else:
                status, is_link = child.stat(), linked or child.is_symlink()
                yield FolderEntry(path, status.st_size, str(status.st_mtime_ns), is_link=is_link)

    def _refused(self, child: os.DirEntry[str], path: str) -> Refused | None:
        if is_hidden(child.name):
            return "ignored_file", "hidden file or system file"
        if child.is_symlink():
            if self._links == "skip":
                return "ignored_file", "symbolic link"
            if not os.path.exists(child.path):
                return "unreadable", f"link to {os.readlink(child.path)!r}, which does not exist"
            if self._links == "follow" and not self._allowed.allows(f"file://{child.path}"):
                return (None if child.is_dir() else refusal_by_name(path)) or self._outside(child)
        if child.is_dir():
            return None
        if not child.is_file():
            return "ignored_file", "neither a file nor a folder"
        return refusal_by_name(path) or _no_key(path)

    @staticmethod
    def _too_often(child: os.DirEntry[str]) -> Refused:
        return "ignored_file", (
            f"link to {os.readlink(child.path)!r}, a folder to which more than {_MAX_VISITS} links lead; the others are ignored"
        )

    @staticmethod
    def _outside(child: os.DirEntry[str]) -> Refused:
        """The refusal of a link that leaves the source. How many images a folder has is not known without reading it. The text is
        part of the fingerprint, so it does not say where the source is."""
        return "uncounted_loss" if child.is_dir() else "unsafe_path", (
            f"link to {os.readlink(child.path)!r}, outside of the source folder; name the folder that it leads to in "
            "source.allowed_roots, or refuse all links with source.links=skip"
        )

    def _second_label(self, child: os.DirEntry[str], path: str) -> FolderEntry:
        target = os.path.relpath(os.path.realpath(child.path), os.path.realpath(self._folder or ""))
        if target == ".." or target.startswith("../"):
            return FolderEntry(
                path, refused=("ignored_file", f"link to {os.readlink(child.path)!r}, outside of the source folder")
            )
        if target == "." or path.startswith(f"{target}/"):
            return FolderEntry(path, refused=("ignored_file", f"link to {target}, a folder that contains the link"))
        return FolderEntry(path, refused=("ignored_file", f"second label of {readable_id(target)}"), target=target)


class _Archive:
    """One archive of class folders. Its parts are pieces of a tar or of the directory of a zip, or a whole tar.gz."""

    def __init__(self, uri: str, source: ClassFolders, recipe: CorpusRecipe) -> None:
        folder, _, self._key = uri.rpartition("/")
        self._source, self._links, self._recipe = source, source.links, recipe
        self._store = open_store(folder)
        self._kind = archive_kind(self._key)

    def fingerprint(self) -> str:
        for listed in self._store.scan(self._key):
            if listed.key == self._key:
                return hashlib.sha256(f"{listed.size}\0{listed.tag}".encode()).hexdigest()
        raise ValueError(
            f"{self._store.uri_of(self._key)} does not exist. Give a folder or an archive of class folders."
        )

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        self.fingerprint()  # raises if the archive does not exist
        if self._kind == "tar.gz":
            # No random access: one worker reads it once for the layout (and once for links), and once for the bytes.
            yield SourcePart(
                name="000000", num_bytes=self._store.size(self._key), where={"start": 0, "end": None, "whole": True}
            )
            return
        survey = self._empty_survey()
        cut = list(stretches(survey.through(index(self._store, self._key)), work.examples_per_part))
        if not survey.num_members:
            raise ValueError(
                f"{self._store.uri_of(self._key)} holds no members{survey.damage and ': '}{survey.damage}. "
                "Give a folder, or an archive of class folders."
            )
        survey.find_targets(index(self._store, self._key))
        self._keep(survey, work)
        for number, stretch in enumerate(cut):
            yield SourcePart(
                name=f"{number:06d}",
                num_bytes=stretch.num_bytes,
                num_examples=stretch.num_members,
                where=stretch.where,
            )

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        survey = self._survey(work)
        with contextlib.nullcontext() if self._kind == "tar" else Spill(work, part) as spill:
            damage = survey.damage_path if part.where["whole"] else ""
            stretch: Any = part.where
            for member, data in read_members(
                self._store, self._key, self._recipe.decode.max_bytes, **stretch, wanted=is_image, names=survey.names
            ):
                damage = "" if member.path == damage else damage
                yield from self._of_member(survey, member, data, spill)
            if damage:  # damage that was found only in the whole directory of the zip
                yield from self._of_member(survey, survey.damaged_member(), None, spill)

    def _empty_survey(self) -> ArchiveIndex:
        return ArchiveIndex(self._source, self._store.uri_of(self._key))

    @staticmethod
    def _keep(survey: ArchiveIndex, work: WorkFolder) -> None:
        work.store.write_json(_SURVEY_KEY, survey.as_json())
        work.store.write_json(_STRUCTURE_KEY, survey.layout.description)

    def _survey(self, work: WorkFolder) -> ArchiveIndex:
        if self._kind != "tar.gz":
            return ArchiveIndex.from_json(
                self._source, self._store.uri_of(self._key), work.store.read_json(_SURVEY_KEY)
            )
        survey = self._empty_survey()
        for _ in survey.through(index(self._store, self._key)):
            pass
        survey.find_targets(index(self._store, self._key))
        self._keep(survey, work)
        return survey

    def _of_member(
        self, survey: ArchiveIndex, member: Member, data: bytes | None, spill: Spill | None
    ) -> Iterator[RawExample]:
        """The examples, or the refusals, for a member."""
        split_rule, layout = SplitRule(self._recipe, frozenset(survey.layout.splits.values())), survey.layout
        refused = member.refused or (None if member.kind == "folder" else refusal_by_name(member.path))
        if not refused and member.kind in ("link", "hard_link"):
            refused = self._of_link(survey.links, member)
        names = survey.links.names_of(member.path) if member.kind == "file" else PathAliases([member.path])
        if refused:
            refusals = {member.path: refused} | self._of_links_to(survey.links, names, refused)
            for path, why in refusals.items():
                example = layout.example([path], split_rule, why)
                yield replace(example, base=self._store.uri, key=self._key)
        elif member.kind == "file" and data is not None:
            readable = [name for name in names.paths if not refusal_by_name(name)]
            groups = [readable] if self._links == "second_label" else [[name] for name in readable]
            links = survey.links
            examples = [
                replace(
                    layout.example(group, split_rule, None),
                    is_link=group[0] != member.path and group[0] not in links.hard,
                )
                for group in groups
                if group
            ]
            read = not all(example.refused for example in examples)
            locator = self._locator(member, data, spill if read else None)
            for example in examples:
                yield replace(example, **locator, data=None if example.refused else data)
            if names.more:
                further = layout.example([f"{member.path} (more names)"], split_rule, names.refusal())
                yield replace(further, base=self._store.uri, key=self._key)

    def _locator(self, member: Member, data: bytes, spill: Spill | None) -> Mapping[str, Any]:
        if member.offset is not None:
            return {"base": self._store.uri, "key": self._key, "offset": member.offset, "length": member.size}
        if spill is None or len(data) > self._recipe.decode.max_bytes:  # refused: not read again
            return {"base": self._store.uri, "key": self._key, "num_bytes": member.size}
        return spill.keep(data)

    def _of_link(self, links: Links, member: Member) -> Refused | None:
        """Why a link is not an example; None if its examples come with the member that it leads to."""
        if self._links == "skip":
            return "ignored_file", "symbolic link" if member.kind == "link" else "hard link"
        target = link_target(member)
        if target is None:
            return "ignored_file", f"link to {member.target!r:.200}, outside of the archive"
        if member.path.startswith(f"{target}/"):
            return "ignored_file", f"link to {target}, a folder that contains the link"
        found = links.resolved(member.path)
        if found is None:
            return "unreadable", f"link to {member.target!r:.200}, which leads through too many links or in a circle"
        if found not in links.existing:
            return "unreadable", f"link to {member.target!r:.200}, which does not exist"
        return ("ignored_file", f"second label of {readable_id(found)}") if self._links == "second_label" else None

    def _of_links_to(self, links: Links, names: PathAliases, refused: Refused) -> dict[str, Refused]:
        """Refusals of the links that would be examples if their target were not refused."""
        if self._links == "second_label":
            return {}  # every link is refused as a link
        (target, *others), (reason, detail) = names.paths, refused
        entries = [name for name in others if name in links.targets and not refusal_by_name(name)]
        refusals: dict[str, Refused] = {name: (reason, f"link to {target}: {detail}") for name in entries}
        return refusals | ({f"{target} (more names)": names.refusal()} if names.more == "links" else {})


def _no_key(path: str) -> Refused | None:
    try:
        checked_key(path)
        path.encode()
    except ValueError as error:  # UnicodeEncodeError is one
        return "unreadable", f"file name: {error}"
    return None
