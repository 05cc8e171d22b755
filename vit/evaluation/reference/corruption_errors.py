"""ImageNet-C: the scores of its severities, and the mean corruption error. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from jaxtyping import Bool

from vitline.vit.evaluation.evaluate import severity_metric
from vitline.vit.evaluation.tasks import IMAGENET_C

SEVERITIES = (1, 2, 3, 4, 5)

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


def severity_of(example_id: str) -> int | None:
    """The severity of an image of ImageNet-C: 3 of `test/3_n01440764_ILSVRC2012_val_00000293.JPEG`; None for any other id."""
    named = re.match(r"test/([1-5])_n[0-9]{8}", example_id)
    return int(named[1]) if named else None


def scores_by_severity(example_ids: Sequence[str], right: Bool[np.ndarray, " n"]) -> dict[int, float]:
    """The fraction that is right of the images of each severity that there is."""
    severities = np.array([severity_of(example_id) or 0 for example_id in example_ids])
    return {number: float(right[severities == number].mean()) for number in SEVERITIES if number in severities}


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
    """The means by metric: `head/imagenet-c/top1` and `head/imagenet-c/mce`, and `head/imagenet-c/severity_3/top1` for each severity."""
    top1 = {corpus: metrics[name] for corpus in IMAGENET_C if (name := f"head/{corpus}/top1") in metrics}
    means = {f"head/imagenet-c/{name}": value for name, value in corruption_means(top1).items()}
    for number in SEVERITIES:
        names = [severity_metric(f"head/{corpus}/top1", number) for corpus in IMAGENET_C]
        if {*names} <= metrics.keys():
            means[severity_metric("head/imagenet-c/top1", number)] = fmean(metrics[name] for name in names)
    return means
