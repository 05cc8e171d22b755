"""Class folders of any depth: the path below the folder is the class, and the hierarchy.

Links, hidden files, AppleDouble files, empty files, foreign files, odd names and endings are ordinary life: what is
no picture by its name is listed as refused, everything else is judged by its content.
"""

import hashlib
import os
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from data_prep.config import ClassFolders, CorpusRecipe
from data_prep.corpora.raw import RawCorpus, RawExample
from data_prep.labels import ClassInfo
from data_prep.splits import hashed_split
from infra.storage import Store, checked_key

SPLIT_FOLDERS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "icon\r"})
# Files that lie beside pictures everywhere. Any other ending, and none, is judged by content.
_NO_PICTURE_ENDINGS = frozenset(
    "." + ending
    for line in (
        "txt md rst csv tsv json jsonl xml html htm css js py ipynb yaml yml toml ini log db sqlite lock",
        "pdf doc docx svg mat npy npz h5 pkl pt pth parquet arrow",
        "zip tar gz tgz bz2 xz 7z rar mp3 wav mp4 avi mov mkv",
    )
    for ending in line.split()
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file found: its path below the folder as the disk spells it, and why it is refused, if so."""

    path: str
    size: int = 0
    mtime_ns: int = 0
    refused: tuple[str, str] | None = None


class ClassFolderCorpus(RawCorpus):
    """A folder of class folders on a local or mounted disk."""

    # So that the corpus is a task too: a setting is chosen on train -> val, and the last training takes both.
    views: Mapping[str, tuple[str, ...]] = {"trainval": ("train", "val")}

    def __init__(self, source: ClassFolders, recipe: CorpusRecipe) -> None:
        if "://" in source.path and not source.path.startswith("file://"):
            raise ValueError(
                f"{source.path}: class folders are read from a local or mounted disk only. Copy or mount the folder."
            )
        self._folder = Path(os.path.abspath(source.path.removeprefix("file://")))
        self._follow, self._recipe = source.links == "follow", recipe
        self.origin = f"file://{self._folder}"

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for entry in self._walk():
            text = f"{entry.path}\0{entry.size}\0{entry.mtime_ns}\0{entry.refused}\n"
            digest.update(text.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def examples(self, root: Store, spill: Store) -> Iterator[RawExample]:
        split_folders = self._split_folders()
        for entry in self._walk():
            example_id = unicodedata.normalize(
                "NFC", entry.path.encode(errors="surrogateescape").decode(errors="replace")
            )
            parts, refused = example_id.split("/"), entry.refused
            split = split_folders.get(parts[0]) if len(parts) > 1 else None
            classes = parts[1:-1] if split else parts[:-1]
            if not classes and not refused:
                refused = ("no_label", "lies in no class folder")
            yield RawExample(
                example_id=example_id,
                labels=("/".join(classes),) if classes else (),
                split=self._placed(example_id, split, set(split_folders.values())),
                base=self.origin,
                key=example_id if refused else entry.path,
                refused=refused,
            )

    def class_info(self, source_id: str) -> ClassInfo:
        return ClassInfo(name=source_id, source_id=source_id, parents=tuple(source_id.split("/")[:-1]))

    def _placed(self, example_id: str, fixed: str | None, present: set[str]) -> str:
        """The split that the folder names; what it lacks is hashed off train: val, and test where neither is there."""
        if fixed in ("val", "test"):
            return fixed
        test_fraction = 0.0 if present & {"val", "test"} else self._recipe.test_fraction
        val_fraction = 0.0 if "val" in present else self._recipe.val_fraction
        return hashed_split(example_id, val_fraction, test_fraction)

    def _split_folders(self) -> dict[str, str]:
        """Top-level folders that are splits: all of them or none, as a class may well be called 'train'."""
        names = [entry.name for entry in os.scandir(self._folder) if entry.is_dir() and not _hidden(entry.name)]
        found = {name: SPLIT_FOLDERS[name.lower()] for name in names if name.lower() in SPLIT_FOLDERS}
        return found if len(found) == len(names) and "train" in found.values() else {}

    def _walk(self) -> Iterator[Entry]:
        if not self._folder.is_dir():
            raise ValueError(f"{self._folder} is no folder; name one that holds a folder of pictures per class.")
        return self._below(self._folder, "", frozenset({os.path.realpath(self._folder)}))

    def _below(self, folder: Path, prefix: str, above: frozenset[str]) -> Iterator[Entry]:
        try:
            children = sorted(os.scandir(folder), key=lambda child: child.name)
        except PermissionError as error:
            yield Entry(prefix.rstrip("/"), refused=("unreadable", f"folder: {error.strerror}"))
            return
        for child in children:
            path = prefix + child.name
            if refused := self._refused(child, path):
                yield Entry(path, refused=refused)
            elif child.is_dir():
                real = os.path.realpath(child.path)
                if real in above:
                    yield Entry(path, refused=("ignored_file", f"link to {real}, a folder that holds this one"))
                else:
                    yield from self._below(Path(child.path), path + "/", above | {real})
            else:
                status = child.stat()
                yield Entry(path, status.st_size, status.st_mtime_ns)

    def _refused(self, child: os.DirEntry[str], path: str) -> tuple[str, str] | None:
        if _hidden(child.name):
            return "ignored_file", "hidden, or of the system"
        if child.is_symlink():
            if not self._follow:
                return "ignored_file", "symbolic link"
            if not os.path.exists(child.path):
                return "unreadable", f"link to {os.readlink(child.path)!r}, which does not exist"
        if child.is_dir():
            return None
        if not child.is_file():
            return "ignored_file", "neither file nor folder"
        ending = os.path.splitext(child.name)[1].lower()
        if ending in _NO_PICTURE_ENDINGS:
            return "ignored_file", f"no picture by its ending {ending}"
        try:
            checked_key(path)
            path.encode()
        except ValueError as error:  # UnicodeEncodeError is one
            return "unreadable", f"file name: {error}"
        return None


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX" or name.lower() in _SYSTEM_FILES
