"""Image files of a data set in an archive (.zip, .tar, .tar.gz) or a folder: parts, and members with their bytes."""

from collections.abc import Callable, Iterator
from typing import Any

from vitline.data_prep.archives.archive_members import Member
from vitline.data_prep.archives.archives import archive_kind, index, read_members, stretches
from vitline.data_prep.sources.raw import Locator, SourcePart, Spill, WorkFolder
from vitline.infra.storage import Store


def image_parts(store: Store, key: str, work: WorkFolder) -> Iterator[SourcePart]:
    """The parts of an archive, or of a folder (`key` ends with /)."""
    if key.endswith("/"):
        batch: list[Any] = []
        number = 0
        for found in store.scan(key):
            batch.append(found.key)
            if len(batch) == work.examples_per_part:
                yield SourcePart(name=f"{key}{number:06d}", num_examples=len(batch), where={"key": key, "files": batch})
                batch, number = [], number + 1
        if batch:
            yield SourcePart(name=f"{key}{number:06d}", num_examples=len(batch), where={"key": key, "files": batch})
    elif archive_kind(key) == "tar.gz":  # can only be read from the beginning
        yield SourcePart(name=key, num_bytes=store.size(key), where={"key": key})
    else:
        for number, stretch in enumerate(stretches(index(store, key), work.examples_per_part)):
            yield SourcePart(
                name=f"{key}-{number:06d}",
                num_bytes=stretch.num_bytes,
                num_examples=stretch.num_members,
                where={"key": key, "stretch": stretch.where},
            )


def image_members(
    store: Store, part: SourcePart, max_bytes: int, wanted: Callable[[str], bool]
) -> Iterator[tuple[Member, bytes | None, tuple[str, int, int] | None]]:
    """The files of a part from `image_parts` whose path is `wanted`: member, bytes, and the location of the bytes if they are
    stored plainly. Paths in a folder are keys of the store. Refused members, such as damage, have no bytes."""
    where: Any = part.where
    if "files" in where:
        for path in where["files"]:
            if wanted(path):
                read = store.read(path, 0, max_bytes + 1)
                yield Member(path, len(read), 0), read, (path, 0, len(read))
        return
    key, stretch = where["key"], where.get("stretch", {})
    for member, data in read_members(store, key, max_bytes, **stretch, wanted=lambda member: wanted(member.path)):
        if member.kind == "damage" or (member.kind == "file" and wanted(member.path)):
            at = None if member.offset is None or data is None else (key, member.offset, len(data))
            yield member, data, at


def place_of(store: Store, where: tuple[str, int, int] | None, data: bytes, spill: Spill) -> Locator:
    """Where the bytes of an image are: at `where` in the store if they are stored plainly, else in the spill."""
    if not where:
        return spill.keep(data)
    key, offset, length = where
    return {"base": store.uri, "key": key, "offset": offset, "length": length}


def image_paths(store: Store, key: str) -> Iterator[str]:
    """Every path in an archive (without reading its bytes) or a folder. Raises ValueError for a damaged archive."""
    if key.endswith("/"):
        yield from (found.key for found in store.scan(key))
        return
    for member in index(store, key):
        if member.kind == "damage":
            raise ValueError(f"{member.refused and member.refused[1]}. Copy the file again.")
        if member.kind == "file" and not member.refused:
            yield member.path
