"""Pixel arrays, each picture as a lossless PNG in the spill: CIFAR's binary archives, idx files as of MNIST, npz.

Nothing is unpickled. Files are streamed: one picture is in memory, of CIFAR one file of its archive. What a header
claims is compared with the bytes that are there before any picture is read. A damaged array is a ValueError, never some
pictures of it: behind a flipped bit a compressed file goes on with wrong pixels until its checksum is met at the end.
The official test part is test; val is hashed off train where there is none.
"""

import contextlib
import errno
import gzip
import hashlib
import io
import math
import re
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
from pydantic import JsonValue

from data_prep.config import CorpusRecipe, ImageArrays
from data_prep.corpora.archives import Member, archive_kind, index, read_members
from data_prep.corpora.raw import Part, Place, RawCorpus, RawExample, Spill, SplitRule
from data_prep.labels import ClassInfo, number_label
from infra.storage import Store, StoreFailed, open_store

_READ_BYTES = 4 * 1024 * 1024
_MAX_EXPANSION = 1032  # of deflate
_MAX_MEMBER_BYTES = 256 * 1024 * 1024


class ImageArraysCorpus(RawCorpus):
    """Arrays of one layout. An example id is the array's split and the position in it, as in train/00001."""

    def __init__(self, source: ImageArrays, recipe: CorpusRecipe) -> None:
        self.origin = open_store(source.path).uri
        self._recipe, self._arrays = recipe, _LAYOUTS[source.layout](self.origin, source.layout)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for found in self._arrays.files():
            digest.update(f"{found.key}\0{found.size}\0{found.tag}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def parts(self, place: Place) -> Iterator[Part]:
        yield from self._arrays.parts(self._recipe.decode.max_pixels)

    def examples(self, part: Part, place: Place) -> Iterator[RawExample]:
        present: Any = part.where["present"]
        rule = SplitRule(self._recipe, frozenset(present))
        with Spill(place, part) as spill:
            for picture in self._arrays.pictures(part):
                yield _as_example(picture, rule, spill, self._arrays.num_classes)

    def class_info(self, source_id: str) -> ClassInfo:
        number, names = int(source_id), self._arrays.class_names()
        return ClassInfo(name=names[number] if number < len(names) else str(number), source_id=source_id)


@dataclass(frozen=True, slots=True)
class _Picture:
    """Pixels (h, w) or (h, w, 3), and where they stand."""

    split: str | None
    number: int
    pixels: np.ndarray
    label: int


def _as_example(picture: _Picture, rule: SplitRule, spill: Spill, num_classes: int | None) -> RawExample:
    example_id = f"{picture.split or 'images'}/{picture.number:05d}"
    split = rule.place(example_id, picture.split)
    if picture.label < 0 or (num_classes is not None and picture.label >= num_classes):
        refused = ("no_label", f"label {picture.label} of {num_classes or 'some'} classes")
        return RawExample(example_id, (), split, spill.base, spill.key, refused=refused)
    file = lossless_png(picture.pixels)
    return RawExample(
        example_id=example_id,
        labels=(number_label(picture.label),),
        split=split,
        base=spill.base,
        key=spill.key,
        offset=spill.keep(file),
        length=len(file),
        data=file,
    )


def lossless_png(pixels: np.ndarray) -> bytes:
    """A PNG of uint8 pixels, (h, w) grey or (h, w, 3) RGB; of the same pixels always the same bytes.

    Nothing is compressed: zlib's output differs between its releases and forks, and the digest of a corpus, which is
    made of these bytes, must not. It costs a third more bytes for CIFAR; it is faster to write and to read.
    """
    height, width = pixels.shape[:2]
    lines = np.zeros((height, 1 + pixels[0].size), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    raw = lines.tobytes()
    blocks = [raw[i : i + 0xFFFF] for i in range(0, len(raw), 0xFFFF)]
    stored = b"".join(
        struct.pack("<BHH", i == len(blocks) - 1, len(block), len(block) ^ 0xFFFF) + block
        for i, block in enumerate(blocks)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)
    data = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(raw))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@dataclass(frozen=True)
class _File:
    key: str
    size: int
    tag: str


class _Arrays(ABC):
    """One layout: which arrays there are, and their pictures."""

    num_classes: int | None = None

    def __init__(self, uri: str, layout: str) -> None:
        self.uri, self.layout = uri, layout

    @abstractmethod
    def files(self) -> list[_File]:
        """Every file that counts. Raises ValueError where there is none."""

    @abstractmethod
    def parts(self, max_pixels: int) -> Iterator[Part]:
        """Every array or archive. Raises ValueError where it is not what the layout says."""

    @abstractmethod
    def pictures(self, part: Part) -> Iterator[_Picture]:
        """All pictures of a part. Raises ValueError where the array is damaged."""

    def class_names(self) -> list[str]:
        return []


class _OneFile(_Arrays):
    """A layout whose path is a file."""

    def __init__(self, uri: str, layout: str) -> None:
        super().__init__(uri, layout)
        folder, _, self.key = uri.rpartition("/")
        self.store = open_store(f"{folder}/" if folder.endswith("//") else folder)

    def files(self) -> list[_File]:
        found = [_File(each.key, each.size, each.tag) for each in self.store.scan(self.key) if each.key == self.key]
        if not found:
            raise ValueError(f"There is no file {self.uri}. Name the file of the layout {self.layout}.")
        return found


# CIFAR (https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version"): records of one or two labels and 3,072 bytes,
# red, green, blue.


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


class _Cifar(_OneFile):
    """The archive is one part: what is inside a tar.gz is read from its beginning. Positions count through the batches,
    as the keys of TFDS do."""

    def __init__(self, uri: str, layout: str) -> None:
        super().__init__(uri, layout)
        self._cifar = _CIFAR_LAYOUTS[layout]
        self.num_classes = self._cifar.num_classes
        self._record_bytes = self._cifar.num_labels + math.prod(_CIFAR_SHAPE)
        self._names: list[str] | None = None

    def parts(self, max_pixels: int) -> Iterator[Part]:
        (file,), counts = self.files(), dict[str, int]()
        self._check_gzip()
        for member in index(self.store, self.key):
            if member.kind == "damage":
                raise ValueError(f"{self.uri} cannot be read: {member.refused and member.refused[1]}. Copy it again.")
            name = _name(member)
            if name in self._cifar.splits:
                if name in counts or member.size % self._record_bytes or member.size > _MAX_MEMBER_BYTES:
                    raise ValueError(
                        f"{self.uri} holds {name} with {member.size:,} bytes; expected is one with a multiple of "
                        f"{self._record_bytes:,}. It is not the binary archive of {self.layout}."
                    )
                counts[name] = member.size // self._record_bytes
        if missing := self._cifar.splits.keys() - counts.keys():
            raise ValueError(
                f"{self.uri} lacks {', '.join(sorted(missing))}. Name the binary archive of {self.layout}, as "
                f"cifar-{10 if self.layout == 'cifar10' else 100}-binary.tar.gz; the Python archive is made of pickles."
            )
        where: dict[str, JsonValue] = {"counts": dict(counts), "present": ["test", "train"]}
        yield Part(name=self.key, num_bytes=file.size, num_examples=sum(counts.values()), where=where)

    def pictures(self, part: Part) -> Iterator[_Picture]:
        counts: Any = part.where["counts"]
        firsts = self._firsts(counts)
        for member, data in read_members(self.store, self.key, _MAX_MEMBER_BYTES, wanted=self._wanted):
            name = _name(member)
            if data is not None and name in firsts and len(data) == counts[name] * self._record_bytes:
                yield from self._of_member(self._cifar.splits[name], firsts.pop(name), data)
        if firsts:
            raise ValueError(f"{self.uri}: {', '.join(firsts)} changed since it was listed. Start again.")

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
        # The checksum of gzip stands behind the end of the tar, where nobody looks who reads members only.
        if archive_kind(self.key) == "tar.gz":
            with _buffered(self.store, self.key) as file, gzip.GzipFile(fileobj=file) as unpacked, _damage_of(self.uri):
                while unpacked.read(_READ_BYTES):
                    pass

    def _firsts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The position of the first picture of each file: they may stand in any order in the archive."""
        firsts, ends = {}, dict[str, int]()
        for name, split in self._cifar.splits.items():
            firsts[name] = ends.get(split, 0)
            ends[split] = firsts[name] + counts[name]
        return firsts

    def _of_member(self, split: str, first: int, data: bytes) -> Iterator[_Picture]:
        records = np.frombuffer(data, np.uint8).reshape(-1, self._record_bytes)
        for number, record in enumerate(records, first):
            label = int(record[self._cifar.label_at])
            pixels = record[self._cifar.num_labels :].reshape(_CIFAR_SHAPE).transpose(1, 2, 0)
            yield _Picture(split, number, pixels, label)


def _name(member: Member) -> str:
    return member.path.rpartition("/")[2] if member.kind == "file" and not member.refused else ""


# idx and npz: two arrays, of pictures and of labels, that are read side by side.


class _Damaged(ValueError):
    """An array ends early, or cannot be decompressed."""


@dataclass(frozen=True)
class _Array:
    """An array in C order, streamed row by row."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: BinaryIO

    def rows(self, uri: str) -> Iterator[np.ndarray]:
        """Each of shape[1:], and the end of the file behind the last. Raises _Damaged."""
        shape = self.shape[1:]
        num_bytes = math.prod(shape) * self.dtype.itemsize
        for row in range(self.shape[0]):
            with _damage_of(uri):
                data = self.file.read(num_bytes)
            if len(data) < num_bytes:
                raise _Damaged(f"{uri} ends in row {row:,} of {self.shape[0]:,}. Copy it again.")
            yield np.frombuffer(data, self.dtype).reshape(shape)
        with _damage_of(uri):
            if self.file.read(1):  # what reads on to the end compares its checksum
                raise _Damaged(f"it goes on behind its {self.shape[0]:,} rows")


def _buffered(store: Store, key: str) -> BinaryIO:
    """A file that is read in long stretches: each is a request of an object store."""
    return io.BufferedReader(cast(Any, store.open(key)), _READ_BYTES)


@contextlib.contextmanager
def _damage_of(uri: str) -> Iterator[None]:
    # Whatever a damaged or hostile file makes the libraries raise is the file's fault; BadGzipFile is an OSError.
    try:
        yield
    except (_Damaged, gzip.BadGzipFile, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _Damaged(f"{uri} is damaged: {error}. Copy it again.") from error
    except (OSError, StoreFailed) as error:
        if isinstance(error, OSError) and error.errno == errno.EINVAL:  # a place that no file has
            raise _Damaged(f"{uri} is damaged: it points outside itself. Copy it again.") from error
        raise
    except Exception as error:
        raise _Damaged(f"{uri} is damaged: {type(error).__name__}: {error}. Copy it again.") from error


class _Paired(_Arrays):
    """Arrays in pairs; a part is a pair."""

    @abstractmethod
    def pairs(self) -> list[tuple[str | None, str, str]]:
        """Split, name of the pictures, name of the labels. Raises ValueError."""

    @abstractmethod
    def open(self, name: str) -> contextlib.AbstractContextManager[_Array]:
        """An array by its name, its header checked. Raises ValueError and FileNotFoundError."""

    @abstractmethod
    def uri_of(self, name: str) -> str: ...

    def parts(self, max_pixels: int) -> Iterator[Part]:
        pairs = self.pairs()
        present: list[JsonValue] = [split for split in sorted({split for split, _, _ in pairs if split})]
        for split, pictures, labels in pairs:
            with self.open(pictures) as images, self.open(labels) as numbers:
                self._check(pictures, images, max_pixels)
                self._check_labels(labels, numbers, images.shape[0])
                where: dict[str, JsonValue] = {"split": split, "labels": labels, "present": present}
                num_bytes = math.prod(images.shape)
                yield Part(name=pictures, num_bytes=num_bytes, num_examples=images.shape[0], where=where)

    def pictures(self, part: Part) -> Iterator[_Picture]:
        labels, split = str(part.where["labels"]), part.where["split"]
        named = None if split is None else str(split)
        with self.open(part.name) as images, self.open(labels) as numbers:
            layout = _channels(images.shape)
            rows = zip(images.rows(self.uri_of(part.name)), numbers.rows(self.uri_of(labels)), strict=True)
            for number, (row, label) in enumerate(rows):
                yield _Picture(named, number, _pixels(row, layout), int(label.reshape(-1)[0]))

    def _check(self, name: str, images: _Array, max_pixels: int) -> None:
        uri, shape = self.uri_of(name), images.shape
        if images.dtype != np.uint8:
            why = ": float pixels have no agreed range" if images.dtype.kind == "f" else ""
            raise ValueError(f"{uri} has pixels of {images.dtype}, which is not supported{why}. Store them as uint8.")
        layout = _channels(shape)
        if layout is None:
            raise ValueError(
                f"{uri} has the shape {shape}; expected is (n, h, w), (n, h, w, 1 or 3) or (n, 1 or 3, h, w), and not "
                "two of them at once. Reshape it."
            )
        height, width = (shape[2], shape[3]) if layout == "first" else (shape[1], shape[2])
        if not 0 < height * width <= max_pixels:
            raise ValueError(
                f"{uri} has pictures of {width} x {height} pixels; expected are 1 to {max_pixels:,} pixels."
            )

    def _check_labels(self, name: str, labels: _Array, num_images: int) -> None:
        if labels.dtype.kind not in "ui" or labels.shape not in ((num_images,), (num_images, 1)):
            raise ValueError(
                f"{self.uri_of(name)} has labels of {labels.dtype} and shape {labels.shape}, which is not supported; "
                f"expected are integers of shape ({num_images},), one a picture."
            )


def _channels(shape: tuple[int, ...]) -> str | None:
    """Where the channels are: none, first or last of the axes of a picture. None where that is not certain."""
    if len(shape) == 3:
        return "none"
    first, last = (shape[1] in (1, 3), shape[3] in (1, 3)) if len(shape) == 4 else (False, False)
    return None if first == last else "first" if first else "last"


def _pixels(row: np.ndarray, layout: str | None) -> np.ndarray:
    """(h, w) or (h, w, 3) of one picture."""
    if layout == "first":
        row = row.transpose(1, 2, 0)
    return row[..., 0] if layout != "none" and row.shape[-1] == 1 else row


def _checked_size(uri: str, shape: tuple[int, ...], dtype: np.dtype, held: int, at_most: int) -> None:
    """Raises ValueError unless an array of `held` bytes (0: not known, but `at_most` so many) has this shape."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if any(length < 0 for length in shape) or (held or num_bytes) != num_bytes or num_bytes > at_most:
        raise ValueError(
            f"{uri} says that it is an array of {shape}, {num_bytes:,} bytes, but holds "
            f"{f'{held:,}' if held else f'at most {at_most:,}'}. It is truncated or damaged; copy it again."
        )


# The idx format: two zeros, type, number of axes, then each length as big-endian uint32, then the data
# (http://yann.lecun.com/exdb/mnist/).

_IDX_NAME = re.compile(r"(?P<stem>.+?)-(?P<what>images|labels)[-.]idx(?P<axes>\d)-ubyte(\.gz)?", re.IGNORECASE)
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class _Idx(_Paired):
    """A folder of <split>-images-idx3-ubyte and <split>-labels-idx1-ubyte, each plain or .gz; t10k is test."""

    def __init__(self, uri: str, layout: str) -> None:
        super().__init__(uri, layout)
        self.store = open_store(uri)

    def files(self) -> list[_File]:
        found = [_File(each.key, each.size, each.tag) for each in self.store.scan() if _IDX_NAME.fullmatch(each.key)]
        if not found:
            raise ValueError(
                f"{self.uri} is no folder with idx files; expected are names as train-images-idx3-ubyte and "
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
                raise ValueError(f"{self.uri} holds {named[stem, what]}, but no {stem}-labels-idx1-ubyte beside it.")
            pairs.append((_idx_split(stem), named[stem, what], named[stem, "labels"]))
        splits = [split for split, _, _ in pairs]
        if len(set(splits)) < len(splits) or (None in splits and len(splits) > 1):
            raise ValueError(
                f"{self.uri} holds {', '.join(pictures for _, pictures, _ in pairs)}: more than one array of a split. "
                "Give each data set a folder of its own."
            )
        return pairs

    def uri_of(self, name: str) -> str:
        return self.store.uri_of(name)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[_Array]:
        uri, size = self.uri_of(name), self.store.size(name)
        with contextlib.ExitStack() as opened:
            file: Any = opened.enter_context(_buffered(self.store, name))
            packed = name.lower().endswith(".gz")
            if packed:
                file = opened.enter_context(gzip.GzipFile(fileobj=file))
            with _damage_of(uri):
                zeros, kind, num_axes = struct.unpack(">HBB", _exactly(file, 4))
                if zeros or kind not in _IDX_TYPES or not num_axes:
                    raise _Damaged(f"it begins with {zeros:04x} {kind:02x} {num_axes:02x}, as no idx file does")
                shape = struct.unpack(f">{num_axes}I", _exactly(file, 4 * num_axes))
            dtype, head = np.dtype(_IDX_TYPES[kind]), 4 + 4 * num_axes
            if packed:
                _checked_size(uri, shape, dtype, 0, _MAX_EXPANSION * size)
            else:
                _checked_size(uri, shape, dtype, size - head, size - head)
            yield _Array(shape, dtype, file)


def _idx_split(stem: str) -> str | None:
    """The split that a name ends in, as in train, t10k and emnist-letters-test."""
    word = re.split(r"[-_.]", stem.lower())[-1]
    return "test" if word == "t10k" else SplitRule.NAMES.get(word)


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise _Damaged("ends within its header")
    return data


# npz (NumPy, "numpy.lib.format"): a zip of .npy files.

_NPZ_NAMES = (
    ("x_{}", "y_{}"),
    ("{}_images", "{}_labels"),
)
_NPZ_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class _Npz(_OneFile, _Paired):
    """One .npz of x_train, y_train, x_test, y_test (x_val, y_val), of train_images, train_labels and so on, or of
    images and labels."""

    def pairs(self) -> list[tuple[str | None, str, str]]:
        self.files()
        with self._zip() as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
        pairs: list[tuple[str | None, str, str]] = []
        for pictures, labels in _NPZ_NAMES:
            for split in ("train", "val", "test"):
                pair = (split, pictures.format(split), labels.format(split))
                if {pair[1], pair[2]} <= names:
                    pairs.append(pair)
        if {"images", "labels"} <= names:
            pairs.append((None, "images", "labels"))
        if not pairs or len({split for split, _, _ in pairs}) < len(pairs) or (pairs[-1][0] is None and len(pairs) > 1):
            raise ValueError(
                f"{self.uri} holds the arrays {', '.join(sorted(names))[:500]}; expected are x_train and y_train, x_test "
                "and y_test, or train_images and train_labels, or images and labels alone. Rename them."
            )
        return pairs

    def uri_of(self, name: str) -> str:
        return f"{self.uri}!{name}"

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[_Array]:
        # Each array has a file of its own: two that read in turns would throw away each other's buffer.
        uri = self.uri_of(name)
        with self._zip() as archive, contextlib.ExitStack() as opened:
            with _damage_of(uri):
                info = archive.getinfo(f"{name}.npy")
                file: Any = opened.enter_context(archive.open(info))
                version = np.lib.format.read_magic(file)
            if version not in _NPZ_HEADERS or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{uri}: npy version {version} and zip method {info.compress_type} are not supported.")
            with _damage_of(uri):
                shape, fortran_order, dtype = _NPZ_HEADERS[version](file)
            if dtype.hasobject:
                raise ValueError(f"{uri} is an array of Python objects, which is not supported: reading it runs code.")
            if fortran_order and len(shape) > 1:
                raise ValueError(f"{uri} is in Fortran order, which is not supported. Save np.ascontiguousarray of it.")
            if info.file_size > _MAX_EXPANSION * info.compress_size + 1024:
                raise ValueError(f"{uri} claims {info.file_size:,} bytes in {info.compress_size:,}. It is damaged.")
            held = info.file_size - file.tell()
            _checked_size(uri, shape, dtype, held, held)
            yield _Array(shape, dtype, file)

    @contextlib.contextmanager
    def _zip(self) -> Iterator[zipfile.ZipFile]:
        with _buffered(self.store, self.key) as file:
            with _damage_of(self.uri):
                archive = zipfile.ZipFile(file)
            with archive:
                yield archive


_LAYOUTS: Mapping[str, type[_Arrays]] = {
    "cifar10": _Cifar,
    "cifar100": _Cifar,
    "cifar100_coarse": _Cifar,
    "idx": _Idx,
    "npz": _Npz,
}
