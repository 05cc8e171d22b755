"""Losses per example. The caller sums them and divides by the global batch, so padding and workers do not matter."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def targets_of(labels: Tensor, num_classes: int, label_smoothing: float = 0.0) -> Float[Tensor, "B K"]:
    """Class ids (B,) or multi-hot rows (B, K) -> float32 targets (B, K). Smoothing spreads its share over all K classes."""
    target = F.one_hot(labels, num_classes).float() if labels.ndim == 1 else labels.float()
    return target * (1 - label_smoothing) + label_smoothing / num_classes if label_smoothing else target


def mixed_targets(
    own: Float[Tensor, "B K"], partner: Float[Tensor, "B K"], own_share: Float[Tensor, " B"]
) -> Float[Tensor, "B K"]:
    """Targets of images that MixUp or CutMix has mixed: those of both images, by their shares."""
    return own_share[:, None] * own + (1 - own_share[:, None]) * partner


def softmax_cross_entropy(logits: Float[Tensor, "B K"], targets: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """-sum_k t_k log softmax(x)_k, in float32. Used for fine-tuning and single-label corpora."""
    return -(targets * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1)


def sigmoid_cross_entropy(logits: Float[Tensor, "B K"], targets: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """Binary cross-entropy summed over classes, in float32: the paper's pre-training loss on I21k and JFT."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(dim=-1)


LOSSES = {"softmax": softmax_cross_entropy, "sigmoid": sigmoid_cross_entropy}


def num_correct(logits: Float[Tensor, "B K"], labels: Tensor, valid: Tensor) -> Tensor:
    """Number of valid examples whose top-1 class is one of their labels; 0-d int64 tensor."""
    top1 = logits.argmax(dim=-1)
    hit = labels == top1 if labels.ndim == 1 else labels.gather(1, top1[:, None])[:, 0] > 0
    return (hit & valid).sum(dtype=torch.int64)
