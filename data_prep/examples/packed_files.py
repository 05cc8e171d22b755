"""Small files that are kept together in one object of a store, with an index next to it that gives the range of each."""

import hashlib
from collections.abc import Iterable

from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store


class PackedFile(FrozenConfig):
    """A file, and its range in the object of all."""

    name: str
    offset: int
    length: int
    sha256: str


class PackedIndex(FrozenConfig):
    """The files; written after their bytes."""

    package_sha256: str
    """What they follow from, such as the checksum of the archive that they were in."""
    members: tuple[PackedFile, ...]


def members_key(folder: str) -> str:
    """The object that holds the bytes of all files."""
    return f"{folder}/members.bin"


def packed_files(store: Store, folder: str, sha256: str) -> tuple[PackedFile, ...] | None:
    """The files in the folder; None if there are none that follow from this."""
    try:
        index = PackedIndex.model_validate(store.read_json(_index_key(folder)))
    except FileNotFoundError:
        return None
    return index.members if index.package_sha256 == sha256 and store.exists(members_key(folder)) else None


def pack_files(store: Store, folder: str, sha256: str, files: Iterable[tuple[str, bytes]]) -> tuple[PackedFile, ...]:
    """Writes the files, each a name and its bytes, into the folder."""
    members, offset = list[PackedFile](), 0
    with store.writer(members_key(folder)) as kept:
        for name, data in files:
            kept.write(data)
            members.append(
                PackedFile(name=name, offset=offset, length=len(data), sha256=hashlib.sha256(data).hexdigest())
            )
            offset += len(data)
    index = PackedIndex(package_sha256=sha256, members=tuple(members))
    store.write_json(_index_key(folder), index.model_dump(mode="json"))
    return index.members


def _index_key(folder: str) -> str:
    return f"{folder}/index.json"
