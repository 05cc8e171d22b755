"""SUN397 as used by VTAB: the images of three lists in the source tree of TensorFlow Datasets, reduced in size.

The images that TFDS stores (config `tfds`, version 4.0.0) are made here by the same OpenCV calls: decode to 8 or 16 bits and three
channels, rotate by EXIF; scale images of more than 120,000 pixels by sqrt(120,000 / pixels), bilinear without smoothing; write as
JPEG. All of this follows from the code of TFDS, which also leaves the JPEG quality to OpenCV although its description promises 72.
Not checked against a copy made by TFDS: that OpenCV's default quality was 95 then as it is now, and that versions of OpenCV write
equal bytes (they need not).

Different from TFDS: a file that OpenCV cannot read, such as a GIF before its version 4.11, went through TensorFlow there and came out
with red and blue exchanged. Here it keeps its colours. VTAB's lists contain one file, /t/track/outdoor/sun_aophkoiosslinihb.jpg, that
TFDS has removed since; it is in train, and not among the first 800.
"""

import hashlib
import importlib.util
import io
import math
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.opencv import opencv
from vitline.data_prep.benchmarks.vtab.listed_archives import ListedArchive
from vitline.data_prep.decode import PILLOW_FAULTS, DecodePolicy, ImageRejected, decode
from vitline.infra.config import replace
from vitline.infra.storage import Listed

_TARGET_PIXELS, _JPEG_QUALITY = 120_000, 95
_LISTS = {"sun397_tfds_tr.txt": "train", "sun397_tfds_va.txt": "validation", "sun397_tfds_te.txt": "test"}
_LABELS = "sun397_labels.txt"


class Sun397(ListedArchive):
    """Scenes. Keys are paths below SUN397, such as /a/abbey/sun_aaaulhwrhqgejnyt.jpg; classes are their folders."""

    official = official_files("sun397")

    def files(self) -> dict[str, Listed]:
        """As the base class; the lists may also come from an installed tensorflow-datasets."""
        there = replace(self.official, files=self.official.files[:1]).found(self.store)
        for name, text in self._list_files.items():
            there[name] = Listed(name, len(text), hashlib.sha256(text).hexdigest())
        return there

    def class_names(self) -> Sequence[str]:
        return [name.split("/", 2)[2] for name in self._folders]

    def made(self, data: bytes) -> bytes:
        return as_tfds_stores(data, DecodePolicy(max_bytes=self.max_bytes))

    def _lines(self) -> Iterator[tuple[str, str, int]]:
        numbers = {folder: number for number, folder in enumerate(self._folders)}
        for name, split in _LISTS.items():
            for key in self._list_files[name].decode(errors="replace").split():
                folder = key.rpartition("/")[0]
                if folder not in numbers:
                    raise self.wrong(f"{name} has {key!r:.80}, whose folder is not in {_LABELS}")
                yield key, split, numbers[folder]

    def key_of(self, path: str) -> str:
        return f"/{path.partition('/')[2]}"

    @cached_property
    def _folders(self) -> list[str]:
        folders = self._list_files[_LABELS].decode(errors="replace").split()
        if wrong := [folder for folder in folders if folder.count("/") < 2 or not folder.startswith("/")]:
            raise self.wrong(f"{_LABELS} has the line {wrong[0]!r:.80}; expected lines such as /a/abbey")
        return folders

    @cached_property
    def _list_files(self) -> dict[str, bytes]:
        """The four lists, next to the archive or from an installed package. Raises ValueError that names missing ones."""
        found: dict[str, bytes] = {}
        installed = _installed_lists()
        for name in (*_LISTS, _LABELS):
            if self.store.exists(name):
                found[name] = self.store.read(name)
            elif installed and (installed / name).is_file():
                found[name] = (installed / name).read_bytes()
        if missing := [name for name in (*_LISTS, _LABELS) if name not in found]:
            raise ValueError(
                f"SUN397: {self.store.uri} lacks {', '.join(missing)}, which define VTAB's splits. The Partitions.zip of the "
                "archive's authors has other splits. Copy the lists from tensorflow_datasets/image_classification in the "
                "source tree of TensorFlow Datasets (https://github.com/tensorflow/datasets), or run pip install "
                "tensorflow-datasets, where they are found as well."
            )
        return found


def _installed_lists() -> Path | None:
    spec = importlib.util.find_spec("tensorflow_datasets")  # found without being imported
    folders = spec.submodule_search_locations if spec else None
    return Path(os.fspath(folders[0]), "image_classification") if folders else None


def as_tfds_stores(data: bytes, policy: DecodePolicy | None = None) -> bytes:
    """The JPEG that TFDS stores of a file of SUN397. Raises ImageRejected, and ValueError without OpenCV."""
    cv2 = opencv("SUN397")
    pixels = _bgr(cv2, data, policy or DecodePolicy())
    height, width, _ = pixels.shape
    if height * width > _TARGET_PIXELS:
        factor = math.sqrt(_TARGET_PIXELS / (height * width))
        pixels = cv2.resize(pixels, dsize=None, fx=factor, fy=factor, interpolation=cv2.INTER_LINEAR)
    _, file = cv2.imencode(".jpg", pixels, [int(cv2.IMWRITE_JPEG_QUALITY), _JPEG_QUALITY])
    return bytes(file.tobytes())


def _bgr(cv2: Any, data: bytes, policy: DecodePolicy) -> np.ndarray:
    # Whether OpenCV reads a GIF depends on its version.
    if data and not data.startswith(b"GIF8") and len(data) <= policy.max_bytes:
        _check_size(data, policy)
        try:
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
        except cv2.error:
            pixels = None
        if pixels is not None:
            return np.asarray(pixels)
    return np.ascontiguousarray(decode(data, policy)[..., ::-1])


def _check_size(data: bytes, policy: DecodePolicy) -> None:
    """Limit the number of pixels, as OpenCV's own limit is 10^9. Files that Pillow cannot read are left to OpenCV."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            num_pixels = image.width * image.height
    except Image.DecompressionBombError as error:
        raise ImageRejected("too_many_pixels", str(error)) from error
    except PILLOW_FAULTS:
        return
    if num_pixels > policy.max_pixels:
        raise ImageRejected("too_many_pixels", f"{num_pixels:,} pixels, limit {policy.max_pixels:,}")
