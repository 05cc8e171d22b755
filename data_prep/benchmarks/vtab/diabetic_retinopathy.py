"""Diabetic Retinopathy Detection (Kaggle, 2015), preprocessed as TFDS's `btgraham-300`: eyes of equal size, without differences
between cameras, after the winner of the competition."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitline.data_prep.benchmarks.annotation_files import annotation_texts
from vitline.data_prep.benchmarks.image_files import image_parts
from vitline.data_prep.benchmarks.labelled_archive import LabelledArchive
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.opencv import opencv
from vitline.data_prep.benchmarks.vtab_data import Key
from vitline.data_prep.decode import DEFAULT_POLICY, ImageRejected
from vitline.data_prep.sources.folder_layout import refusal_by_name
from vitline.data_prep.sources.raw import SourcePart, WorkFolder

RADIUS_PX = 300
"""Radius of every eye."""
_KEPT_RADIUS, _BLUR_RADIUS, _QUALITY = 0.9, 30, 72
_GREY = 128
_USAGES = {"Public": "validation", "Private": "test"}
"""TFDS splits by Kaggle's usage of its test examples: the two leaderboards."""
_LEVELS = ("no retinopathy", "mild", "moderate", "severe", "proliferative retinopathy")


class DiabeticRetinopathy(LabelledArchive):
    """The images made here depend, in the last bits, on the release of OpenCV, and so do those of TFDS."""

    official = official_files("diabetic_retinopathy")

    def keys(self) -> Mapping[str, Sequence[Key]]:
        opencv("Diabetic Retinopathy Detection")  # images cannot be made without it
        return super().keys()

    def class_names(self) -> Sequence[str]:
        return _LEVELS

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        yield from super().parts(work)
        yield from image_parts(self.store, self.file("test.zip"), work)

    def key_of(self, path: str) -> str | None:
        """10_left for train/10_left.jpeg."""
        name, _, ending = path.rpartition("/")[2].rpartition(".")
        return None if ending != "jpeg" or refusal_by_name(path) else name

    def made(self, data: bytes) -> bytes:
        if len(data) > self.max_bytes:
            raise ImageRejected("too_many_bytes", f"more than {self.max_bytes:,} bytes, the limit")
        return btgraham(data, RADIUS_PX)

    def labels(self) -> Mapping[str, Mapping[str, int]]:
        labels: dict[str, dict[str, int]] = {"train": {}, "validation": {}, "test": {}}
        for name, usages in (("trainLabels.csv", {}), ("retinopathy_solution.csv", _USAGES)):
            key = self.file(name)
            for path, text in annotation_texts(self.store, key, partial(_is_called, name)):
                try:
                    _add_rows(labels, text, usages)
                except ValueError as error:
                    raise self.official.damaged(f"{self.store.uri_of(key)}, {path}", error) from error
        return labels


def _is_called(name: str, path: str) -> bool:
    return path.rpartition("/")[2] == name


def _add_rows(labels: Mapping[str, dict[str, int]], text: str, usages: Mapping[str, str]) -> None:
    """Add the rows of a table with image, level and, if there are `usages`, Usage."""
    columns = {"image", "level", "Usage"} if usages else {"image", "level"}
    rows, seen = csv.DictReader(io.StringIO(text), strict=True), set[str]()
    if missing := columns - set(rows.fieldnames or ()):
        raise ValueError(f"no column {', '.join(sorted(missing))}; the columns are {rows.fieldnames}")
    try:
        for row in rows:
            name, level, split = row["image"], row["level"], usages.get(row["Usage"] or "") if usages else "train"
            if not name or name in seen or level not in ("0", "1", "2", "3", "4") or split is None:
                raise ValueError(
                    f"line {rows.line_num} is {list(row.values())}, which is not a new image with a level from 0 to 4"
                )
            seen.add(name)
            labels[split][name] = int(level)
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from error


# Images ---------------------------------------------------------------------------------------------------------------


def btgraham(data: bytes, radius_px: int) -> bytes:
    """An image of an eye scaled to the radius `radius_px`, as JPEG of quality 72. Raises ImageRejected.

    Keeps four times the difference to the local average, around grey. Everything outside of 0.9 of the radius becomes grey and is
    cropped as far as possible. Source: TFDS, image_classification/diabetic_retinopathy_detection.py.
    """
    cv2 = opencv("Diabetic Retinopathy Detection")
    _check_header(data)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        if image is None:
            raise ImageRejected("corrupt", "OpenCV cannot decode it")
        scale = radius_px / eye_radius(image)
        _check_pixels(image.shape[1] * scale, image.shape[0] * scale, "after scaling")
        image = cv2.resize(image, dsize=None, fx=scale, fy=scale)
        average = cv2.GaussianBlur(image, (0, 0), radius_px / _BLUR_RADIUS)
        image = masked_and_cropped(cv2.addWeighted(image, 4, average, -4, _GREY), int(radius_px * _KEPT_RADIUS))
        return bytes(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1])
    except cv2.error as error:
        raise ImageRejected("corrupt", f"OpenCV: {error}") from error


def eye_radius(image: np.ndarray) -> float:
    """Half of the number of pixels in the middle row that are brighter than a tenth of its average; half the height if that row
    is dark."""
    brightness = image[image.shape[0] // 2].sum(axis=1)
    radius = (brightness > brightness.mean() / 10).sum() / 2
    return float(radius) if radius >= 1 else image.shape[0] / 2


def masked_and_cropped(image: np.ndarray, radius_px: int) -> np.ndarray:
    """Grey outside of a circle around the centre, cropped to the square around the circle."""
    x, y = image.shape[1] // 2, image.shape[0] // 2
    circle = np.zeros(image.shape[:2], np.uint8)
    opencv("Diabetic Retinopathy Detection").circle(circle, center=(x, y), radius=radius_px, color=1, thickness=-1)
    masked = np.where(circle[..., None] != 0, image, np.uint8(_GREY))
    return masked[max(y - radius_px, 0) : y + radius_px, max(x - radius_px, 0) : x + radius_px]


def _check_header(data: bytes) -> None:
    """Only JPEG within the usual limit of pixels is passed to OpenCV."""
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            _check_pixels(image.width, image.height, "in its header")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ImageRejected("not_an_image", f"not a JPEG: {error}") from error


def _check_pixels(width: float, height: float, where: str) -> None:
    if width * height > DEFAULT_POLICY.max_pixels:
        detail = f"{width:,.0f} x {height:,.0f} pixels {where}, limit {DEFAULT_POLICY.max_pixels:,}"
        raise ImageRejected("too_many_pixels", detail)
