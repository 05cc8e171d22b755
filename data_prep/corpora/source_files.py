"""The files that a source of tables or archives is made of, and the split that a name says."""

import functools
import hashlib
import re
from collections.abc import Iterator

from data_prep.corpora.raw import SplitRule
from data_prep.labels.label_texts import plain_text
from infra.storage import Listed, Store, open_store


class SourceFiles:
    """The files of one source: a single file, or those below a folder whose names end as its kind of file does.

    Names that begin with `.` or `_`, of files and of folders, are passed over, as Arrow and Spark do: `._a.parquet`,
    `_temporary/`. So are files with other endings.
    """

    def __init__(self, path: str, endings: tuple[str, ...]) -> None:
        self.uri, self._endings = open_store(path).uri, endings

    @functools.cached_property
    def single(self) -> str | None:
        """Key of the one file that the source is; None where it is a folder."""
        parent, _, name = self.uri.rpartition("/")
        if not self._wanted(name) or not parent.partition("://")[1]:  # a whole bucket has no parent
            return None
        return name if open_store(_root(parent)).exists(name) else None

    @functools.cached_property
    def store(self) -> Store:
        """The folder that the keys of `files` are below."""
        return open_store(_root(self.uri.rpartition("/")[0]) if self.single else self.uri)

    def files(self) -> Iterator[Listed]:
        """Every file, in the order of the store. Raises ValueError where there is none."""
        found = False
        for listed in self.store.scan(self.single or ""):
            if listed.key == self.single or (self.single is None and self._wanted(listed.key)):
                found = True
                try:
                    plain_text(listed.key)
                except ValueError:
                    raise ValueError(f"{listed.key!a} in {self.uri} is no name in UTF-8. Rename the file.") from None
                yield listed
        if not found:
            raise ValueError(
                f"{self.uri} is no file and no folder that holds one named {', '.join('*' + e for e in self._endings)}. "
                "Name the file, or the folder that the files lie in."
            )

    def splits(self) -> frozenset[str]:
        """The splits that the names of the files name."""
        return frozenset(split for file in self.files() if (split := named_split(file.key)))

    def fingerprint(self) -> str:
        """Of names, sizes and tags. Raises ValueError where there is no file."""
        digest = hashlib.sha256()
        for file in self.files():
            digest.update(f"{file.key}\0{file.size}\0{file.tag}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _wanted(self, key: str) -> bool:
        hidden = any(name.startswith((".", "_")) for name in key.split("/"))
        return key.lower().endswith(self._endings) and not hidden


def _root(parent: str) -> str:
    return f"{parent}/" if parent == "file://" else parent


def named_split(key: str) -> str | None:
    """The split that a path names: its first word that is one, between whatever is no letter, folders before files.
    None where it names none. So `data/validation-00000-of-00002.parquet` is val, as on the Hugging Face Hub."""
    words = re.split(r"[\W\d_]+", key.lower())
    return next((SplitRule.NAMES[word] for word in words if word in SplitRule.NAMES), None)
