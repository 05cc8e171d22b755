"""Bytes of small images, made from seeds: equal seeds give equal bytes."""

import io

import numpy as np
from PIL import Image


def encoded(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    """An image file of uint8 pixels (height, width[, 3])."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def noise(seed, size: tuple[int, int] = (8, 8), kind: str = "PNG") -> bytes:
    """A random value for every pixel; `size` is (width, height)."""
    return encoded(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8), kind)


def blurred(seed, size: tuple[int, int] = (24, 20), kind: str = "JPEG") -> bytes:
    """4 x 4 colours, enlarged; perceptual hashes of different seeds are far apart."""
    coarse = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return encoded(np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)), kind)
