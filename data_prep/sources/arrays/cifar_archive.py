"""CIFAR's binary archives (https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version"): records of one or two labels and
3,072 bytes: red, green, blue."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import JsonValue

from vitline.data_prep.archives.archive_members import Member
from vitline.data_prep.archives.archives import archive_kind, index, read_members
from vitline.data_prep.sources.arrays.array_layouts import READ_BYTES, ArrayImage, OneFile, damage_of, unpacked
from vitline.data_prep.sources.raw import SourcePart

_MAX_MEMBER_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class _CifarLayout:
    splits: Mapping[str, str]
    names: str
    num_labels: int
    label_at: int
    num_classes: int


_CIFAR_100 = {"train.bin": "train", "test.bin": "test"}
_CIFAR_LAYOUTS = {
    "cifar10": _CifarLayout(
        {**{f"data_batch_{i}.bin": "train" for i in range(1, 6)}, "test_batch.bin": "test"},
        names="batches.meta.txt",
        num_labels=1,
        label_at=0,
        num_classes=10,
    ),
    "cifar100": _CifarLayout(_CIFAR_100, "fine_label_names.txt", num_labels=2, label_at=1, num_classes=100),
    "cifar100_coarse": _CifarLayout(_CIFAR_100, "coarse_label_names.txt", num_labels=2, label_at=0, num_classes=20),
}
_CIFAR_SHAPE = (3, 32, 32)


class Cifar(OneFile):
    """A CIFAR archive. It is one part, because a tar.gz is read from its beginning. Positions count through all batches, as in
    the keys of TFDS."""

    def __init__(self, uri: str, layout: str) -> None:
        super().__init__(uri, layout)
        self._cifar = _CIFAR_LAYOUTS[layout]
        self.num_classes = self._cifar.num_classes
        self._record_bytes = self._cifar.num_labels + math.prod(_CIFAR_SHAPE)
        self._names: list[str] | None = None

    def parts(self, max_pixels: int) -> Iterator[SourcePart]:
        (file,), counts = self.files(), dict[str, int]()
        self._check_gzip()
        for member in index(self.store, self.key):
            if member.kind == "damage":
                raise ValueError(f"{self.uri} cannot be read: {member.refused and member.refused[1]}. Copy it again.")
            name = _name(member)
            if name in self._cifar.splits:
                if name in counts or member.size % self._record_bytes or member.size > _MAX_MEMBER_BYTES:
                    raise ValueError(
                        f"{self.uri} holds {name} with {member.size:,} bytes; expected one such file, with a multiple of "
                        f"{self._record_bytes:,} bytes. It is not the binary archive of {self.layout}."
                    )
                counts[name] = member.size // self._record_bytes
        if missing := self._cifar.splits.keys() - counts.keys():
            raise ValueError(
                f"{self.uri} lacks {', '.join(sorted(missing))}. Give the binary archive of {self.layout}, such as "
                f"cifar-{10 if self.layout == 'cifar10' else 100}-binary.tar.gz; the Python archive consists of pickles."
            )
        where: dict[str, JsonValue] = {"counts": dict(counts), "present": ["test", "train"]}
        yield SourcePart(name=self.key, num_bytes=file.size, num_examples=sum(counts.values()), where=where)

    def images(self, part: SourcePart) -> Iterator[ArrayImage]:
        counts: Any = part.where["counts"]
        firsts = self._firsts(counts)
        for member, data in read_members(self.store, self.key, _MAX_MEMBER_BYTES, wanted=self._wanted):
            name = _name(member)
            if data is not None and name in firsts and len(data) == counts[name] * self._record_bytes:
                yield from self._of_member(self._cifar.splits[name], firsts.pop(name), data)
        if firsts:
            raise ValueError(f"{self.uri}: {', '.join(firsts)} changed since it was listed. Start again.")

    def num_images(self, part: SourcePart) -> dict[str, int]:
        """Number of images of each split."""
        counts: Any = part.where["counts"]
        totals: dict[str, int] = {}
        for name, split in self._cifar.splits.items():
            totals[split] = totals.get(split, 0) + counts[name]
        return totals

    def class_names(self) -> list[str]:
        if self._names is None:
            wanted = self._cifar.names
            read = read_members(self.store, self.key, 1 << 20, wanted=lambda member: _name(member) == wanted)
            text = next((data for member, data in read if data is not None), b"").decode(errors="replace")
            self._names = [line.strip() for line in text.splitlines() if line.strip()]
        return self._names

    def _wanted(self, member: Member) -> bool:
        return _name(member) in self._cifar.splits

    def _check_gzip(self) -> None:
        # The checksum of gzip follows the end of the tar, which reading members does not reach.
        if archive_kind(self.key) == "tar.gz":
            with unpacked(self.store, self.key) as plain, damage_of(self.uri):
                while plain.read(READ_BYTES):
                    pass

    def _firsts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Position of the first image of each file, whatever the order of the files in the archive."""
        firsts, ends = {}, dict[str, int]()
        for name, split in self._cifar.splits.items():
            firsts[name] = ends.get(split, 0)
            ends[split] = firsts[name] + counts[name]
        return firsts

    def _of_member(self, split: str, first: int, data: bytes) -> Iterator[ArrayImage]:
        records = np.frombuffer(data, np.uint8).reshape(-1, self._record_bytes)
        for number, record in enumerate(records, first):
            label = int(record[self._cifar.label_at])
            pixels = record[self._cifar.num_labels :].reshape(_CIFAR_SHAPE).transpose(1, 2, 0)
            yield ArrayImage(split, number, pixels, label)


def _name(member: Member) -> str:
    return member.path.rpartition("/")[2] if member.kind == "file" and not member.refused else ""
