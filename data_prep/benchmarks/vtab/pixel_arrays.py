"""Data sets of pixel arrays: each image becomes a lossless PNG, and its key is its index in the array."""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.archives.matlab_file import read_mat
from vitline.data_prep.benchmarks.label_rules import svhn_digit
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.sources.arrays.cifar_archive import Cifar
from vitline.data_prep.sources.raw import SourcePart, WorkFolder
from vitline.infra.storage import Store


class _CifarArchive(BenchmarkData):
    """The binary archive is the only accepted file: the Python archive consists of pickles."""

    layout: ClassVar[str]

    def __init__(self, store: Store, task: str, max_bytes: int) -> None:
        super().__init__(store, task, max_bytes)
        self._arrays = Cifar(store.uri_of(self.official.files[0].name), self.layout)

    def keys(self) -> Mapping[str, Sequence[Key]]:
        (part,) = self._arrays.parts(max_pixels=32 * 32)
        return {split: range(count) for split, count in self._arrays.num_images(part).items()}

    def class_names(self) -> Sequence[str]:
        return self._arrays.class_names()

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        yield from self._arrays.parts(max_pixels=32 * 32)

    def images(self, part: SourcePart, work: WorkFolder) -> Iterator[Found]:
        for image in self._arrays.images(part):
            yield Found(str(image.split), image.number, image.label, lossless_png(image.pixels))


class Cifar10(_CifarArchive):
    """CIFAR-10. Keys count through the five batches."""

    layout = "cifar10"
    official = official_files("cifar10")


class Cifar100(_CifarArchive):
    """CIFAR-100 with fine labels."""

    layout = "cifar100"
    official = official_files("cifar100")


_SVHN_FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat"}
_SVHN_SHAPE = (3, 32, 32)
"""Axes of an image as MATLAB stores it: colour, column, row."""


class Svhn(BenchmarkData):
    """House numbers, cropped. A part is one of the two MATLAB files, which takes a worker about half a gigabyte of memory."""

    official = official_files("svhn")

    def keys(self) -> Mapping[str, Sequence[Key]]:
        return {split: range(len(self._arrays(split)[1])) for split in _SVHN_FILES}

    def class_names(self) -> Sequence[str]:
        return [str(digit) for digit in range(10)]

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        for split, name in _SVHN_FILES.items():
            yield SourcePart(name=split, num_bytes=self.files()[name].size)

    def images(self, part: SourcePart, work: WorkFolder) -> Iterator[Found]:
        pixels, labels = self._arrays(part.name)
        for number, label in enumerate(labels):
            yield Found(part.name, number, label, lossless_png(pixels[number].transpose(2, 1, 0)))

    def _arrays(self, split: str) -> tuple[np.ndarray, list[int]]:
        """Images, each (colour, column, row), and labels."""
        key = self.file(_SVHN_FILES[split])
        try:
            found = read_mat(self.store.read(key))
            pixels, stored = found.get("X"), found.get("y")
            if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
                raise ValueError("it has no array X of uint8.")
            if not isinstance(stored, np.ndarray) or pixels.size != len(stored) * 32 * 32 * 3:
                raise ValueError("X and y do not have one image of 32 x 32 x 3 per label.")
            return pixels.reshape(-1, *_SVHN_SHAPE), [svhn_digit(int(label)) for label in stored.tolist()]
        except ValueError as error:
            raise self.official.damaged(self.store.uri_of(key), error) from error
