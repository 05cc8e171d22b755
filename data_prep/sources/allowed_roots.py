"""Where a source may read: below its own folder, and below the further roots that its request allows.

What a table or a link names is made by others. Without this rule it could copy any file of the machine, or any object that the
credentials reach, into a corpus.
"""

import functools
import os
from collections.abc import Iterable

from vitline.infra.storage import open_store


class AllowedRoots:
    """Folders and URI prefixes. Paths are compared after links were followed, on both sides."""

    def __init__(self, uris: Iterable[str]) -> None:
        self._uris = [open_store(uri).uri for uri in uris]
        self._folders = [os.path.realpath(uri.removeprefix("file://")) for uri in self._uris if _is_local(uri)]
        self._real_folder = functools.lru_cache(maxsize=1024)(os.path.realpath)  # examples share few folders

    def __str__(self) -> str:
        return " and ".join(self._uris)

    def allows(self, uri: str) -> bool:
        """Whether an object may be read. It may be missing."""
        if _is_local(uri):
            return any(_is_below(self.real_path(uri.removeprefix("file://")), folder) for folder in self._folders)
        return any(_is_below(uri, root) for root in self._uris)

    def names(self, uri: str) -> bool:
        """Whether a URI is below a root as it is written; a link may lead out of it."""
        return any(_is_below(uri, root) for root in self._uris)

    def real_path(self, path: str) -> str:
        """An absolute path without links. A part that does not exist, or links in a circle, stay as they are."""
        folder, _, name = path.rpartition("/")
        real = f"{self._real_folder(folder or '/').rstrip('/')}/{name}"
        return os.path.realpath(real) if os.path.islink(real) else real


def location(base: str, key: str) -> str:
    """The URI of an object in the store `base`, which may be a whole disk or bucket."""
    return f"{base.removesuffix('/')}/{key}"


def _is_local(uri: str) -> bool:
    return uri.startswith("file://")


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root.rstrip('/')}/")
