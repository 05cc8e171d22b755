"""The files that a data set is distributed as, where to get them and under which terms. Nothing is downloaded.

`official_files.toml` lists them for every data set.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from pydantic import Field, NonNegativeInt

from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Listed, Store


class OfficialFile(FrozenConfig):
    """One file of a distribution."""

    name: str
    num_bytes: NonNegativeInt = 0
    """Size; 0: unknown."""
    sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    """Empty: unknown."""
    other_names: tuple[str, ...] = ()
    """Names accepted instead: the unpacked file (a folder ends with /), or another packing."""


class OfficialFiles(FrozenConfig):
    """The files of one data set."""

    title: str
    home: str
    """Where to get them."""
    terms: str
    """Licence, as far as it is known, and requirements: an account, rules to accept."""
    advice: str = ""
    """How to use them; the end of the error about missing files."""
    files: tuple[OfficialFile, ...] = Field(min_length=1)

    def found(self, store: Store) -> dict[str, Listed]:
        """The files present in a folder, by official name; for a folder, its first file with the name of the folder.

        Raises ValueError that lists every missing file, its accepted names and where to get it.
        """
        there: dict[str, Listed] = {}
        for file in self.files:
            for name in (file.name, *file.other_names):
                if listed := _listed(store, name):
                    there[file.name] = listed
                    break
        if missing := [file for file in self.files if file.name not in there]:
            listing = "; ".join(_described(file) for file in missing)
            raise ValueError(
                f"{self.title}: {store.uri} lacks {listing}. Download {'it' if len(missing) == 1 else 'them'} from {self.home} "
                f"({self.terms}). {self.advice}".rstrip()
            )
        return there

    def damaged(self, where: str, what: object) -> ValueError:
        """The error for a file whose content is not as expected."""
        return ValueError(f"{where}: {str(what).rstrip('.')}. Download it again from {self.home}.")

    def incomplete(self, store: Store, there: Mapping[str, Listed], examples: str, expected: int) -> ValueError:
        """The error for files with other examples than the official ones. It names the files of another size."""
        unlike = (
            f"{file.name} has {found.size:,} bytes, but the official file has {file.num_bytes:,}. "
            for file in self.files  # unpacked files are not compared
            if (found := there.get(file.name)) and found.key == file.name and file.num_bytes not in (0, found.size)
        )
        return ValueError(
            f"{self.title} at {store.uri} has {examples}, but {expected:,} are expected. {''.join(unlike)}Download its files again "
            f"from {self.home}."
        )


def official_files(data_set: str) -> OfficialFiles:
    """The official files of a data set."""
    return OfficialFiles.model_validate(_tables()[data_set])


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / "official_files.toml").read_text(encoding="utf-8"))


def files_fingerprint(there: Mapping[str, Listed]) -> str:
    """A digest of names, sizes and tags of the files of a data set."""
    digest = hashlib.sha256()
    for name, found in sorted(there.items()):
        digest.update(f"{name}\0{found.key}\0{found.size}\0{found.tag}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _listed(store: Store, name: str) -> Listed | None:
    for found in store.scan(name):
        if found.key == name:
            return found
        if name.endswith("/") and found.key.startswith(name):
            return Listed(name, found.size, found.tag)
        if not found.key.startswith(name):
            break
    return None


def _described(file: OfficialFile) -> str:
    size = f", {file.num_bytes:,} bytes" if file.num_bytes else ""
    others = f" (or {', '.join(file.other_names)})" if file.other_names else ""
    return f"{file.name}{size}{others}"
