"""Mean average precision of a split with several labels per image, over all ranks."""

import torch
from jaxtyping import Float
from torch import Tensor

from vitline.vit.training.world import World

CHUNK_VALUES = 2**23
"""Most scores that the ranks exchange at a time."""


class AveragePrecision:
    """Keeps the logits and labels of this rank's examples on the CPU: 5 bytes for each example and class."""

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Float[Tensor, "B K"], labels: Float[Tensor, "B K"]) -> None:
        """Notes examples without padding. A class is a label where its weight is above 0."""
        self._scores.append(logits.float().cpu())
        self._labels.append((labels > 0).cpu())

    def mean(self, world: World, num_classes: int) -> float:
        """The mean over the classes that any example has. Every rank must call it; all get the same."""
        scores = torch.cat([torch.empty(0, num_classes), *self._scores])
        labels = torch.cat([torch.empty(0, num_classes, dtype=torch.bool), *self._labels])
        counts = torch.zeros(world.size, dtype=torch.int64)
        counts[world.rank] = len(scores)
        counts = world.sum(counts).cpu()
        first, num_examples = int(counts[: world.rank].sum()), int(counts.sum())
        total, num_found, width = 0.0, 0, max(1, CHUNK_VALUES // max(1, num_examples))
        for start in range(0, num_classes, width):  # the scores of all ranks at once might not fit the memory of one
            both = torch.zeros(2, num_examples, min(width, num_classes - start))
            both[0, first : first + len(scores)] = scores[:, start : start + width]
            both[1, first : first + len(scores)] = labels[:, start : start + width].float()
            precision, found = average_precisions(*world.sum(both).cpu())
            total, num_found = total + float(precision[found].sum()), num_found + int(found.sum())
        return total / num_found if num_found else 0.0


def average_precisions(scores: Float[Tensor, "N K"], labels: Float[Tensor, "N K"]) -> tuple[Tensor, Tensor]:
    """Average precision of each class in float64, and whether an example has the class.

    The sum over thresholds of (recall - recall of the threshold above) x precision; equal scores are one threshold, so the order
    of the examples does not matter. No interpolation, as in scikit-learn.
    """
    ordered, order = scores.sort(dim=0, descending=True, stable=True)
    hits = labels.gather(0, order).double()
    places = torch.arange(len(scores))[:, None]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[:-1] != ordered[1:]
    # Of equal scores each counts with the precision at the last of them.
    end = torch.where(last, places, len(scores)).flip(0).cummin(dim=0).values.flip(0)
    precision = (hits.cumsum(dim=0) / (places + 1)).gather(0, end)
    found = hits.sum(dim=0)
    return (hits * precision).sum(dim=0) / found.clamp_min(1), found > 0
