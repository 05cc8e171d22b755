"""Images in pages: files, thumbnails and contact sheets."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

_WHITE = 255


def image_file(image: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A file of pixels (height, width, 3), with `options` of Pillow's writer."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def thumbnail(pixels: np.ndarray, most_px: int, resampling: Image.Resampling = Image.Resampling.BICUBIC) -> Image.Image:
    """The image, reduced to at most `most_px` pixels per side."""
    image = Image.fromarray(pixels)
    image.thumbnail((most_px, most_px), resampling)
    return image


def contact_sheet(tiles: Sequence[np.ndarray], columns: int, gap_px: int) -> np.ndarray:
    """Arranges tiles of equal size in rows, with white gaps."""
    height, width = tiles[0].shape[:2]
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    sheet = np.full((rows * (height + gap_px) - gap_px, columns * (width + gap_px) - gap_px, 3), _WHITE, np.uint8)
    for i, tile in enumerate(tiles):
        top, left = i // columns * (height + gap_px), i % columns * (width + gap_px)
        sheet[top : top + height, left : left + width] = tile
    return sheet
