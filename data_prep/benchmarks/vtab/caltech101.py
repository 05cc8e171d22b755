"""Caltech-101, whose archive does not contain VTAB's splits: they are found by comparing images.

TFDS draws 30 images per class for its train split with a fixed seed, but in the order in which a file system happened to list the
files, so prepared copies may differ. The copy behind clip-benchmark/wds_vtab-caltech101 (Hugging Face Hub) is published as pixels, in
VTAB's train and test splits, without file names. Each of its images is searched in the archive; the remaining images of the archive
are val. This gives the keys of train and, with them, the order of TFDS, which must begin with the published train split: this is
checked.

A copy prepared by TFDS is read by `data_prep/sources/tfds.py`.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import simplejpeg

from vitline.data_prep.archives.archive_bytes import Gunzipped, RangeReader
from vitline.data_prep.archives.archive_members import CorruptArchive, Member
from vitline.data_prep.archives.archives import archive_kind, member_pieces, read_members
from vitline.data_prep.archives.tar_members import read_tar, tar_members
from vitline.data_prep.benchmarks.annotation_files import keep_labels
from vitline.data_prep.benchmarks.image_files import image_paths
from vitline.data_prep.benchmarks.labelled_archive import LabelledArchive
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.official_splits import OFFICIAL_SPLITS
from vitline.data_prep.benchmarks.tfds_order import tfds_order
from vitline.data_prep.decode import DecodePolicy, decode
from vitline.data_prep.examine.images import pixel_sha256
from vitline.data_prep.sources.folder_layout import refusal_by_name
from vitline.data_prep.sources.raw import SourcePart, WorkFolder
from vitline.infra.storage import Store

_INNER = "caltech-101/101_ObjectCategories.tar.gz"
_HUB = "clip-benchmark/wds_vtab-caltech101"
_Image = tuple[bytes, str]
"""Digest of the pixels, and class: the class distinguishes equal images of several classes."""


class Caltech101(LabelledArchive):
    """Keys are <folder>/<file>; classes are the lower-cased folders in alphabetical order, including background_google."""

    official = official_files("caltech101")

    def labels(self) -> Mapping[str, Mapping[str, int]]:
        numbers = {name: number for number, name in enumerate(self._class_names)}
        labels: dict[str, dict[str, int]] = {"train": {}, "test": {}}
        for key, split in self._vtab_splits.items():
            labels["test" if split == "test" else "train"][key] = numbers[_class(key)]
        return labels

    def key_of(self, path: str) -> str | None:
        return _key(path) if _is_image(path) else None

    def class_names(self) -> Sequence[str]:
        return self._class_names

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        if archive_kind(self.archive) == "zip":  # with a single tar.gz, which is read from its beginning
            keep_labels(work, self.checked_labels)
            yield SourcePart(name=self.archive, num_bytes=self.store.size(self.archive), where={"key": self.archive})
        else:
            yield from super().parts(work)

    @cached_property
    def _class_names(self) -> list[str]:
        if archive_kind(self.archive) == "zip":
            members = tar_members(_InnerTar(self.store, self.archive), whole=True)
            try:
                paths = [member.path for member in members if member.kind == "file" and not member.refused]
            except CorruptArchive as error:
                raise ValueError(f"{error}. Download it again from {self.official.home}.") from error
        else:
            paths = [*image_paths(self.store, self.archive)]
        return sorted({_class(_key(path)) for path in paths if _is_image(path)})

    @cached_property
    def _vtab_splits(self) -> dict[str, str]:
        """train, val or test, by key."""
        published, official_splits = (
            {split: Counter(self._published(split)) for split in ("train", "test")},
            OFFICIAL_SPLITS["caltech101"],
        )
        for split, expected in (("train", official_splits.train.stop), ("test", official_splits.test.stop)):
            if (there := published[split].total()) != expected:
                raise ValueError(
                    f"{self.store.uri}/{split} has {there:,} images, but {expected:,} are expected. Copy all its tars again "
                    f"from {_HUB}."
                )
        splits = _matched(dict(self._archive_images()), published)
        if missing := published["train"].total() + published["test"].total() - sum(s != "val" for s in splits.values()):
            raise ValueError(
                f"{missing:,} of the images in train/ and test/ at {self.store.uri} have no counterpart with equal pixels and "
                f"the same class in {self.archive}. Use the original tars of {_HUB} (webp, lossless), and the archive from "
                f"{self.official.home}."
            )
        trainval = [key for key, split in splits.items() if split != "test"]
        begin = {trainval[i] for i in tfds_order("train", trainval)[: official_splits.train.stop]}
        if wrong := [key for key in trainval if (splits[key] == "train") != (key in begin)]:
            raise ValueError(
                f"{len(wrong):,} images contradict the order of TensorFlow Datasets, for example {wrong[0]}: {self.store.uri}/train "
                f"is not the beginning of a train split, although the archive contains all its images. {self.official.advice}"
            )
        return splits

    def _archive_images(self) -> Iterator[tuple[str, set[_Image]]]:
        """Key of each image of the archive, and the pixels that TFDS may have decoded. Raises ValueError for a damaged one."""
        where: dict[str, Any] = {"key": self.archive}
        if self.archive.endswith("/"):
            where["files"] = [listed.key for listed in self.store.scan(self.archive)]
        for member, data, _ in self.members(SourcePart(name=self.archive, where=where), _is_image):
            key = _key(member.path)
            digests = {self._digest(self.archive, member, data)}
            with contextlib.suppress(ValueError):  # not a JPEG
                # TensorFlow decodes with the faster, less exact cosine transform (kernels/image/decode_image_op.cc), which
                # changes two thirds of the pixels.
                digests.add(pixel_sha256(simplejpeg.decode_jpeg(data, "RGB", fastdct=True, strict=False)))
            yield key, {(digest, _class(key)) for digest in digests}

    def _published(self, split: str) -> Iterator[_Image]:
        """The images of a split on the Hub. Raises ValueError for a damaged one, or one without a label."""
        for listed in self.store.scan(self.file(f"{split}/")):
            if archive_kind(listed.key) not in ("tar", "tar.gz"):
                continue
            digests, labels = dict[str, bytes](), dict[str, str]()
            for member, data in read_members(self.store, listed.key, self.max_bytes):
                name, _, ending = member.path.rpartition(".")
                if member.refused or ending in ("webp", "png", "jpg"):
                    digests[name] = self._digest(listed.key, member, data)
                elif ending == "cls":
                    labels[name] = (data or b"").decode(errors="replace").strip()
            numbers = {str(number): name for number, name in enumerate(self._class_names)}
            for name in digests.keys() | labels.keys():
                if name not in digests or labels.get(name) not in numbers:
                    raise ValueError(
                        f"{self.store.uri_of(listed.key)}: {name} has {'an' if name in digests else 'no'} image and "
                        f"label {labels.get(name)!r:.40}; expected 0 to {len(numbers) - 1}. Copy it again from {_HUB}."
                    )
                yield digests[name], numbers[labels[name]]

    def _digest(self, archive: str, member: Member, data: bytes | None) -> bytes:
        """Digest of an image as stored, without EXIF rotation."""
        try:
            if data is None:
                raise ValueError(member.refused[1] if member.refused else member.kind)
            return pixel_sha256(decode(data, DecodePolicy(max_bytes=self.max_bytes, exif_orientation="ignore")))
        except ValueError as error:  # ImageRejected is one
            raise self.official.damaged(f"{self.store.uri}/{archive}: {member.path}", error) from error

    def members(
        self, part: SourcePart, wanted: Callable[[str], bool]
    ) -> Iterator[tuple[Member, bytes | None, tuple[str, int, int] | None]]:
        key = str(part.where["key"])
        if archive_kind(key) != "zip":
            yield from super().members(part, wanted)
            return
        try:
            inner = _InnerTar(self.store, key)
            for member, data in read_tar(inner, self.max_bytes, True, lambda member: wanted(member.path)):
                if member.kind == "file" and wanted(member.path):
                    yield member, data, None
        except CorruptArchive as error:
            yield error.as_member(), None, None


def _matched(archive: Mapping[str, set[_Image]], published: Mapping[str, Counter[_Image]]) -> dict[str, str]:
    """train, val or test, by key: val for images of the archive that are not published.

    Equal images of one class cannot be distinguished. Those of train are assumed to come first in the order of TFDS, those of val
    last: if this contradicts the order, every other assignment does as well.
    """
    keys: dict[_Image, list[str]] = {}
    for key, images in archive.items():
        for image in images:
            keys.setdefault(image, []).append(key)
    splits = dict.fromkeys(archive, "val")
    for image in published["train"].keys() | published["test"].keys():
        equal, train, test = keys.get(image, []), published["train"][image], published["test"][image]
        ordered = [equal[i] for i in tfds_order("train", equal)]
        splits |= dict.fromkeys(ordered[:train], "train") | dict.fromkeys(ordered[train : train + test], "test")
    return splits


def _is_image(path: str) -> bool:
    return path.count("/") >= 1 and path.endswith(".jpg") and refusal_by_name(path) is None


def _key(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def _class(key: str) -> str:
    return key.partition("/")[0].lower()


class _InnerTar(Gunzipped):
    """The tar inside the official zip."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(store, key)
        self._packed = _Unzipped(store, key)
        self.archive = self._packed.archive


class _Unzipped(RangeReader):
    """The bytes of the tar.gz inside the official zip, in order."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(store, key)
        self.archive = f"{self.archive}!{_INNER}"
        self._pieces, self._piece = member_pieces(store, key, _INNER), memoryview(b"")

    def take(self, count: int) -> bytes:
        try:
            self._piece = self._piece or memoryview(next(self._pieces, b""))
        except FileNotFoundError as error:
            raise CorruptArchive(self.archive, 0, "the file is not in the zip, so this is another archive") from error
        data, self._piece = bytes(self._piece[:count]), self._piece[count:]
        self.position += len(data)
        if not data:
            self.end = self.position
        return data
