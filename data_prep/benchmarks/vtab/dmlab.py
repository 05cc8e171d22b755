"""DMLab: frames of DeepMind Lab; the class combines the distance of an object and the sign of its reward."""

import re
from collections.abc import Iterator, Mapping, Sequence

from vitline.data_prep.archives.archive_members import CorruptArchive
from vitline.data_prep.archives.archives import archive_kind, open_members
from vitline.data_prep.archives.tfrecord import DamagedFile, Feature, Frame, frames, frames_inside, read_example
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.sources.raw import SourcePart, WorkFolder
from vitline.infra.storage import Listed

_SHARD = re.compile(r"(?:^|/)dmlab-(train|validation|test)\.tfrecord[^/]*\Z")
_FEATURES = frozenset({"image", "filename", "label"})


class DmLab(BenchmarkData):
    """TFRecord files in an archive that is read from its beginning: once for the keys, once for the images."""

    official = official_files("dmlab")

    def files(self) -> dict[str, Listed]:
        """The archive or, if it is unpacked, the files dmlab-{train,validation,test}.tfrecord*."""
        try:
            return super().files()
        except ValueError:
            if unpacked := {found.key: found for found in self.store.scan("dmlab-") if _split_of(found.key)}:
                return unpacked
            raise

    def keys(self) -> Mapping[str, Sequence[Key]]:
        keys: dict[str, list[Key]] = {"train": [], "validation": [], "test": []}
        try:
            for file in self.files().values():
                for split, name, records in self._shards(file.key):
                    keys[split].extend(_checked_key(frame, name) for frame in records)
        except CorruptArchive as error:
            raise ValueError(f"{error}. Download it again from {self.official.home}.") from error
        return keys

    def class_names(self) -> Sequence[str]:
        return [f"{reward} reward, {how_far}" for reward in ("positive", "negative") for how_far in _HOW_FAR]

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        for file in self.files().values():
            yield SourcePart(name=file.key, num_bytes=file.size, where={"key": file.key})

    def images(self, part: SourcePart, work: WorkFolder) -> Iterator[Found]:
        key = str(part.where["key"])
        try:
            for split, name, records in self._shards(key):
                for frame in records:
                    yield self._found(split, frame, name, None if archive_kind(key) else key)
        except (CorruptArchive, DamagedFile) as error:
            yield Found("train", f"({key} is damaged)", refused=("damaged_archive", str(error)))

    def _shards(self, key: str) -> Iterator[tuple[str, str, Iterator[Frame]]]:
        """Split, display name and records of each record file. Raises CorruptArchive."""
        if not archive_kind(key):
            yield _split_of(key), self.store.uri_of(key), frames(self.store, key)
            return
        for member, source in open_members(self.store, key, lambda member: bool(_split_of(member.path))):
            name = f"{self.store.uri_of(key)}!{member.path}"
            yield _split_of(member.path), name, frames_inside(source, name, member.size)

    def _found(self, split: str, frame: Frame, name: str, plain_key: str | None) -> Found:
        """A record as an image. `plain_key`: the object that holds the record uncompressed, if there is one."""
        here = f"(record at byte {frame.offset} of {name})"
        try:
            features = _features(frame)
            key, (label,) = _text(frame, features), features["label"].values
            (image,) = features["image"].values
            image = slice(image.start, min(image.stop, image.start + self.max_bytes + 1))
        except (AttributeError, KeyError, ValueError) as error:
            detail = f"the record does not have one filename, image and label: {error}"
            return Found(split, here, refused=("damaged_archive", frame.damage or detail))
        if label not in range(len(self.class_names())):
            return Found(split, key, refused=("no_label", f"label {label} in {here} is outside of 0 to 5"))
        where = None if plain_key is None else (plain_key, frame.offset + image.start, image.stop - image.start)
        return Found(split, key, label, frame.payload[image], where)


_HOW_FAR = ("near", "far", "very far")


def _split_of(path: str) -> str:
    """The split of a record file; empty for any other file."""
    found = _SHARD.search(path)
    return found[1] if found else ""


def _features(frame: Frame, wanted: frozenset[str] = _FEATURES) -> dict[str, Feature]:
    if frame.damage:
        raise ValueError(frame.damage)
    return read_example(frame.payload, wanted)


def _text(frame: Frame, features: Mapping[str, Feature]) -> str:
    """The file name of a frame, which is its key."""
    names = features["filename"].values if "filename" in features else []
    if len(names) != 1 or not isinstance(names[0], slice):
        raise ValueError("the record has no filename")
    return frame.payload[names[0]].decode()


def _checked_key(frame: Frame, name: str) -> str:
    try:
        return _text(frame, _features(frame, frozenset({"filename"})))
    except ValueError as error:
        raise ValueError(f"{name}, record at byte {frame.offset}: {error}. Download the file again.") from error
