"""Confusions: counts by class and predicted class, two tables as CSV, and a figure if there are few classes."""

import io
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from vitline.infra.plain_text import csv_text
from vitline.vit.training.predictions import Predictions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CLASSES_IN_FULL, MAX_CLASSES_DRAWN, MAX_CLASSES_WITH_COUNTS = 200, 50, 20
MAX_PAIRS = 1000
_DPI, _CELL_PX, _MIN_SIDE_PX, _MAX_NAME = 120, 26, 260, 28


def confusion(predictions: Predictions, num_classes: int) -> Int64[np.ndarray, "K K"]:
    """Counts of examples by class (rows) and predicted class (columns); they sum to the number of examples.

    An example with several labels counts once, as `Predictions.label`.
    """
    cell = predictions.label.astype(np.int64) * num_classes + predictions.predicted
    return np.bincount(cell, minlength=num_classes**2).reshape(num_classes, num_classes)


def confusion_csv(counts: Int64[np.ndarray, "K K"], names: Sequence[str]) -> str:
    """K x K counts: one row per class, one column per predicted class."""
    return csv_text(
        ["class \\ predicted", *names], ([name, *row] for name, row in zip(names, counts.tolist(), strict=True))
    )


def confused_pairs_csv(predictions: Predictions, names: Sequence[str]) -> str:
    """The most frequent confusions, at most 1,000: class, predicted, examples, share of the examples of the class.

    For more classes than a person can read in a matrix.
    """
    wrong = ~predictions.right
    pairs = Counter(zip(predictions.label[wrong].tolist(), predictions.predicted[wrong].tolist(), strict=True))
    sizes = np.bincount(predictions.label, minlength=len(names))
    most = sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))[:MAX_PAIRS]
    rows = ([names[a], names[b], count, f"{count / sizes[a]:.4f}"] for (a, b), count in most)
    return csv_text(["class", "predicted", "examples", "fraction"], rows)


def per_class_csv(predictions: Predictions, names: Sequence[str]) -> str:
    """One row per class in order of label ids: number of examples, top-1 (empty without examples), the wrong class that is
    predicted most often, and how often."""
    sizes = np.bincount(predictions.label, minlength=len(names)).tolist()
    hits = np.bincount(predictions.label[predictions.right], minlength=len(names)).tolist()
    wrong = ~predictions.right
    taken: dict[int, Counter[int]] = {}
    for label, predicted in zip(predictions.label[wrong].tolist(), predictions.predicted[wrong].tolist(), strict=True):
        taken.setdefault(label, Counter())[predicted] += 1

    def row(label: int) -> list[object]:
        # Of equally frequent classes the smaller id, so that the table depends on the predictions only.
        other, times = min(taken.get(label, Counter()).items(), key=lambda item: (-item[1], item[0]), default=(None, 0))
        top1 = f"{hits[label] / sizes[label]:.4f}" if sizes[label] else ""
        return [names[label], sizes[label], top1, "" if other is None else names[other], times or ""]

    return csv_text(["class", "examples", "top1", "most_often_taken_for", "times"], map(row, range(len(names))))


def distinct(names: Sequence[str]) -> list[str]:
    """Class names, with the label id appended where several classes share a name (ImageNet has two classes "crane")."""
    shared = {name for name, count in Counter(names).items() if count > 1}
    return [f"{name} ({label})" if name in shared else name for label, name in enumerate(names)]


def draw_confusion(counts: Int64[np.ndarray, "K K"], names: Sequence[str], title: str) -> bytes:
    """The matrix as a PNG. Each row is coloured by its shares, so that small classes are as visible as large ones.

    Counts are printed for up to 20 classes. With more than 50 classes the names would not be readable.
    """
    from matplotlib.figure import Figure  # takes a second to import; avoids the global state of pyplot

    num_classes = len(names)
    short = [name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…" for name in names]
    side = max(_CELL_PX * num_classes, _MIN_SIDE_PX) / _DPI
    figure = Figure(figsize=(side, side), dpi=_DPI)
    axes = figure.add_axes((0, 0, 1, 1))  # savefig adds the room for labels and title
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    places = range(num_classes)
    # A class name such as "$x$" must not be parsed as a formula.
    axes.set_xticks(places, short, rotation=90, fontsize=7, parse_math=False)
    axes.set_yticks(places, short, fontsize=7, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_color("#d5dae3")
    axes.set_xlabel("predicted", fontsize=8)
    axes.set_ylabel("class", fontsize=8)
    axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    if num_classes <= MAX_CLASSES_WITH_COUNTS:
        for row, column in zip(*np.nonzero(counts), strict=True):
            ink = "white" if shares[row, column] > 0.55 else "#1d2330"
            axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", fontsize=6, color=ink)
    return figure_png(figure)


def figure_png(figure: "Figure") -> bytes:
    """The figure, with the room that labels and title need. Equal figures give equal bytes."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks are drawn as boxes
        figure.savefig(file, format="png", bbox_inches="tight", pad_inches=0.15, metadata={"Software": None})
    return file.getvalue()
