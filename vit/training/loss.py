"""Losses per example. The caller sums them and divides by the global batch, so padding and workers do not matter."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitline.vit.input.batches import Labels, MultiLabels
from vitline.vit.models.user_code import imported_where_allowed


def targets_of(labels: Labels, num_classes: int, label_smoothing: float = 0.0) -> Float[Tensor, "B K"]:
    """Class ids -> float32 targets (B, K), scattered where the ids are. Smoothing spreads its share over all K classes."""
    if isinstance(labels, MultiLabels):
        target = labels.dense(num_classes)
    else:
        target = torch.zeros(len(labels), num_classes, device=labels.device).scatter_(1, labels[:, None], 1.0)
    return target * (1 - label_smoothing) + label_smoothing / num_classes if label_smoothing else target


def mixed_targets(
    own: Float[Tensor, "B K"], partner: Float[Tensor, "B K"], lam: Float[Tensor, " B"]
) -> Float[Tensor, "B K"]:
    """Targets of images that MixUp or CutMix has mixed: those of both images, by their shares."""
    return lam[:, None] * own + (1 - lam[:, None]) * partner


def softmax_cross_entropy(logits: Float[Tensor, "B K"], targets: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """-sum_k t_k log softmax(x)_k, in float32. Used for fine-tuning and single-label corpora."""
    return -(targets * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1)


def sigmoid_cross_entropy(logits: Float[Tensor, "B K"], targets: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """Binary cross-entropy summed over classes, in float32: the paper's pre-training loss on I21k and JFT."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(dim=-1)


LossFunction = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, LossFunction] = {"softmax": softmax_cross_entropy, "sigmoid": sigmoid_cross_entropy}


@cache
def loss_named(name: str) -> LossFunction:
    """The loss of a recipe: logits (B, K), targets (B, K) -> losses (B,). A user-defined one by its PACKAGE.MODULE:NAME.

    Raises ValueError for code that may not be imported; that loss does so for a result of another shape.
    """
    if name in LOSSES:
        return LOSSES[name]
    own = imported_where_allowed(name, "loss")

    def checked(logits: Tensor, targets: Tensor) -> Tensor:
        losses: Any = own(logits, targets)
        if not isinstance(losses, Tensor) or losses.shape != logits.shape[:1]:
            found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"The loss {name!r} returned {found}; it must return one loss per example, ({len(logits)},)."
            )
        return losses.float()

    return checked


def num_correct(logits: Float[Tensor, "B K"], labels: Labels, valid: Tensor) -> Tensor:
    """Number of valid examples whose top-1 class is right (`hits`); 0-d int64 tensor."""
    top1 = logits.argmax(dim=-1)
    return (hits(labels, top1) & valid).sum(dtype=torch.int64)


def hits(labels: Labels, classes: Tensor) -> Tensor:
    """bool (B,): whether a class is a label of its image; of labels with unequal weights, as a teacher's, one of the largest weight."""
    if isinstance(labels, MultiLabels):
        largest = F.pad(labels.weights, (0, 1)).amax(dim=1, keepdim=True)
        return ((labels.ids == classes[:, None]) & (labels.weights > 0) & (labels.weights == largest)).any(dim=1)
    return labels == classes
