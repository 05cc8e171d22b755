"""Reads two arrays side by side, images and labels: idx files (as for MNIST) and npz."""

import contextlib
import math
import re
import struct
import zipfile
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np
from pydantic import JsonValue

from vitline.data_prep.sources.arrays.array_layouts import (
    READ_BYTES,
    ArrayImage,
    Arrays,
    CorruptArray,
    OneFile,
    buffered,
    damage_of,
    unpacked,
)
from vitline.data_prep.sources.raw import SourcePart, SplitRule
from vitline.infra.storage import Listed, open_store

_MAX_EXPANSION = 1032  # largest expansion by deflate


@dataclass(frozen=True)
class StreamedArray:
    """An array in C order that is read once, from its first row on; the first axis is the rows."""

    uri: str
    shape: tuple[int, ...]
    dtype: np.dtype
    _file: BinaryIO
    rows_together: ClassVar[int] = 1

    def rows(self) -> Iterator[np.ndarray]:
        """Every row, as `blocks`."""
        for block in self.blocks(0, self.shape[0]):
            yield from block

    def blocks(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Rows [start, stop), some at a time; earlier ones are read and dropped. After the last row, checks that the file ends.
        Raises CorruptArray."""
        row_bytes, row = math.prod(self.shape[1:]) * self.dtype.itemsize, 0
        while row < stop:
            end = min(row + max(1, READ_BYTES // row_bytes), stop if row >= start else start)
            with damage_of(self.uri):
                data = self._file.read((end - row) * row_bytes)
            if (there := len(data) // row_bytes) < end - row:
                raise CorruptArray(
                    f"{self.uri} is truncated in row {row + there:,} of {self.shape[0]:,}. Copy it again."
                )
            if row >= start:
                yield np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])
            row = end
        with damage_of(self.uri):
            if stop == self.shape[0] and self._file.read(1):  # reading to the end verifies the checksum
                raise CorruptArray(f"there is data after its {self.shape[0]:,} rows")


class _Paired(Arrays):
    """Arrays in pairs; a part is one pair."""

    @abstractmethod
    def pairs(self) -> list[tuple[str | None, str, str]]:
        """Split, name of the image array, name of the label array. Raises ValueError."""

    @abstractmethod
    def open(self, name: str) -> contextlib.AbstractContextManager[StreamedArray]:
        """An array by its name, after a check of its header. Raises ValueError and FileNotFoundError."""

    def parts(self, max_pixels: int) -> Iterator[SourcePart]:
        pairs = self.pairs()
        present: list[JsonValue] = [split for split in sorted({split for split, _, _ in pairs if split})]
        for split, array, labels in pairs:
            with self.open(array) as images, self.open(labels) as numbers:
                _check(images, max_pixels)
                _check_labels(numbers, images.shape[0])
                where: dict[str, JsonValue] = {"split": split, "labels": labels, "present": present}
                num_bytes = math.prod(images.shape)
                yield SourcePart(name=array, num_bytes=num_bytes, num_examples=images.shape[0], where=where)

    def images(self, part: SourcePart) -> Iterator[ArrayImage]:
        labels, split = str(part.where["labels"]), part.where["split"]
        named = None if split is None else str(split)
        with self.open(part.name) as images, self.open(labels) as numbers:
            layout = _channels(images.shape)
            for number, (row, label) in enumerate(zip(images.rows(), numbers.rows(), strict=True)):
                yield ArrayImage(named, number, _pixels(row, layout), int(label.reshape(-1)[0]))


def _check(images: StreamedArray, max_pixels: int) -> None:
    uri, shape = images.uri, images.shape
    if images.dtype != np.uint8:
        why = ": the value range of float pixels is not defined" if images.dtype.kind == "f" else ""
        raise ValueError(f"{uri} has pixels of type {images.dtype}, which is not supported{why}. Store them as uint8.")
    layout = _channels(shape)
    if layout is None:
        raise ValueError(
            f"{uri} has shape {shape}; expected (n, h, w), (n, h, w, 1 or 3) or (n, 1 or 3, h, w), and the axis of "
            "the channels must be unambiguous. Reshape it."
        )
    height, width = (shape[2], shape[3]) if layout == "first" else (shape[1], shape[2])
    if not 0 < height * width <= max_pixels:
        raise ValueError(f"{uri} has images of {width} x {height} pixels; expected 1 to {max_pixels:,} pixels.")


def _check_labels(labels: StreamedArray, num_images: int) -> None:
    if labels.dtype.kind not in "ui" or labels.shape not in ((num_images,), (num_images, 1)):
        raise ValueError(
            f"{labels.uri} has labels of type {labels.dtype} and shape {labels.shape}, which is not supported; "
            f"expected integers of shape ({num_images},), one per image."
        )


def _channels(shape: tuple[int, ...]) -> str | None:
    """Axis of the channels: none, first or last of an image. None if it is ambiguous."""
    if len(shape) == 3:
        return "none"
    first, last = (shape[1] in (1, 3), shape[3] in (1, 3)) if len(shape) == 4 else (False, False)
    return None if first == last else "first" if first else "last"


def _pixels(row: np.ndarray, layout: str | None) -> np.ndarray:
    """Pixels of one image, (h, w) or (h, w, 3)."""
    if layout == "first":
        row = row.transpose(1, 2, 0)
    return row[..., 0] if layout != "none" and row.shape[-1] == 1 else row


def _checked_size(uri: str, shape: tuple[int, ...], dtype: np.dtype, held: int, at_most: int) -> None:
    """Raises ValueError unless an array of this shape fits. `held`: its bytes, 0 if unknown; `at_most`: upper limit."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if any(length < 0 for length in shape) or (held or num_bytes) != num_bytes or num_bytes > at_most:
        raise ValueError(
            f"{uri} states shape {shape}, {num_bytes:,} bytes, but holds "
            f"{f'{held:,}' if held else f'at most {at_most:,}'}. It is truncated or damaged. Copy it again."
        )


# The idx format: two zeros, type, number of axes, then each length as big-endian uint32, then the data
# (http://yann.lecun.com/exdb/mnist/).

_IDX_NAME = re.compile(r"(?P<stem>.+?)-(?P<what>images|labels)[-.]idx(?P<axes>\d)-ubyte(\.gz)?", re.IGNORECASE)
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Idx(_Paired):
    """A folder of <split>-images-idx3-ubyte and <split>-labels-idx1-ubyte files, each plain or .gz; t10k is test."""

    def __init__(self, uri: str, layout: str) -> None:
        super().__init__(uri, layout)
        self.store = open_store(uri)

    def files(self) -> list[Listed]:
        found = [file for file in self.store.scan() if _IDX_NAME.fullmatch(file.key)]
        if not found:
            raise ValueError(
                f"{self.uri} is not a folder with idx files; expected names such as train-images-idx3-ubyte and "
                "train-labels-idx1-ubyte, plain or .gz."
            )
        return found

    def pairs(self) -> list[tuple[str | None, str, str]]:
        named: dict[tuple[str, str], str] = {}
        for file in self.files():
            match = _IDX_NAME.fullmatch(file.key)
            assert match
            role = match["stem"], match["what"].lower()
            if role in named:
                raise ValueError(f"{self.uri} holds {named[role]} and {file.key}. Remove one of the two.")
            named[role] = file.key
        pairs = []
        for stem, what in sorted(named):
            if what == "labels":
                continue
            if (stem, "labels") not in named:
                raise ValueError(
                    f"{self.uri} holds {named[stem, what]}, but no {stem}-labels-idx1-ubyte. Add the labels."
                )
            pairs.append((_idx_split(stem), named[stem, what], named[stem, "labels"]))
        splits = [split for split, _, _ in pairs]
        if len(set(splits)) < len(splits) or (None in splits and len(splits) > 1):
            raise ValueError(
                f"{self.uri} holds {', '.join(images for _, images, _ in pairs)}: several arrays of one split. "
                "Put each data set into a folder of its own."
            )
        return pairs

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[StreamedArray]:
        uri, size = self.store.uri_of(name), self.store.size(name)
        with unpacked(self.store, name) as file:
            with damage_of(uri):
                zeros, kind, num_axes = struct.unpack(">HBB", _exactly(file, 4))
                if zeros or kind not in _IDX_TYPES or not num_axes:
                    raise CorruptArray(
                        f"it begins with {zeros:04x} {kind:02x} {num_axes:02x}, which is not valid for idx"
                    )
                shape = struct.unpack(f">{num_axes}I", _exactly(file, 4 * num_axes))
            dtype, head = np.dtype(_IDX_TYPES[kind]), 4 + 4 * num_axes
            if name.lower().endswith(".gz"):
                _checked_size(uri, shape, dtype, 0, _MAX_EXPANSION * size)
            else:
                _checked_size(uri, shape, dtype, size - head, size - head)
            yield StreamedArray(uri, shape, dtype, file)


def _idx_split(stem: str) -> str | None:
    """The split named by the last word of a file name stem, such as train, t10k or emnist-letters-test."""
    word = re.split(r"[-_.]", stem.lower())[-1]
    return "test" if word == "t10k" else SplitRule.NAMES.get(word)


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise CorruptArray("it is truncated within its header")
    return data


# npz (NumPy, "numpy.lib.format"): a zip of .npy files.

_NPZ_NAMES = (
    ("x_{}", "y_{}"),
    ("{}_images", "{}_labels"),
)
_NPZ_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Npz(OneFile, _Paired):
    """One .npz with x_train, y_train, x_test, y_test (x_val, y_val); with train_images, train_labels and so on; or with
    images and labels."""

    def pairs(self) -> list[tuple[str | None, str, str]]:
        self.files()
        with self._zip() as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
        pairs: list[tuple[str | None, str, str]] = []
        for images, labels in _NPZ_NAMES:
            for split in ("train", "val", "test"):
                pair = (split, images.format(split), labels.format(split))
                if {pair[1], pair[2]} <= names:
                    pairs.append(pair)
        if {"images", "labels"} <= names:
            pairs.append((None, "images", "labels"))
        if not pairs or len({split for split, _, _ in pairs}) < len(pairs) or (pairs[-1][0] is None and len(pairs) > 1):
            raise ValueError(
                f"{self.uri} holds the arrays {', '.join(sorted(names))[:500]}; expected x_train and y_train, x_test "
                "and y_test, or train_images and train_labels, or only images and labels. Rename the arrays."
            )
        return pairs

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[StreamedArray]:
        # Each array gets a file of its own: reading two in turns from one file would discard its buffer each time.
        uri = f"{self.uri}!{name}"
        with self._zip() as archive, contextlib.ExitStack() as opened:
            with damage_of(uri):
                info = archive.getinfo(f"{name}.npy")
                file: Any = opened.enter_context(archive.open(info))
                version = np.lib.format.read_magic(file)
            if version not in _NPZ_HEADERS or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{uri}: npy version {version} and zip method {info.compress_type} are not supported.")
            with damage_of(uri):
                shape, fortran_order, dtype = _NPZ_HEADERS[version](file)
            if dtype.hasobject:
                raise ValueError(
                    f"{uri} is an array of Python objects, which is not supported, because reading it could run code."
                )
            if fortran_order and len(shape) > 1:
                raise ValueError(f"{uri} is in Fortran order, which is not supported. Save np.ascontiguousarray of it.")
            if info.file_size > _MAX_EXPANSION * info.compress_size + 1024:
                raise ValueError(
                    f"{uri} holds {info.file_size:,} bytes in {info.compress_size:,}. It is damaged. Copy it again."
                )
            held = info.file_size - file.tell()
            _checked_size(uri, shape, dtype, held, held)
            yield StreamedArray(uri, shape, dtype, file)

    @contextlib.contextmanager
    def _zip(self) -> Iterator[zipfile.ZipFile]:
        with buffered(self.store, self.key) as file:
            with damage_of(self.uri):
                archive = zipfile.ZipFile(file)
            with archive:
                yield archive
