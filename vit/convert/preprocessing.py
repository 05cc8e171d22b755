"""Converts the image preprocessing of timm and transformers folders to ours: values from -1 to 1, bilinear resize."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vitline.vit.convert.report import ConversionError, ConversionReport
from vitline.vit.input.config import AugmentConfig
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.network import Network
from vitline.vit.models.vit import VisionTransformer

OURS = (0.5, 0.5, 0.5)
BILINEAR = ("bilinear", 2)
MIN_CROP = 0.1
"""The least share of the side that a central crop keeps. timm's values are 0.8 to 1."""


def evaluation_of(
    network: Network, config: Mapping[str, Any] | None, processor: Mapping[str, Any] | None, report: ConversionReport
) -> AugmentConfig:
    """The evaluation transform from the `config.json` of timm or the `preprocessor_config.json` of transformers.

    Without either, images are resized directly to the square. A mean or standard deviation other than 0.5 is folded into
    the patch embedding, which is exact because it has no padding. Raises ConversionError if that is not possible.
    """
    size = network.config.image_size_px
    if processor:
        fold(network, _three(processor, "image_mean", report), _three(processor, "image_std", report), report)
        asked, resize = processor.get("size") or {}, processor.get("resample", 2)
        shorter = asked.get("shortest_edge") if isinstance(asked, Mapping) else None
        crops = bool(processor.get("do_center_crop")) and shorter is not None
        if crops and not (isinstance(shorter, int) and 1 <= shorter <= size / MIN_CROP):
            raise ConversionError(
                f"{report.source}: shortest_edge={shorter!r}, expected a whole number up to {size / MIN_CROP:g}."
            )
    else:
        about = (config or {}).get("pretrained_cfg") or config or {}
        fold(network, _three(about, "mean", report), _three(about, "std", report), report)
        resize, crops = about.get("interpolation", "bilinear"), about.get("crop_pct") is not None
        crops = crops and about.get("crop_mode", "center") == "center"
        shorter = _shorter_side(size, about["crop_pct"], report) if crops else None
    if resize not in BILINEAR:
        report.adapted.append(f"images: resized bilinearly with antialias, although the folder specifies {resize}")
    if crops and shorter is not None and shorter >= size:
        return AugmentConfig(image_size_px=size, antialias=True, eval_resize="shorter_side", eval_resize_px=shorter)
    return AugmentConfig(image_size_px=size, antialias=True)


def mean_and_std(low: float = -1.0, high: float = 1.0) -> tuple[list[float], list[float]]:
    """The mean and standard deviation of each colour that take pixel / 255 to values from `low` to `high`."""
    return [-low / (high - low)] * 3, [1 / (high - low)] * 3


def fold(network: Network, mean: Sequence[float], std: Sequence[float], report: ConversionReport) -> None:
    """Changes a network that was trained on (pixel / 255 - mean) / std so that it takes values from -1 to 1."""
    if tuple(mean) == OURS and tuple(std) == OURS:
        return
    if not isinstance(network, VisionTransformer) or not isinstance(network.config, ViTConfig):
        raise ConversionError(
            f"not supported: {report.source} was trained on images with mean {list(mean)} and standard deviation "
            f"{list(std)}. Only a plain Vision Transformer can be adapted exactly, because a ResNet pads with zeros."
        )
    center, scale = torch.tensor(mean), torch.tensor(std)
    with torch.no_grad():
        kernel = network.patch_embed.weight
        shift = (kernel * ((0.5 - center) / scale)[:, None, None]).sum(dim=(1, 2, 3))
        kernel.mul_((0.5 / scale)[:, None, None])
        assert network.patch_embed.bias is not None
        network.patch_embed.bias.add_(shift)
    report.adapted.append(
        f"patch_embed: mean {list(mean)} and standard deviation {list(std)} of the images folded in; the input is [-1, 1]"
    )


def _three(about: Mapping[str, Any], name: str, report: ConversionReport) -> tuple[float, ...]:
    """The mean or standard deviation of each colour. A standard deviation of 0 would divide by zero."""
    found = about.get(name, OURS)
    values = found if isinstance(found, list | tuple) else [found] * 3
    sound = len(values) == 3 and all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    if not sound or ("std" in name and min(values) <= 0):
        raise ConversionError(f"{report.source}: {name}={found!r}, expected three numbers, and of std positive ones.")
    return tuple(float(value) for value in values)


def _shorter_side(size: int, crop_pct: Any, report: ConversionReport) -> int:
    """The shorter side before the central crop, from the share of it that the crop keeps."""
    if not isinstance(crop_pct, int | float) or not MIN_CROP <= crop_pct <= 1 / MIN_CROP:
        raise ConversionError(
            f"{report.source}: crop_pct={crop_pct!r}, expected a number from {MIN_CROP} to {1 / MIN_CROP:g}."
        )
    return int(size / float(crop_pct))
