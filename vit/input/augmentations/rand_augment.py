"""RandAugment: each training image goes through some operations, drawn from 16 (Cubuk et al., arXiv:1909.13719).

Operations and strengths are those of AugReg (arXiv:2106.10270) and big_vision, whose magnitudes are not those of timm and
torchvision. Where Pillow has the operation, it is Pillow's; big_vision's are re-implementations of these. Two things differ
from big_vision: `Contrast` blends with the mean grey of the image, where big_vision blends with (number of pixels) / 256;
and lengths, which are pixels of a 224 px image there, scale with the side of the image.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

DRAWS_PER_LAYER = 3
FILL = (128, 128, 128)
"""Grey of the pixels that an operation moves into the image, and of those that Cutout removes."""
_SIDE_PX = 224
_NEAREST, _AFFINE = Image.Resampling.NEAREST, Image.Transform.AFFINE

Picture: TypeAlias = Image.Image


class Operation(NamedTuple):
    """One drawn operation, with its parameters in words and the function that applies it to an RGB image."""

    name: str
    parameters: str
    apply: Callable[[Picture], Picture]


def draw_operations(draws: Sequence[float], magnitude: float, side_px: int) -> list[Operation]:
    """The operations of an image of this side: one per three uniform numbers, which choose operation, sign and place."""
    layers = (draws[i : i + DRAWS_PER_LAYER] for i in range(0, len(draws), DRAWS_PER_LAYER))
    return [_draw(layer, magnitude / 10, side_px) for layer in layers]


def rand_augment(pixels: np.ndarray, operations: Sequence[Operation]) -> np.ndarray:
    """The image (height, width, 3), uint8, after all operations in turn; same shape."""
    image = Image.fromarray(pixels)
    for operation in operations:
        image = operation.apply(image)
    return np.array(image)


def _draw(draws: Sequence[float], level: float, side_px: int) -> Operation:
    name, sign = NAMES[int(draws[0] * len(NAMES))], -1 if draws[1] < 0.5 else 1
    if name in _WITHOUT_PARAMETER:
        return Operation(name, "", _WITHOUT_PARAMETER[name])
    if name in _ENHANCERS:
        factor = 1.8 * level + 0.1
        return Operation(name, f"factor {factor:.3g}", partial(_enhance, _ENHANCERS[name], factor))
    if name in ("ShearX", "ShearY"):
        shear = sign * 0.3 * level
        matrix = (1, shear, 0, 0, 1, 0) if name == "ShearX" else (1, 0, 0, shear, 1, 0)
        return Operation(name, f"by {shear:+.3g}", partial(_affine, matrix))
    if name in ("TranslateX", "TranslateY"):
        shift = sign * round(100 * level * side_px / _SIDE_PX)
        matrix = (1, 0, shift, 0, 1, 0) if name == "TranslateX" else (1, 0, 0, 0, 1, shift)
        return Operation(name, f"{shift:+d} px", partial(_affine, matrix))
    if name == "Rotate":
        return Operation(name, f"{sign * 30 * level:+.3g}°", partial(_rotate, sign * 30 * level))
    if name == "Cutout":
        half = int(40 * level * side_px / _SIDE_PX)
        x, y = int(draws[1] * side_px), int(draws[2] * side_px)
        return Operation(
            name, f"{2 * half} px at ({x}, {y})", partial(_cutout, (x - half, y - half, x + half, y + half))
        )
    return _draw_tone(name, level)


def _draw_tone(name: str, level: float) -> Operation:
    if name == "Posterize":
        # big_vision asks for 0 bits below a magnitude of 2.5; TensorFlow then shifts by 7 bits, and 1 bit is kept.
        bits = min(8, max(1, int(4 * level)))
        return Operation(name, f"{bits} bit{'s' * (bits > 1)}", lambda image: ImageOps.posterize(image, bits))
    if name == "Solarize":
        threshold = int(256 * level)
        return Operation(name, f"from {threshold}", lambda image: ImageOps.solarize(image, threshold))
    assert name == "SolarizeAdd"
    addition = int(110 * level)
    table = [min(255, value + addition) if value < 128 else value for value in range(256)]
    return Operation(name, f"+{addition}", lambda image: image.point(table * 3))


def _enhance(enhancer: Callable[[Picture], Any], factor: float, image: Picture) -> Picture:
    enhanced: Picture = enhancer(image).enhance(factor)
    return enhanced


def _affine(matrix: Sequence[float], image: Picture) -> Picture:
    return image.transform(image.size, _AFFINE, matrix, _NEAREST, fillcolor=FILL)


def _rotate(degrees: float, image: Picture) -> Picture:
    return image.rotate(degrees, _NEAREST, fillcolor=FILL)


def _cutout(box: tuple[int, int, int, int], image: Picture) -> Picture:
    cut = image.copy()
    cut.paste(FILL, box)
    return cut


_WITHOUT_PARAMETER: dict[str, Callable[[Picture], Picture]] = {
    "AutoContrast": ImageOps.autocontrast,
    "Equalize": ImageOps.equalize,
    "Invert": ImageOps.invert,
}
_ENHANCERS: dict[str, Callable[[Picture], Any]] = {
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Brightness": ImageEnhance.Brightness,
    "Sharpness": ImageEnhance.Sharpness,
}
NAMES = (
    *_WITHOUT_PARAMETER, "Rotate", "Posterize", "Solarize", *_ENHANCERS, "ShearX", "ShearY", "TranslateX", "TranslateY",
    "Cutout", "SolarizeAdd",
)  # fmt: skip
"""The operations, all drawn with the same probability."""
