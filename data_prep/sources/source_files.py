"""Files of sources that consist of tables or archives, and splits named in paths."""

import functools
import json
import os
import posixpath
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from vitline.data_prep.labels.label_texts import plain_text
from vitline.data_prep.sources.allowed_roots import AllowedRoots, location
from vitline.data_prep.sources.raw import files_digest
from vitline.data_prep.sources.split_names import SplitPatterns, read_names, split_word
from vitline.infra.storage import Listed, Store, open_store


class FileSplits(NamedTuple):
    """The splits of the files of a source."""

    of: Mapping[str, str]
    """By key; empty if the source names no splits."""
    description: str
    """For people."""

    @property
    def present(self) -> frozenset[str]:
        return frozenset(self.of.values())


class SourceFiles:
    """The files of one source: a single file, or all files with certain endings below a folder.

    Files and folders whose names begin with `.` or `_`, such as `._a.parquet` or `_temporary/`, are skipped, as in Arrow and
    Spark. Files with other endings are skipped as well. A link that leads out of the source, and not below `allowed_roots`, is an
    error; a link to a folder of the source is skipped, as the files are where that folder is.
    """

    def __init__(
        self,
        path: str,
        endings: tuple[str, ...],
        allowed_roots: tuple[str, ...] = (),
        splits: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.uri, self._endings, self._given = open_store(path).uri, endings, splits
        self._allowed = AllowedRoots([self.uri, *allowed_roots])

    @functools.cached_property
    def single(self) -> str | None:
        """Key of the file, if the source is a single file; None for a folder."""
        parent, _, name = self.uri.rpartition("/")
        if not self._wanted(name) or not parent.partition("://")[1]:  # a whole bucket has no parent
            return None
        return name if open_store(_root(parent)).exists(name) else None

    @functools.cached_property
    def store(self) -> Store:
        """The folder that contains the keys of `files`."""
        return open_store(_root(self.uri.rpartition("/")[0]) if self.single else self.uri)

    def files(self) -> Iterator[Listed]:
        """Every file, in the order of the store; with `source.splits` only those that it names. Raises ValueError if there is none."""
        return (file for file in self._every() if not self._given or file.key in self.splits.of)

    def _every(self) -> Iterator[Listed]:
        found = False
        self._check_linked_folders()
        for listed in self.store.scan(self.single or ""):
            if listed.key == self.single or (self.single is None and self._wanted(listed.key)):
                found = True
                self._check_link(listed.key)
                try:
                    plain_text(listed.key)
                except ValueError:
                    raise ValueError(f"{listed.key!a} in {self.uri} is not valid UTF-8. Rename the file.") from None
                yield listed
        if not found:
            raise ValueError(
                f"{self.uri} is neither a file nor a folder with files named {', '.join('*' + e for e in self._endings)}. "
                "Give the file, or the folder that holds the files."
            )

    @functools.cached_property
    def splits(self) -> FileSplits:
        """The splits of the files, by `source.splits` or else by their names. Raises ValueError if that is not certain."""
        return _read_splits([file.key for file in self._every()], self._given, self.uri)

    def fingerprint(self) -> str:
        """Digest of names, sizes and tags. Raises ValueError if there is no file."""
        return files_digest(self.files())

    def _check_linked_folders(self) -> None:
        """Raises ValueError for a link to a folder outside of the source: the store does not follow it."""
        top = self.store.uri.removeprefix("file://")
        for parent, folders, _ in os.walk(top) if not self.single and self.store.uri.startswith("file://") else ():
            folders[:] = [name for name in folders if not name.startswith((".", "_"))]
            for name in folders:
                if os.path.islink(path := os.path.join(parent, name)) and not AllowedRoots([self.uri]).allows(
                    f"file://{path}"
                ):
                    raise ValueError(
                        f"{os.path.relpath(path, top)!r} in {self.uri} is a link to {os.path.realpath(path)}, outside of the "
                        "source. Links to folders are not followed: move or copy the folder, or prepare it as a source of its own."
                    )

    def _check_link(self, key: str) -> None:
        """Raises ValueError for a file to which a link leads out of the source."""
        uri = location(self.store.uri, key)
        if not self.single and not self._allowed.allows(uri):
            real = self._allowed.real_path(uri.removeprefix("file://"))
            raise ValueError(
                f"{key!r} in {self.uri} is a link to {real}, outside of the source. Copy the file, or allow its folder: "
                f"--set 'source.allowed_roots={json.dumps([os.path.dirname(real)], ensure_ascii=False)}'."
            )

    def _wanted(self, key: str) -> bool:
        hidden = any(name.startswith((".", "_")) for name in key.split("/"))
        return key.lower().endswith(self._endings) and not hidden


def _root(parent: str) -> str:
    return f"{parent}/" if parent == "file://" else parent


def _read_splits(keys: Collection[str], given: Mapping[str, str], uri: str) -> FileSplits:
    """Raises ValueError if the names of the files do not say for certain whether they are splits."""
    if given:
        matches = {key: SplitPatterns(given).match(key.split("/")) for key in keys}
        found = {key: match[0] for key, match in matches.items() if match}
        if not found:
            raise ValueError(
                f"source.splits matches no file of {uri}, such as {min(keys)!r}. Give patterns of paths below the source."
            )
        return FileSplits(found, _counted(found))
    around = posixpath.commonpath([posixpath.dirname(key) for key in keys])
    num_around = around.count("/") + 1 if around else 0
    deciding = {key: _deciding_name(key, num_around) for key in keys}
    reading = read_names({*deciding.values()}, "file")
    if reading.doubt:
        raise ValueError(
            f'{uri} {reading.doubt}. Say which files are which split: --set \'source.splits={{"train-*": "train", "test-*": "test"}}\', '
            'with patterns of paths; {"*": "train"} if their names say nothing.'
        )
    if reading.splits:
        found = {key: reading.splits[name] for key, name in deciding.items()}
        return FileSplits(found, _counted(found))
    ignored = next((name for name in deciding.values() if split_word(name)), "")
    note = f"no split is taken from names of files, although one is named {ignored!r}: not all of them name splits beside train"
    return FileSplits({}, note if ignored else "")


def _deciding_name(key: str, num_around: int) -> str:
    """The first folder in a path that names a split or another set; else the file name. A folder around all files decides only if it
    is called as a split and nothing else, and none that states the value of another column than `split`, such as `label=test`."""
    *folders, name = key.split("/")
    other = {folder for folder in folders if "=" in folder and not folder.lower().startswith("split=")}
    words = ((f, depth < num_around, split_word(f)) for depth, f in enumerate(folders) if f not in other)
    found = (folder for folder, around, word in words if word and not (around and word.rest))
    return next(found, name.partition(".")[0])


def _counted(splits: Mapping[str, str]) -> str:
    counts = Counter(splits.values())
    return ", ".join(
        f"{split}: {n:,} files, such as {min(k for k in splits if splits[k] == split)}" for split, n in counts.items()
    )
