"""Configs of the input that change pixels. Imports neither torch nor Ray."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from infra.config import FrozenConfig


class AugmentConfig(FrozenConfig):
    """From decoded pixels to the square that the network sees, in training and in evaluation."""

    image_size_px: PositiveInt = 224
    """Side of the square."""
    train_crop: Literal["inception", "none"] = "inception"
    """Random crop of 5-100 % of the area, or the same transform as in evaluation (before the flip)."""
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
