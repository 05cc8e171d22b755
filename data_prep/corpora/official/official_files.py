"""Which files a data set is distributed as, where from, and on which terms. Nothing is fetched."""

from collections.abc import Mapping

from infra.config import FrozenConfig
from infra.storage import Listed, Store


class OfficialFile(FrozenConfig):
    """One file of a distribution."""

    name: str
    num_bytes: int = 0
    """0: unknown."""
    sha256: str = ""
    """Empty: unknown."""
    other_names: tuple[str, ...] = ()
    """What is read in its place: the file unpacked (a folder ends with /), or packed otherwise."""


class OfficialFiles(FrozenConfig):
    """The files of one data set."""

    title: str
    home: str
    """Where to get them."""
    terms: str
    """Licence, as far as it is known, and what has to be done: an account, rules to accept."""
    files: tuple[OfficialFile, ...]

    def found(self, store: Store) -> dict[str, Listed]:
        """The files in a folder, by official name; a folder's entry is its first file, under the folder's name.

        Raises ValueError naming every missing file, where to get it and what it may be called.
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
                f"{self.title}: {store.uri} lacks {listing}. Get {'it' if len(missing) == 1 else 'them'} from {self.home} "
                f"({self.terms})."
            )
        return there

    def unlike_official(self, there: Mapping[str, Listed]) -> list[str]:
        """What differs in size from the official files, each as a clause; unpacked files are not compared."""
        return [
            f"{file.name} has {found.size:,} bytes, the official one {file.num_bytes:,}"
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
