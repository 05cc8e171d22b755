"""Configs of the input that change pixels. Imports neither torch nor Ray."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from infra.config import FrozenConfig


class AugmentConfig(FrozenConfig):
    """From decoded pixels to the square that the network sees, in training and in evaluation."""

    image_size_px: PositiveInt = 224
    """Side of the square."""
    train_crop: Literal["inception", "random", "none"] = "inception"
    """Random crop of 5-100 % of the area; one of a fixed size after the whole was resized to a square of
    `train_resize_px` (BiT); or the same transform as in evaluation (before the flip)."""
    train_resize_px: PositiveInt | None = None
    """Side of the square that a crop of the kind `random` is cut from (448 for 384)."""
    min_area_fraction: float = Field(0.05, gt=0, le=1)
    """Smallest area of an Inception crop, of the whole image."""
    flip: bool = True
    """Mirror every other training image, left to right."""
    antialias: bool = True
    """Average over the pixels that shrink into one. Off is what the original code did: faster, and it aliases."""
    eval_resize: Literal["square", "shorter_side"] = "square"
    """Straight to the square, aspect ratio ignored (VTAB), or the shorter side to `eval_resize_px` and the centre."""
    eval_resize_px: PositiveInt | None = None
    """Length of the shorter side before the central crop (256 for 224); for `shorter_side` only."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.train_crop == "random") != (self.train_resize_px is not None):
            raise ValueError(
                f"train_crop={self.train_crop!r} with train_resize_px={self.train_resize_px}: the random crop, and no "
                "other, needs the side of the square that it is cut from."
            )
        if self.train_resize_px is not None and self.train_resize_px < self.image_size_px:
            raise ValueError(
                f"train_resize_px={self.train_resize_px} is less than image_size_px={self.image_size_px}, the side of the "
                "crop."
            )
        if self.eval_resize == "square" and self.eval_resize_px is not None:
            raise ValueError(
                f"eval_resize_px={self.eval_resize_px} has no effect with eval_resize='square'; "
                "leave it out, or set eval_resize='shorter_side'."
            )
        if self.eval_resize == "shorter_side" and (self.eval_resize_px or 0) < self.image_size_px:
            raise ValueError(
                f"eval_resize='shorter_side' needs eval_resize_px of at least image_size_px={self.image_size_px}, "
                f"not {self.eval_resize_px}."
            )
        return self


class InputConfig(FrozenConfig):
    """Order and pixels of training."""

    global_batch_size: PositiveInt = 4096
    """Examples per optimizer step over all workers (B)."""
    num_lanes: PositiveInt = 256
    """Parallel reading positions (L); divides the batch and bounds the number of workers."""
    shuffle_window: PositiveInt = 4
    """Row groups a lane shuffles together (w)."""
    augment: AugmentConfig = AugmentConfig()
    """Crop, flip and resize."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.global_batch_size % self.num_lanes:
            raise ValueError(f"num_lanes={self.num_lanes} must divide global_batch_size={self.global_batch_size}.")
        return self
