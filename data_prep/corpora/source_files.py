"""Files of sources that consist of tables or archives, and splits named in paths."""

import functools
import hashlib
import re
from collections.abc import Iterator

from vitline.data_prep.corpora.raw import SplitRule
from vitline.data_prep.labels.label_texts import plain_text
from vitline.infra.storage import Listed, Store, open_store


class SourceFiles:
    """The files of one source: a single file, or all files with certain endings below a folder.

    Files and folders whose names begin with `.` or `_`, such as `._a.parquet` or `_temporary/`, are skipped, as in Arrow and
    Spark. Files with other endings are skipped as well.
    """

    def __init__(self, path: str, endings: tuple[str, ...]) -> None:
        self.uri, self._endings = open_store(path).uri, endings

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
        """Every file, in the order of the store. Raises ValueError if there is none."""
        found = False
        for listed in self.store.scan(self.single or ""):
            if listed.key == self.single or (self.single is None and self._wanted(listed.key)):
                found = True
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

    def splits(self) -> frozenset[str]:
        """The splits that the file names contain."""
        return frozenset(split for file in self.files() if (split := named_split(file.key)))

    def fingerprint(self) -> str:
        """Digest of names, sizes and tags. Raises ValueError if there is no file."""
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
    """The split named in a path: its first word that is the name of a split, with folders before files; None if there is none.
    So `data/validation-00000-of-00002.parquet` is val, as on the Hugging Face Hub."""
    words = re.split(r"[\W\d_]+", key.lower())
    return next((SplitRule.NAMES[word] for word in words if word in SplitRule.NAMES), None)
