"""Configs of the input: reading order and augmentation. Imports neither torch nor Ray."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from infra.config import FrozenConfig


class AugmentConfig(FrozenConfig):
    """How decoded images become the square input of the network, in training and in evaluation."""

    image_size_px: PositiveInt = 224
    """Side of the square, in pixels."""
    train_crop: Literal["inception", "random", "none"] = "inception"
    """Crop for training. `inception`: random area and aspect ratio. `random`: resize the image to a square of
    `train_resize_px`, then crop the input size at random (BiT). `none`: the same transform as in evaluation."""
    train_resize_px: PositiveInt | None = None
    """Side of the square that a `random` crop is cut from (448 for an input of 384); only for `random`."""
    min_area_fraction: float = Field(0.05, gt=0, le=1)
    """Smallest area of an `inception` crop, as a fraction of the image."""
    flip: bool = True
    """Mirror training images left to right with probability 0.5."""
    antialias: bool = True
    """Antialias when an image is made smaller. False does as the paper's code did: faster, but with aliasing."""
    eval_resize: Literal["square", "shorter_side"] = "square"
    """Resize for evaluation. `square`: directly to the square, ignoring the aspect ratio (VTAB). `shorter_side`: the shorter
    side to `eval_resize_px`, then the central crop."""
    eval_resize_px: PositiveInt | None = None
    """Length of the shorter side before the central crop (256 for an input of 224); only for `shorter_side`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.train_crop == "random") != (self.train_resize_px is not None):
            raise ValueError(
                f"train_crop={self.train_crop!r} with train_resize_px={self.train_resize_px}: train_crop='random' needs "
                "train_resize_px, the side of the square that it is cut from, and other crops do not use it."
            )
        if self.train_resize_px is not None and self.train_resize_px < self.image_size_px:
            raise ValueError(
                f"train_resize_px={self.train_resize_px} must be at least image_size_px={self.image_size_px}, the side of "
                "the crop."
            )
        if self.eval_resize == "square" and self.eval_resize_px is not None:
            raise ValueError(
                f"eval_resize_px={self.eval_resize_px} has no effect with eval_resize='square'. "
                "Leave it out, or set eval_resize='shorter_side'."
            )
        if self.eval_resize == "shorter_side" and (self.eval_resize_px or 0) < self.image_size_px:
            raise ValueError(
                f"eval_resize='shorter_side' needs eval_resize_px of at least image_size_px={self.image_size_px}, "
                f"not {self.eval_resize_px}."
            )
        return self


class InputConfig(FrozenConfig):
    """Batch size, reading order and augmentation of training."""

    global_batch_size: PositiveInt = 4096
    """Examples per optimizer step over all workers (B)."""
    num_lanes: PositiveInt = 256
    """Number of sequential readers (L). Must divide the batch; at most so many workers can be used."""
    shuffle_window: PositiveInt = 4
    """Row groups that a lane shuffles together (w)."""
    augment: AugmentConfig = AugmentConfig()
    """Crop, flip and resize."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.global_batch_size % self.num_lanes:
            raise ValueError(f"num_lanes={self.num_lanes} must divide global_batch_size={self.global_batch_size}.")
        return self
