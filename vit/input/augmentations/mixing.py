"""MixUp and CutMix: images of a batch are mixed with others, and their labels by the same shares.

Zhang et al., arXiv:1710.09412; Yun et al., arXiv:1905.04899. As in big_vision, a step has one share, and each image is mixed
with the one before it; there in the batch of a device, here in the lane. A lane belongs to one rank for every number of
workers, so no rank needs an image of another, and which images are mixed does not depend on workers and micro-batches.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitline.vit.input.augmentations.box import Box
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.permutation import derive_key, uniforms

_LEVELS = 256


class Mix(NamedTuple):
    """How the images of a step are mixed: by MixUp, or by CutMix where there is a box."""

    share: float
    """Share of an image's own label in its target; MixUp takes the same share of its pixels. A multiple of 1/256 for MixUp."""
    box: Box | None
    """The part of the image that CutMix replaces."""

    @property
    def words(self) -> list[str]:
        """The drawn parameters, for people."""
        if self.box is None:
            return [f"MixUp, lambda {self.share:.3f}"]
        return [f"CutMix, lambda {self.share:.3f}", f"box {self.box.words}"]


def draw_mix(seed: int, step: int, config: AugmentConfig) -> Mix:
    """The mix of a step, a function of (seed, step) alone. `config.mixes` must be true.

    The share of MixUp is at least 1/2, as in big_vision: of a drawn share and its complement, the larger. The box of CutMix has
    a random centre and is cut off at the borders, and the share follows from its pixels, as in torchvision.
    """
    draws = uniforms(derive_key(seed, "mix"), step, count=4).tolist()
    if config.mixup_alpha is not None and (config.cutmix_alpha is None or draws[0] < 0.5):
        level = beta_level(config.mixup_alpha, draws[1])
        return Mix(max(level, _LEVELS - level) / _LEVELS, None)
    assert config.cutmix_alpha is not None
    box = cutmix_box(beta_level(config.cutmix_alpha, draws[1]) / _LEVELS, config.image_size_px, draws[2], draws[3])
    return Mix(1 - box.height * box.width / config.image_size_px**2, box)


def cutmix_box(share: float, side_px: int, y: float, x: float) -> Box:
    """The box of sides sqrt(1 - share) around a centre, whose place is given by uniform numbers; clipped to the image."""
    half = int(0.5 * math.sqrt(1 - share) * side_px)
    spans = [(max(0, c - half), min(side_px, c + half)) for c in (int(y * side_px), int(x * side_px))]
    (top, bottom), (left, right) = spans
    return Box(top, left, bottom - top, right - left)


def beta_level(alpha: float, uniform: float) -> int:
    """A number from Beta(alpha, alpha) in 256ths, rounded to the nearest: 0 to 256, from a uniform number."""
    return int(np.searchsorted(_beta_steps(alpha), uniform, side="right"))


@cache
def _beta_steps(alpha: float) -> NDArray[np.floating]:
    """The distribution function of Beta(alpha, alpha) at 1/512, 3/512, ..., 511/512; shape (256,).

    Between these points the density is integrated by the rule of Gauss and Legendre. Below the first, where it may have a pole,
    it is x^(alpha-1) times the binomial series of (1 - x)^(alpha-1), which is integrated term by term.
    """
    nodes, weights = np.polynomial.legendre.leggauss(24)
    x = (np.arange(1, _LEVELS)[:, None] + nodes / 2) / _LEVELS
    # The density without its constant, as a power of a number that is 1 in the middle: no alpha overflows.
    inner = ((4 * x * (1 - x)) ** (alpha - 1) * weights).sum(axis=1) / (2 * _LEVELS)
    first, coefficient, edge = 0.0, 1.0, 0.5 / _LEVELS
    for k in range(60):
        first += coefficient * edge**k / (alpha + k)
        coefficient *= (k + 1 - alpha) / (k + 1)
    outer = first * edge * (4 * edge) ** (alpha - 1)
    mass = np.concatenate([[outer], inner, [outer]])
    steps: NDArray[np.floating] = np.cumsum(mass)[:-1] / mass.sum()
    return steps


def partners(lane: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each example of a batch, the index of the one before it in its lane; the first of a lane gets the last.

    `lane` (n,) is in reading order. An example that is alone in its lane is its own partner, and stays unmixed.
    """
    by_lane = np.argsort(lane, kind="stable")
    sorted_lane = lane[by_lane]
    is_first = np.concatenate([[True], sorted_lane[1:] != sorted_lane[:-1]])[: len(lane)]
    last = np.concatenate([np.flatnonzero(is_first)[1:], [len(lane)]]) - 1
    before = np.arange(len(lane)) - 1
    before[is_first] = last[: is_first.sum()]
    found = np.empty_like(by_lane)
    found[by_lane] = by_lane[before]
    return found


def mix_lane(images: Sequence[Tensor], usable: Sequence[bool], mix: Mix) -> list[bool]:
    """Mixes the images of a lane, uint8 (side, side, 3), in place: each with the one before it, the first with the last.

    Returns which were mixed: an image stays as it is if it or its partner is not usable, or if it is alone.
    """
    mixed = [len(images) > 1 and usable[i] and usable[i - 1] for i in range(len(images))]
    last = images[-1].clone()
    for i in reversed(range(len(images))):
        if mixed[i]:
            _mix(images[i].numpy(), (images[i - 1] if i else last).numpy(), mix)
    return mixed


def _mix(image: NDArray[np.uint8], partner: NDArray[np.uint8], mix: Mix) -> None:
    if mix.box is not None:
        top, left, height, width = mix.box
        part = np.s_[top : top + height, left : left + width]
        image[part] = partner[part]
        return
    # In integers, rounded to the nearest grey level: equal on every machine. 255 * 256 + 128 fits into 16 bits.
    own = round(mix.share * _LEVELS)
    total = np.multiply(image, np.uint16(own), dtype=np.uint16)
    total += np.multiply(partner, np.uint16(_LEVELS - own), dtype=np.uint16)
    total += np.uint16(_LEVELS // 2)
    image[:] = total >> np.uint16(8)
