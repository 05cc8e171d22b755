"""Crop, resize and flip: decoded pixels -> the uint8 square that the network sees.

The crop is a pure function of (seed, epoch, row, image size). It uses only operations that IEEE 754 rounds exactly, so
every machine computes the same crop.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vit.input.config import AugmentConfig
from vit.input.keyed import derive_key, uniforms

_NUM_TRIES = 10
_MIN_ASPECT, _MAX_ASPECT = 3 / 4, 4 / 3
NUM_DRAWS = 4 * _NUM_TRIES + 1


class Box(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def train_draws(seed: int, epoch: ArrayLike, row: ArrayLike) -> NDArray[np.floating]:
    """The random numbers of examples, shape (n, NUM_DRAWS): four for each try of a crop, and the last for the flip."""
    return uniforms(derive_key(seed, "augment"), epoch, row, count=NUM_DRAWS)


def train_pixels(image: np.ndarray, draws: Sequence[float], config: AugmentConfig, out: Tensor) -> None:
    """Writes the training view of an image (height, width, 3) into `out`, uint8 (size, size, 3)."""
    if config.train_crop == "inception":
        box = inception_crop(image.shape[0], image.shape[1], draws, config.min_area_fraction)
        view = resize(image, box, config.image_size_px, config.image_size_px, antialias=config.antialias)
    elif config.train_resize_px is not None:
        view = _random_crop(image, draws, config.train_resize_px, config)
    else:
        view = _eval_view(image, config)
    # torch has a kernel that mirrors uint8 pixels; reversing a numpy axis takes longer than the resize.
    out.copy_((view.flip(3) if config.flip and draws[-1] < 0.5 else view)[0].permute(1, 2, 0))


def eval_pixels(image: np.ndarray, config: AugmentConfig, out: Tensor) -> None:
    """Writes the evaluation view of an image (height, width, 3) into `out`, uint8 (size, size, 3)."""
    out.copy_(_eval_view(image, config)[0].permute(1, 2, 0))


def evaluation_pixels(image: np.ndarray, config: AugmentConfig) -> np.ndarray:
    """The evaluation view of one image (height, width, 3); uint8 (size, size, 3)."""
    out = torch.empty(config.image_size_px, config.image_size_px, 3, dtype=torch.uint8)
    eval_pixels(image, config, out)
    return out.numpy()


def inception_crop(height: int, width: int, draws: Sequence[float], min_area_fraction: float) -> Box:
    """The first of ten random boxes that fits into the image, else the whole image.

    Szegedy et al., arXiv:1409.4842, Sec. 6: uniform area, aspect ratio between 3/4 and 4/3. The aspect ratio is drawn
    uniformly, as in TensorFlow's op (torchvision draws its logarithm). Unlike here, TensorFlow draws the height uniformly,
    not the area.
    """
    for i in range(0, 4 * _NUM_TRIES, 4):
        area = (min_area_fraction + (1 - min_area_fraction) * draws[i]) * (height * width)
        aspect = _MIN_ASPECT + (_MAX_ASPECT - _MIN_ASPECT) * draws[i + 1]
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            return Box(int(draws[i + 2] * (height - h + 1)), int(draws[i + 3] * (width - w + 1)), h, w)
    return Box(0, 0, height, width)


def resize(image: np.ndarray, box: Box, height: int, width: int, *, antialias: bool) -> Tensor:
    """A box of an image (H, W, 3), resized bilinearly; uint8 (1, 3, height, width), channels last in memory."""
    crop = torch.from_numpy(image[box.top : box.top + box.height, box.left : box.left + box.width])
    # Add the batch axis before the permutation. Added after it, its stride keeps torch from recognising channels last:
    # the resize then leaves its fast path (1.5x) and returns planes, which must be interleaved again.
    pixels = crop[None].permute(0, 3, 1, 2)
    return torch.nn.functional.interpolate(pixels, size=(height, width), mode="bilinear", antialias=antialias)


def _random_crop(image: np.ndarray, draws: Sequence[float], side: int, config: AugmentConfig) -> Tensor:
    """A random square crop of the image, which is first resized to a larger square (arXiv:1912.11370, Sec. 3.3)."""
    whole, size = Box(0, 0, image.shape[0], image.shape[1]), config.image_size_px
    resized = resize(image, whole, side, side, antialias=config.antialias)
    top, left = (int(draw * (side - size + 1)) for draw in draws[:2])
    return resized[:, :, top : top + size, left : left + size]


def _eval_view(image: np.ndarray, config: AugmentConfig) -> Tensor:
    height, width, size = image.shape[0], image.shape[1], config.image_size_px
    whole = Box(0, 0, height, width)
    if config.eval_resize_px is None:
        return resize(image, whole, size, size, antialias=config.antialias)
    scale = config.eval_resize_px / min(height, width)
    h, w = round(height * scale), round(width * scale)
    top, left = (h - size) // 2, (w - size) // 2
    return resize(image, whole, h, w, antialias=config.antialias)[:, :, top : top + size, left : left + size]
