"""PatchCamelyon: patches of lymph node slides in HDF5 files, as distributed (.h5.gz) or decompressed (.h5)."""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.sources.arrays.array_layouts import READ_BYTES, damage_of, unpacked
from vitline.data_prep.sources.arrays.hdf5_file import Hdf5Array, open_hdf5
from vitline.data_prep.sources.raw import SourcePart, WorkFolder
from vitline.infra.storage import Store

_NAMES = {"train": "train", "validation": "valid", "test": "test"}
"""Names of the TFDS splits in files and keys."""
_SHAPE = (96, 96, 3)
_MAX_LABEL_BYTES = 64 << 20


class PatchCamelyon(BenchmarkData):
    """Images of 96 x 96. Parts are ranges of rows of an .h5. An .h5.gz is one part, which is first decompressed into the work
    folder, because HDF5 needs random access."""

    official = official_files("patch_camelyon")

    def keys(self) -> Mapping[str, Sequence[Key]]:
        return {split: [f"{name}_{row}" for row in range(len(self._labels(split)))] for split, name in _NAMES.items()}

    def class_names(self) -> Sequence[str]:
        return ["no tumour tissue", "tumour tissue"]

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        for split in _NAMES:
            key, count = self._key(split, "x"), len(self._labels(split))
            step = count
            if not key.endswith(".gz"):
                with self.store.open(key) as file, self._patches(split, file) as patches:
                    step = -(-work.examples_per_part // patches.rows_together) * patches.rows_together
            for number, start in enumerate(range(0, count, step)):
                stop = min(count, start + step)
                yield SourcePart(
                    name=f"{split}-{number:06d}",
                    num_bytes=(stop - start) * 96 * 96 * 3,
                    num_examples=stop - start,
                    where={"split": split, "start": start, "stop": stop},
                )

    def images(self, part: SourcePart, work: WorkFolder) -> Iterator[Found]:
        where: Any = part.where
        split, start, stop = where["split"], where["start"], where["stop"]
        labels, key, store = self._labels(split), self._key(split, "x"), self.store
        if packed := key.endswith(".gz"):
            store, key = work.store, _unpacked(self.store, key, work.store, 2 * len(labels) * 96 * 96 * 3)
        with store.open(key) as file, self._patches(split, file) as patches:
            row = start
            for block in patches.blocks(start, stop):
                for pixels in block:
                    yield Found(split, f"{_NAMES[split]}_{row}", labels[row], lossless_png(pixels))
                    row += 1
        if packed:
            store.delete(key)

    def _key(self, split: str, what: str) -> str:
        return self.file(f"camelyonpatch_level_2_split_{_NAMES[split]}_{what}.h5.gz")

    @contextlib.contextmanager
    def _patches(self, split: str, file: BinaryIO) -> Iterator[Hdf5Array]:
        """The images of a split, one per label; `file` is its HDF5 file."""
        uri, count = self.store.uri_of(self._key(split, "x")), len(self._labels(split))
        with open_hdf5(file, uri) as opened:
            patches = opened.array("x")
            if patches.dtype != np.uint8 or patches.shape != (count, *_SHAPE):
                raise ValueError(
                    f"{uri} is an array of shape {patches.shape} and type {patches.dtype}; "
                    f"expected {(count, *_SHAPE)} uint8, "
                    f"one image per label. Download the files again from {self.official.home}."
                )
            yield patches

    def _labels(self, split: str) -> list[int]:
        key = self._key(split, "y")
        uri = self.store.uri_of(key)
        with damage_of(uri), unpacked(self.store, key) as plain:
            file = io.BytesIO(plain.read(_MAX_LABEL_BYTES))
        with open_hdf5(file, uri) as opened:
            array = opened.array("y")
            if array.shape[1:] not in ((), (1,), (1, 1, 1)) or array.shape[0] * array.dtype.itemsize > _MAX_LABEL_BYTES:
                raise ValueError(f"{uri} is an array of shape {array.shape}; expected (n, 1, 1, 1). Download it again.")
            labels = [label for block in array.blocks(0, array.shape[0]) for label in block.reshape(-1).tolist()]
        if unknown := set(labels) - {0, 1}:
            raise ValueError(f"{uri} has the labels {sorted(unknown)[:5]}; expected 0 and 1. Download it again.")
        return labels


def _unpacked(store: Store, key: str, work: Store, max_bytes: int) -> str:
    """Key of the decompressed copy of an .h5.gz in the work folder; an earlier task may have made it.

    It is below spill/, which is deleted at the end of the preparation.
    """
    copy = f"spill/unpacked/{key.removesuffix('.gz')}"
    if work.exists(copy):
        return copy
    uri, num_bytes = store.uri_of(key), 0
    with unpacked(store, key) as plain, work.writer(copy) as file:
        while True:
            with damage_of(uri):
                data = plain.read(READ_BYTES)
            if not data:
                return copy
            file.write(data)
            num_bytes += len(data)
            if num_bytes > max_bytes + _MAX_LABEL_BYTES:
                raise ValueError(
                    f"{uri} decompresses to more than twice the size that its labels imply: it is another file. Download it again."
                )
