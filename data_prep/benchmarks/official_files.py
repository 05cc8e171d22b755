"""The files that a data set is distributed as, where to get them and under which terms. Nothing is downloaded."""

from collections.abc import Mapping

from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Listed, Store


class OfficialFile(FrozenConfig):
    """One file of a distribution."""

    name: str
    num_bytes: int = 0
    """Size; 0: unknown."""
    sha256: str = ""
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
    files: tuple[OfficialFile, ...]

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
                f"({self.terms})."
            )
        return there

    def unlike_official(self, there: Mapping[str, Listed]) -> list[str]:
        """Clauses on files whose size differs from the official one; unpacked files are not compared."""
        return [
            f"{file.name} has {found.size:,} bytes, but the official file has {file.num_bytes:,}"
            for file in self.files
            if (found := there.get(file.name)) and found.key == file.name and file.num_bytes not in (0, found.size)
        ]


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
