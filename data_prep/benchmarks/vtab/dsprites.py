"""dSprites: white shapes on black, in every combination of shape, size, orientation and position."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.label_rules import dsprites_location, dsprites_orientation
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.sources.arrays.array_layouts import CorruptArray, damage_of
from vitline.data_prep.sources.arrays.hdf5_file import Hdf5Array, open_hdf5
from vitline.data_prep.sources.arrays.paired_arrays import Npz
from vitline.data_prep.sources.raw import SourcePart, WorkFolder
from vitline.infra.storage import Store

_STEM = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64"
_IMAGES, _CLASSES = "imgs", "latents_classes"
_ROWS_PER_PART = 65_536
"""The npz is one deflated stream, so reading a part decompresses everything before it."""
_ROWS_PER_READ = 1024


class _Latent(NamedTuple):
    """The latent variable of a task."""

    name: str
    column: int
    num_values: int
    rule: Callable[[int], int]


_LATENTS = {
    "dsprites_orientation": _Latent("orientation", 3, 40, dsprites_orientation),
    "dsprites_location": _Latent("horizontal position", 4, 32, dsprites_location),
}


class DSprites(BenchmarkData):
    """Grey images of 64 x 64. Parts are ranges of rows; keys are the row numbers."""

    official = official_files("dsprites")

    def keys(self) -> Mapping[str, Sequence[Key]]:
        file = self._file
        count = file.count(_CLASSES, (6,), "int64")
        if (images := file.count(_IMAGES, (64, 64), "uint8")) != count:
            raise ValueError(f"{file.uri} has {images:,} images, but classes for {count:,}. Download it again.")
        self._labels(0, count)
        return {"train": range(count)}

    def class_names(self) -> Sequence[str]:
        latent = _LATENTS[self.task]
        values: dict[int, list[int]] = {}
        for value in range(latent.num_values):
            values.setdefault(latent.rule(value), []).append(value)
        return [
            f"{latent.name} {alike[0]} to {alike[-1]} of {latent.num_values}" for _, alike in sorted(values.items())
        ]

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        file = self._file
        count, step = file.count(_IMAGES, (64, 64), "uint8"), file.rows_per_part
        for number, start in enumerate(range(0, count, step)):
            stop = min(count, start + step)
            where = {"start": start, "stop": stop}
            yield SourcePart(
                name=f"rows-{number:04d}", num_bytes=(stop - start) << 12, num_examples=stop - start, where=where
            )

    def pictures(self, part: SourcePart, work: WorkFolder) -> Iterator[Found]:
        start, stop = int(str(part.where["start"])), int(str(part.where["stop"]))
        labels, row = self._labels(start, stop), start
        for block in self._file.blocks(_IMAGES, start, stop):
            if block.max(initial=0) > 1:
                raise ValueError(
                    f"{self._file.uri}: a pixel has value {block.max()}; expected 0 and 1. Download it again."
                )
            for pixels in block:
                yield Found("train", row, labels[row - start], lossless_png(pixels * np.uint8(255)))
                row += 1

    def _labels(self, start: int, stop: int) -> list[int]:
        latent = _LATENTS[self.task]
        try:
            blocks = self._file.blocks(_CLASSES, start, stop)
            return [latent.rule(value) for block in blocks for value in block[:, latent.column].tolist()]
        except CorruptArray:
            raise
        except ValueError as error:
            raise self.official.damaged(self._file.uri, error) from error

    @property
    def _file(self) -> "_File":
        key = self.file(f"{_STEM}.hdf5")
        return _NpzFile(self.store, key) if key.endswith(".npz") else _Hdf5File(self.store, key)


class _File(ABC):
    """The data set in one of its two file formats."""

    def __init__(self, store: Store, key: str) -> None:
        self.store, self.key, self.uri = store, key, store.uri_of(key)

    @property
    @abstractmethod
    def rows_per_part(self) -> int: ...

    @abstractmethod
    def count(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        """Number of rows of an array. Raises ValueError unless the rows have this shape and type."""

    @abstractmethod
    def blocks(self, name: str, start: int, stop: int) -> Iterator[np.ndarray]:
        """Rows [start, stop) in batches. Raises CorruptArray."""

    def _checked(self, name: str, found: tuple[tuple[int, ...], np.dtype], shape: tuple[int, ...], dtype: str) -> int:
        if len(found[0]) != 1 + len(shape) or found[0][1:] != shape or found[1] != np.dtype(dtype):
            raise ValueError(
                f"{self.uri}: {name} is an array of shape {found[0]} and type {found[1]}; expected rows of {shape} {dtype}. "
                "It is another file. Download it again."
            )
        return found[0][0]


class _NpzFile(_File):
    """Opens only the requested arrays: another member of the npz is a pickle."""

    @property
    def rows_per_part(self) -> int:
        return _ROWS_PER_PART

    def count(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        with self._npz.open(name) as array:
            return self._checked(name, (array.shape, array.dtype), shape, dtype)

    def blocks(self, name: str, start: int, stop: int) -> Iterator[np.ndarray]:
        with self._npz.open(name) as array:
            row, row_bytes = 0, int(np.prod(array.shape[1:])) * array.dtype.itemsize
            while row < stop:
                # Rows before the first are decompressed and dropped.
                end = min(row + _ROWS_PER_READ, stop if row >= start else start)
                with damage_of(self.uri):
                    data = array.file.read((end - row) * row_bytes)
                if len(data) < (end - row) * row_bytes:
                    raise CorruptArray(f"{self.uri} is truncated within {name}. Copy it again.")
                if row >= start:
                    yield np.frombuffer(data, array.dtype).reshape(-1, *array.shape[1:])
                row = end
            if stop == array.shape[0]:
                with damage_of(self.uri):
                    array.file.read(1)  # reading to the end verifies the checksum

    @property
    def _npz(self) -> Npz:
        return Npz(self.uri, "npz")


class _Hdf5File(_File):
    _PATHS: Mapping[str, str] = {_IMAGES: "imgs", _CLASSES: "latents/classes"}

    @property
    def rows_per_part(self) -> int:
        with self._array(_IMAGES) as array:
            return -(-_ROWS_PER_PART // array.rows_together) * array.rows_together

    def count(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        with self._array(name) as array:
            return self._checked(name, (array.shape, array.dtype), shape, dtype)

    def blocks(self, name: str, start: int, stop: int) -> Iterator[np.ndarray]:
        with self._array(name) as array:
            yield from array.blocks(start, stop)

    @contextlib.contextmanager
    def _array(self, name: str) -> Iterator[Hdf5Array]:
        with self.store.open(self.key) as file, open_hdf5(file, self.uri) as opened:
            yield opened.array(self._PATHS[name])
