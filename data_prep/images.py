"""Examine one image: decode it once, fully, and keep what later steps ask about it. The bytes stay as they are."""

import functools
import hashlib
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data_prep.decode import DecodePolicy, decode_image

_HASH_SIDE, _HASH_FREQUENCIES = 64, 16


@dataclass(frozen=True)
class Examined:
    """What is known of an accepted image. Hashes are raw bytes, 32 each; sizes are those of the decoded pixels."""

    sha256: bytes
    pixel_sha256: bytes
    phash: bytes
    phash_mirror: bytes
    width_px: int
    height_px: int
    format: str
    mode: str


def examine_image(data: bytes, policy: DecodePolicy) -> Examined:
    """Decode and hash one image. Raises ImageRejected."""
    image = decode_image(data, policy)
    height, width, _ = image.pixels.shape
    phash, mirror = perceptual_hashes(image.pixels)
    return Examined(
        sha256=hashlib.sha256(data).digest(),
        pixel_sha256=pixel_sha256(image.pixels),
        phash=phash,
        phash_mirror=mirror,
        width_px=width,
        height_px=height,
        format=image.format,
        mode=image.mode,
    )


def pixel_sha256(pixels: np.ndarray) -> bytes:
    """sha256 of the size and the RGB values: equal for a picture stored twice in different lossless files."""
    digest = hashlib.sha256(np.array(pixels.shape, dtype="<u4").tobytes())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def perceptual_hashes(pixels: np.ndarray) -> tuple[bytes, bytes]:
    """256-bit DCT hashes of an image and of its mirror image, 32 bytes each.

    Luminance is averaged down to 64 x 64; of its DCT-II the 16 x 16 lowest frequencies without the constant ones are
    kept; a bit says whether a coefficient is above their median, as in PDQ (Facebook, "The TMK+PDQF Video-Hashing
    Algorithm and the PDQ Image-Hashing Algorithm", 2019), which filters before averaging. Near duplicates differ in
    few bits.
    """
    grey = Image.fromarray(pixels).convert("L").resize((_HASH_SIDE, _HASH_SIDE), Image.Resampling.BOX)
    basis = _dct_basis()
    spectrum = basis @ np.asarray(grey, dtype=np.float64) @ basis.T
    mirrored = spectrum * _MIRROR_SIGNS
    return _bits_above_median(spectrum), _bits_above_median(mirrored)


# Mirroring an image changes the sign of its odd horizontal frequencies; here they are 1, 2, ... 16.
_MIRROR_SIGNS = np.where(np.arange(1, _HASH_FREQUENCIES + 1) % 2, -1.0, 1.0)


def _bits_above_median(spectrum: np.ndarray) -> bytes:
    # Rounded, as a flat image has coefficients of 1e-13 whose signs differ between machines.
    rounded = np.round(spectrum, 6)
    return np.packbits(rounded > np.median(rounded)).tobytes()


@functools.cache
def _dct_basis() -> np.ndarray:
    frequency = np.arange(1, _HASH_FREQUENCIES + 1)[:, None]
    position = np.arange(_HASH_SIDE)[None, :] + 0.5
    return math.sqrt(2 / _HASH_SIDE) * np.cos(math.pi / _HASH_SIDE * frequency * position)
