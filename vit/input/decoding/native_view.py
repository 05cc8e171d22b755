"""The training view of a JPEG by the extension `vitline-native`, which decodes only what the view shows.

Its pixels are those of `decode` and `train_pixels`, bit for bit. It is used once it has shown that on this machine, and only for
training: for everything else, and for every file that is unusual or damaged, images are decoded whole.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from vitline.data_prep.decode import DecodePolicy, ImageRejected, check_size, decode, is_common_jpeg
from vitline.vit.input.augment import apply_operations, inception_crop, is_flipped, train_pixels
from vitline.vit.input.config import AugmentConfig

log = logging.getLogger(__name__)


class Native(Protocol):
    """The functions of the extension."""

    def size(self, data: bytes, /) -> tuple[int, int] | None: ...
    def view(
        self, data: bytes, top: int, left: int, height: int, width: int, out: np.ndarray, size: int, mirror: bool, /
    ) -> bool: ...


@dataclass(frozen=True, slots=True)
class TrainingView:
    """The training view of one example. Called with decoded pixels, it writes the view into `out`."""

    draws: Sequence[float]
    config: AugmentConfig

    def __call__(self, image: np.ndarray, out: Tensor) -> None:
        train_pixels(image, self.draws, self.config, out)

    def write_natively(self, encoded: bytes, policy: DecodePolicy, out: Tensor) -> bool:
        """Writes the same view without decoding the whole image; False if it has to be decoded whole."""
        native = native_decoder()
        return native is not None and _write(native, encoded, policy, self.draws, self.config, out)


@functools.cache
def native_decoder() -> Native | None:
    """The extension; None if it is not installed or, with a warning, if it cannot be used here."""
    try:
        import vitline_native
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        log.warning("vitline-native is installed, but cannot be used: %s. Whole images are decoded.", error)
        return None
    native = cast(Native, vitline_native)
    if found := _difference(native):
        log.warning("vitline-native differs from vitline's decoder (%s). Whole images are decoded.", found)
        return None
    return native


def _write(
    native: Native,
    encoded: bytes,
    policy: DecodePolicy,
    draws: Sequence[float],
    config: AugmentConfig,
    out: Tensor,
) -> bool:
    if config.train_crop != "inception" or not config.antialias or not is_common_jpeg(encoded, policy):
        return False
    if (found := native.size(encoded)) is None:
        return False
    height, width = found
    try:
        check_size(width, height, policy, "JPEG")
    except ImageRejected:
        return False  # decoding it whole refuses it
    box = inception_crop(height, width, draws, config.min_area_fraction)
    if not native.view(encoded, *box, out.numpy(), config.image_size_px, is_flipped(draws, config)):
        return False
    apply_operations(out, draws, config)
    return True


# Reduced and enlarged, of odd sizes, with every subsampling that the extension takes.
_SIDES = (40, 224)
_SUBSAMPLINGS = ("444", "422", "420", "440")


def _difference(native: Native) -> str:
    """What differs between the extension and `decode` with `train_pixels` on a few pictures; empty if nothing does."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (12, 17, 3), dtype=np.uint8).repeat(9, axis=0).repeat(9, axis=1)
    picture = blocks[:101, :149] // 2 + rng.integers(0, 128, (101, 149, 3), dtype=np.uint8)
    policy = DecodePolicy()
    for subsampling in _SUBSAMPLINGS:
        encoded = simplejpeg.encode_jpeg(picture, quality=85, colorsubsampling=subsampling)
        for side in _SIDES:
            config = AugmentConfig(image_size_px=side)
            for draws in rng.random((3, 41)).tolist():
                wanted, got = torch.zeros(2, side, side, 3, dtype=torch.uint8)
                train_pixels(decode(encoded), draws, config, wanted)
                try:
                    made = _write(native, encoded, policy, draws, config, got)
                except (AttributeError, TypeError, ValueError) as error:
                    return str(error)
                if not made:
                    return f"it refused a picture with {subsampling} chroma"
                if not torch.equal(wanted, got):
                    return f"up to {int((wanted.int() - got.int()).abs().max())} grey levels with {subsampling} chroma"
    return ""
