"""The mean corruption error of ImageNet-C. Imports no torch."""

from collections.abc import Mapping
from statistics import fmean

from vitline.vit.evaluation.tasks import IMAGENET_C

ALEXNET_ERRORS = {
    "imagenet-c-gaussian-noise": 0.886428,
    "imagenet-c-shot-noise": 0.894468,
    "imagenet-c-impulse-noise": 0.922640,
    "imagenet-c-defocus-blur": 0.819880,
    "imagenet-c-glass-blur": 0.826268,
    "imagenet-c-motion-blur": 0.785948,
    "imagenet-c-zoom-blur": 0.798360,
    "imagenet-c-snow": 0.866816,
    "imagenet-c-frost": 0.826572,
    "imagenet-c-fog": 0.819324,
    "imagenet-c-brightness": 0.564592,
    "imagenet-c-contrast": 0.853204,
    "imagenet-c-elastic-transform": 0.646056,
    "imagenet-c-pixelate": 0.717840,
    "imagenet-c-jpeg-compression": 0.606500,
}
"""Top-1 error of AlexNet for each corruption, over all five severities: arXiv:1903.12261, Table 1, with the digits of the code of AugMix
(arXiv:1912.02781)."""


def corruption_means(top1: Mapping[str, float]) -> dict[str, float]:
    """`top1`, the mean over the corruptions of ImageNet-C, and `mce`, the mean corruption error, in which the error for each corruption
    is divided by that of AlexNet (arXiv:1903.12261, Sec. 4.1). From fractions by corpus; empty unless all 15 are scored."""
    if not {*IMAGENET_C} <= {*top1}:
        return {}
    errors = {corpus: 1 - top1[corpus] for corpus in IMAGENET_C}
    return {
        "top1": 1 - fmean(errors.values()),
        "mce": fmean(error / ALEXNET_ERRORS[corpus] for corpus, error in errors.items()),
    }


def corruption_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The means by metric: `head/imagenet-c/top1` and `head/imagenet-c/mce`."""
    top1 = {corpus: metrics[name] for corpus in IMAGENET_C if (name := f"head/{corpus}/top1") in metrics}
    return {f"head/imagenet-c/{name}": value for name, value in corruption_means(top1).items()}
