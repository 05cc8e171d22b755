"""Crop, resize, flip and RandAugment: decoded pixels -> the uint8 square that the network sees.

The crop is a pure function of (seed, epoch, row, image size). It uses only operations that IEEE 754 rounds exactly, so
every machine computes the same crop. MixUp and CutMix, which need two images, come later (`augmentations/mixing.py`).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vitline.vit.input.augmentations.box import Box
from vitline.vit.input.augmentations.rand_augment import DRAWS_PER_LAYER, Operation, draw_operations, rand_augment
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.permutation import derive_key, uniforms

_NUM_TRIES = 10
_MIN_ASPECT, _MAX_ASPECT = 3 / 4, 4 / 3
_FLIP = 4 * _NUM_TRIES
NUM_DRAWS = _FLIP + 1


def train_draws(seed: int, epoch: ArrayLike, row: ArrayLike, num_layers: int = 0) -> NDArray[np.floating]:
    """The random numbers of examples, shape (n, NUM_DRAWS + 3 num_layers): four for each try of a crop, one for the flip, three
    for each layer of RandAugment. More layers leave the other numbers as they are."""
    return uniforms(derive_key(seed, "augment"), epoch, row, count=NUM_DRAWS + DRAWS_PER_LAYER * num_layers)


def train_pixels(image: np.ndarray, draws: Sequence[float], config: AugmentConfig, out: Tensor) -> None:
    """Writes the training view of an image (height, width, 3) into `out`, uint8 (size, size, 3)."""
    size = config.image_size_px
    if config.train_crop == "inception":
        box = inception_crop(image.shape[0], image.shape[1], draws, config.min_area_fraction)
        view = resize(image, box, size, size, antialias=config.antialias)
    elif config.train_resize_px is not None:
        whole = Box(0, 0, image.shape[0], image.shape[1])
        resized = resize(image, whole, config.train_resize_px, config.train_resize_px, antialias=config.antialias)
        top, left, _, _ = random_crop(config.train_resize_px, draws, size)
        view = resized[:, :, top : top + size, left : left + size]
    else:
        view = _eval_view(image, config)
    # torch has a kernel that mirrors uint8 pixels; reversing a numpy axis takes longer than the resize.
    out.copy_((view.flip(3) if is_flipped(draws, config) else view)[0].permute(1, 2, 0))
    apply_operations(out, draws, config)


def apply_operations(out: Tensor, draws: Sequence[float], config: AugmentConfig) -> None:
    """Applies RandAugment to a training view that has been cropped, resized and mirrored, if the config has it."""
    if operations := train_operations(draws, config):
        out.copy_(torch.from_numpy(rand_augment(out.numpy(), operations)))


def is_flipped(draws: Sequence[float], config: AugmentConfig) -> bool:
    """Whether the training view is mirrored."""
    return config.flip and draws[_FLIP] < 0.5


def train_operations(draws: Sequence[float], config: AugmentConfig) -> list[Operation]:
    """The operations of RandAugment on the training view; none if the config has none. Raises ValueError for too few draws."""
    if config.randaugment_magnitude is None:
        return []
    of_layers = draws[NUM_DRAWS:]
    if len(of_layers) != DRAWS_PER_LAYER * config.randaugment_layers:
        raise ValueError(
            f"{len(draws)} draws for {config.randaugment_layers} layers of RandAugment. Pass num_layers to train_draws."
        )
    return draw_operations(of_layers, config.randaugment_magnitude, config.image_size_px)


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


def random_crop(side: int, draws: Sequence[float], size: int) -> Box:
    """A random square crop of an image that was resized to a larger square (arXiv:1912.11370, Sec. 3.3)."""
    top, left = (int(draw * (side - size + 1)) for draw in draws[:2])
    return Box(top, left, size, size)


def _eval_view(image: np.ndarray, config: AugmentConfig) -> Tensor:
    height, width, size = image.shape[0], image.shape[1], config.image_size_px
    whole = Box(0, 0, height, width)
    if config.eval_resize_px is None:
        return resize(image, whole, size, size, antialias=config.antialias)
    scale = config.eval_resize_px / min(height, width)
    h, w = round(height * scale), round(width * scale)
    top, left = (h - size) // 2, (w - size) // 2
    return resize(image, whole, h, w, antialias=config.antialias)[:, :, top : top + size, left : left + size]
