"""Calibration: whether predictions are right as often as the model's confidence says (Guo et al. 2017, arXiv:1706.04599, Sec. 2).

Imports no torch.
"""

import numpy as np
from jaxtyping import Bool, Float

from vitline.infra.html.text import percent
from vitline.infra.records import StoredRecord
from vitline.vit.evaluation.confusion import figure_png

NUM_BINS = 15
"""As in the paper's tables."""
_DPI, _SIDE_IN = 120, 4.2


class Bin(StoredRecord):
    """Predictions of similar confidence."""

    examples: int
    confidence: float
    """Their mean confidence; 0 without examples."""
    accuracy: float
    """The fraction of them that is right; 0 without examples."""


class Calibration(StoredRecord):
    """Confidence and accuracy of predictions. The confidence is the probability of the predicted class."""

    ece: float
    """Expected calibration error, 0 to 1: the mean over examples of |accuracy - mean confidence| of their bin."""
    bins: tuple[Bin, ...]
    """The confidences (0, 1/15], (1/15, 2/15], ..., (14/15, 1]."""

    @property
    def mean_confidence(self) -> float:
        return sum(b.examples * b.confidence for b in self.bins) / sum(b.examples for b in self.bins)


def calibration_of(confidence: Float[np.ndarray, " n"], right: Bool[np.ndarray, " n"]) -> Calibration | None:
    """The calibration of n predictions, n > 0; None where a confidence is not finite, as a network without finite weights has them."""
    if not np.isfinite(confidence).all():
        return None
    # Without the limits a confidence of 0, or one that rounding makes larger than 1, would be in no bin.
    place = np.clip(np.ceil(confidence.astype(np.float64) * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
    examples, confident, hits = (
        np.bincount(place, weights, NUM_BINS) for weights in (None, confidence.astype(np.float64), right)
    )
    some = np.maximum(examples, 1)
    columns = zip(examples.tolist(), (confident / some).tolist(), (hits / some).tolist(), strict=True)
    bins = tuple(Bin(examples=n, confidence=confidence, accuracy=accuracy) for n, confidence, accuracy in columns)
    return Calibration(ece=float(np.abs(hits - confident).sum() / len(right)), bins=bins)


def draw_reliability(calibration: Calibration, title: str) -> bytes:
    """The reliability diagram as a PNG: accuracy by confidence, the gap between both, and how many examples each bin has."""
    from matplotlib.figure import Figure  # takes a second to import; avoids the global state of pyplot

    figure = Figure(figsize=(_SIDE_IN, 1.3 * _SIDE_IN), dpi=_DPI)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1), gridspec_kw={"hspace": 0.1})
    total = sum(each.examples for each in calibration.bins)
    for i, each in enumerate(calibration.bins):
        if not each.examples:
            continue
        place = {"x": i / NUM_BINS, "width": 1 / NUM_BINS, "align": "edge"}
        upper.bar(height=each.accuracy, color="#7ea3d8", edgecolor="white", **place)
        gap = {"height": each.confidence - each.accuracy, "bottom": each.accuracy}
        upper.bar(**gap, fill=False, hatch="////", edgecolor="#c0392b", **place)
        lower.bar(height=100 * each.examples / total, color="#8a93a3", edgecolor="white", **place)
    upper.plot((0, 1), (0, 1), color="#1d2330", linewidth=1, linestyle="--")
    upper.set(xlim=(0, 1), ylim=(0, 1))
    upper.set_title(
        f"{title}\nECE {percent(calibration.ece)}, mean confidence {percent(calibration.mean_confidence)}",
        fontsize=9, loc="left", parse_math=False,
    )  # fmt: skip
    upper.set_ylabel("accuracy; hatched: gap to the confidence", fontsize=8)
    lower.set_ylabel("examples, %", fontsize=8)
    lower.set_xlabel("confidence", fontsize=8)
    for axes in (upper, lower):
        axes.tick_params(labelsize=7)
        axes.spines[:].set_color("#d5dae3")
    return figure_png(figure)
