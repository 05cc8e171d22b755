"""Configs of the input: reading order and augmentation. Imports neither torch nor Ray."""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from vitline.infra.config import FrozenConfig, omitted_at_default, replace


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
    randaugment_layers: NonNegativeInt = omitted_at_default(0)
    """RandAugment after crop and flip: number of operations, drawn from 16, that each training image goes through. 0: none."""
    randaugment_magnitude: float | None = omitted_at_default(None, ge=0, le=30)
    """Strength of these operations on the scale of AugReg and big_vision (10, 15, 20); only with `randaugment_layers`. At 0 they
    change images, too."""
    mixup_alpha: float | None = omitted_at_default(None, gt=0, le=100)
    """MixUp of each training image with another of its lane: the share is drawn from Beta(alpha, alpha) for each step, and
    images and labels are mixed by it. None: no MixUp."""
    cutmix_alpha: float | None = omitted_at_default(None, gt=0, le=100)
    """CutMix: a box of another image of the lane replaces a part of 1 - Beta(alpha, alpha). With `mixup_alpha` as well, each step
    does one of the two, with probability 0.5. None: no CutMix."""

    @property
    def mixes(self) -> bool:
        """True if training images are mixed, so that their targets are shares of labels."""
        return self.mixup_alpha is not None or self.cutmix_alpha is not None

    def resized(self, image_size_px: int) -> dict[str, Any]:
        """The fields for this resolution. Sizes before a crop keep their ratio to it: 448 for 384 become 597 for 512."""
        before_crop = ("train_resize_px", "eval_resize_px")
        ratios = {name: (getattr(self, name) or 0) / self.image_size_px for name in before_crop}
        return {"image_size_px": image_size_px} | {name: round(image_size_px * r) or None for name, r in ratios.items()}

    def for_transfer(self, image_size_px: int) -> Self:
        """For fine-tuning at this resolution: without RandAugment, MixUp and CutMix, which AugReg does without, too."""
        off = dict.fromkeys(("randaugment_magnitude", "mixup_alpha", "cutmix_alpha"))
        return replace(self, randaugment_layers=0, **off, **self.resized(image_size_px))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.randaugment_layers) != (self.randaugment_magnitude is not None):
            raise ValueError(
                f"randaugment_layers={self.randaugment_layers} with randaugment_magnitude={self.randaugment_magnitude}: set both, "
                "such as 2 and 10, or neither."
            )
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


def lanes_advice(global_batch_size: int, at_most: int) -> str:
    """What to set, as a sentence: the largest number of lanes that divides the batch and is not more than this."""
    lanes = max(n for n in range(1, min(global_batch_size, at_most) + 1) if global_batch_size % n == 0)
    return f'Set `--set recipe.input.num_lanes={lanes}` (in a form the override {{"recipe.input.num_lanes": {lanes}}}).'


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
            raise ValueError(
                f"num_lanes={self.num_lanes} must divide global_batch_size={self.global_batch_size}. "
                f"{lanes_advice(self.global_batch_size, self.num_lanes)}"
            )
        if self.augment.mixes and self.global_batch_size == self.num_lanes:
            raise ValueError(
                f"num_lanes={self.num_lanes} equals global_batch_size={self.global_batch_size}, but images are mixed with others of "
                f"their lane and batch: set num_lanes to at most {self.global_batch_size // 2}, or neither mixup_alpha nor cutmix_alpha."
            )
        return self
