"""dSprites: white shapes on black, in every combination of shape, size, orientation and position."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.label_rules import dsprites_location, dsprites_orientation
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.sources.arrays.array_layouts import CorruptArray
from vitline.data_prep.sources.arrays.hdf5_file import Hdf5Array, open_hdf5
from vitline.data_prep.sources.arrays.paired_arrays import Npz, StreamedArray
from vitline.data_prep.sources.raw import SourcePart, WorkFolder

_STEM = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64"
_IMAGES, _CLASSES = "imgs", "latents/classes"
_ROWS: Mapping[str, tuple[tuple[int, ...], str]] = {_IMAGES: ((64, 64), "uint8"), _CLASSES: ((6,), "int64")}
"""Shape and type of the rows of each array, by its path in the .hdf5."""
_ROWS_PER_PART = 65_536
"""The npz is one deflated stream, so reading a part decompresses everything before it."""


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
        with self._array(_CLASSES) as classes, self._array(_IMAGES) as images:
            count = classes.shape[0]
            if images.shape[0] != count:
                raise ValueError(
                    f"{self._uri} has {images.shape[0]:,} images, but classes for {count:,}. Download it again."
                )
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
        with self._array(_IMAGES) as images:
            count, step = images.shape[0], -(-_ROWS_PER_PART // images.rows_together) * images.rows_together
        for number, start in enumerate(range(0, count, step)):
            stop = min(count, start + step)
            where = {"start": start, "stop": stop}
            yield SourcePart(
                name=f"rows-{number:04d}", num_bytes=(stop - start) << 12, num_examples=stop - start, where=where
            )

    def images(self, part: SourcePart, work: WorkFolder) -> Iterator[Found]:
        start, stop = int(str(part.where["start"])), int(str(part.where["stop"]))
        labels, row = self._labels(start, stop), start
        with self._array(_IMAGES) as images:
            for block in images.blocks(start, stop):
                if block.max(initial=0) > 1:
                    raise ValueError(
                        f"{self._uri}: a pixel has value {block.max()}; expected 0 and 1. Download it again."
                    )
                for pixels in block:
                    yield Found("train", row, labels[row - start], lossless_png(pixels * np.uint8(255)))
                    row += 1

    def _labels(self, start: int, stop: int) -> list[int]:
        latent = _LATENTS[self.task]
        try:
            with self._array(_CLASSES) as classes:
                blocks = classes.blocks(start, stop)
                return [latent.rule(value) for block in blocks for value in block[:, latent.column].tolist()]
        except CorruptArray:
            raise
        except ValueError as error:
            raise self.official.damaged(self._uri, error) from error

    @property
    def _uri(self) -> str:
        return self.store.uri_of(self.file(f"{_STEM}.hdf5"))

    @contextlib.contextmanager
    def _array(self, name: str) -> Iterator[Hdf5Array | StreamedArray]:
        """An array of the .hdf5 or of the .npz; another member of the npz is a pickle, which is not opened. Raises ValueError
        unless its rows have the expected shape and type."""
        uri = self._uri
        with contextlib.ExitStack() as opened:
            found: Hdf5Array | StreamedArray
            if uri.endswith(".npz"):
                found = opened.enter_context(Npz(uri, "npz").open(name.replace("/", "_")))
            else:
                file = opened.enter_context(self.store.open(self.file(f"{_STEM}.hdf5")))
                found = opened.enter_context(open_hdf5(file, uri)).array(name)
            shape, dtype = _ROWS[name]
            if found.shape[1:] != shape or found.dtype != np.dtype(dtype):
                raise ValueError(
                    f"{uri}: {name} is an array of shape {found.shape} and type {found.dtype}; expected rows of {shape} {dtype}. "
                    "It is another file. Download it again."
                )
            yield found
