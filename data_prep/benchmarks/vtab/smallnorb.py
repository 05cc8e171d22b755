"""smallNORB: toys photographed by two cameras. Its .mat files have a format of their own, not MATLAB's
(https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/)."""

import contextlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.label_rules import smallnorb_azimuth
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.sources.arrays.array_layouts import CorruptArray, damage_of, unpacked
from vitline.data_prep.sources.arrays.paired_arrays import StreamedArray
from vitline.data_prep.sources.raw import SourcePart, WorkFolder

_TRAIN, _TEST = "smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing"
_STEMS = {"train": _TRAIN, "test": _TEST}
_TYPES: Mapping[int, np.dtype] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}
_ELEVATION, _AZIMUTH = 1, 2
"""Columns of the info file."""
_NUM_ELEVATIONS, _NUM_AZIMUTHS = 9, 18
_MAX_ROWS = 1 << 20


class SmallNorb(BenchmarkData):
    """Images of the left camera; the class is the pose. A part is a split; keys are the row numbers."""

    # The -cat files, whose classes are kinds of toys, are not required, because no VTAB task uses them.
    official = official_files("smallnorb")

    def keys(self) -> Mapping[str, Sequence[Key]]:
        return {split: range(len(self._labels(split))) for split in _STEMS}

    def class_names(self) -> Sequence[str]:
        if self.task == "smallnorb_elevation":
            return [f"elevation {30 + 5 * i} degrees" for i in range(_NUM_ELEVATIONS)]
        return [f"azimuth {20 * i} degrees" for i in range(_NUM_AZIMUTHS)]

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        for split in _STEMS:
            with self._open(split, "dat") as images:
                count = len(self._labels(split))
                if images.dtype != np.uint8 or images.shape != (count, 2, 96, 96):
                    raise self.official.damaged(
                        images.uri,
                        f"an array of shape {images.shape} and type {images.dtype}; expected {(count, 2, 96, 96)} uint8, a "
                        "pair for every row of its -info file",
                    )
            yield SourcePart(name=split, num_bytes=math.prod(images.shape), num_examples=count)

    def images(self, part: SourcePart, work: WorkFolder) -> Iterator[Found]:
        labels = self._labels(part.name)
        with self._open(part.name, "dat") as images:
            for row, (left, _) in enumerate(images.rows()):
                yield Found(part.name, row, labels[row], lossless_png(left))

    def _labels(self, split: str) -> list[int]:
        with self._open(split, "info") as info:
            if info.dtype != np.int32 or len(info.shape) != 2 or info.shape[1] != 4:
                raise self.official.damaged(
                    info.uri,
                    f"an array of shape {info.shape} and type {info.dtype}; expected rows of four int32: instance, elevation, "
                    "azimuth and lighting",
                )
            rows = [row.tolist() for row in info.rows()]
        try:
            return [self._label(row) for row in rows]
        except ValueError as error:
            raise self.official.damaged(info.uri, error) from error

    def _label(self, row: Sequence[int]) -> int:
        if self.task == "smallnorb_azimuth":
            return smallnorb_azimuth(row[_AZIMUTH])
        if not 0 <= row[_ELEVATION] < _NUM_ELEVATIONS:
            raise ValueError(f"elevation {row[_ELEVATION]} is outside of 0 to {_NUM_ELEVATIONS - 1}")
        return row[_ELEVATION]

    @contextlib.contextmanager
    def _open(self, split: str, what: str) -> Iterator[StreamedArray]:
        """An array, after reading its header."""
        key = self.file(f"{_STEMS[split]}-{what}.mat.gz")
        uri = self.store.uri_of(key)
        with unpacked(self.store, key) as file:
            with damage_of(uri):
                shape, dtype = _header(file)
            yield StreamedArray(uri, shape, dtype, file)


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type: magic number, number of axes, then the lengths of the axes, at least three numbers."""
    magic, num_axes = struct.unpack("<ii", file.read(8))
    if magic not in _TYPES or not 1 <= num_axes <= 4:
        raise CorruptArray(f"it begins with {magic:#010x} and {num_axes} axes, which is not valid for smallNORB")
    count = max(3, num_axes)
    shape = struct.unpack(f"<{count}i", file.read(4 * count))[:num_axes]
    if not all(0 < length <= _MAX_ROWS for length in shape):
        raise CorruptArray(f"it states the invalid shape {shape}")
    return shape, _TYPES[magic]
