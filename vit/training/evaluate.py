"""Scores a network on a split of a corpus. Every example counts exactly once, and the count is checked."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitline.vit.config import TrainRecipe
from vitline.vit.input.batches import Batch, MultiLabels
from vitline.vit.models.network import Network
from vitline.vit.training.average_precision import AveragePrecision
from vitline.vit.training.loop import forward
from vitline.vit.training.loss import hits, loss_named, num_correct, targets_of
from vitline.vit.training.masked_patches.objective import batch_corruption, patch_scores
from vitline.vit.training.metrics import Metrics
from vitline.vit.training.predictions import Predictions
from vitline.vit.training.to_device.prefetcher import DevicePrefetcher
from vitline.vit.training.world import World


@dataclass(frozen=True)
class Evaluation:
    """Top-1 accuracy (fraction) and mean loss (nats per example) over `num_examples`."""

    top1: float
    loss: float
    num_examples: int
    majority_fraction: float
    """Share of the majority class: the score of always predicting it."""
    mean_average_precision: float | None = None
    """Mean over classes, where examples may have several labels; None for one label, or where it was not requested."""


@torch.inference_mode()
def evaluate(
    network: Network,
    batches: Iterable[Batch],
    num_examples: int,
    *,
    loss: str = "softmax",
    precision: str = "float32",
    world: World | None = None,
    note: Callable[[Predictions], None] | None = None,
    average_precision: bool = False,
) -> Evaluation:
    """Scores `network`, which is on the device of `world`, on a split. Each rank passes the batches of its share, in memory; the
    result is over all ranks. The network stays as it was.

    `note` is called with the predictions of each batch of this rank, without padding. `average_precision` asks for the mean
    average precision where labels are several, whose scores are kept until the end. Raises RuntimeError unless the
    ranks together saw `num_examples` examples.
    """
    world = world or World()
    ranked = AveragePrecision() if average_precision else None

    def score(batch: Batch) -> Tensor:
        logits, targets = forward(network, batch.images, precision), targets_of(batch.labels, network.num_classes)
        losses, valid = loss_named(loss)(logits, targets), batch.valid
        if ranked is not None and isinstance(batch.labels, MultiLabels):
            ranked.add(logits[: batch.num_valid], targets[: batch.num_valid])
        if note is not None:
            note(_predictions(batch, logits, losses, loss))
        sums = torch.stack([num_correct(logits, batch.labels, valid), (losses * valid).sum()])
        return torch.cat([sums.double(), (targets * valid[:, None]).sum(dim=0).double()])

    correct, total_loss, *per_class = _totals(network, batches, num_examples, world, score, network.num_classes + 2)
    mean = ranked.mean(world, network.num_classes) if ranked is not None else None
    majority = max(per_class) / num_examples
    return Evaluation(correct / num_examples, total_loss / num_examples, num_examples, majority, mean)


@torch.inference_mode()
def evaluate_patches(
    network: Network, batches: Iterable[Batch], num_examples: int, recipe: TrainRecipe, world: World
) -> Metrics:
    """`val/loss` and `val/patch_accuracy` of masked patch prediction on a split, like `evaluate`. The corruption of an image depends on its
    row only."""

    def score(batch: Batch) -> Tensor:
        corruption = batch_corruption(batch, recipe, "val")
        predictions = forward(network, batch.images, recipe.precision, corruption)
        scores, valid = patch_scores(predictions, batch, corruption, recipe), batch.valid
        return torch.stack([(scores.losses * valid).sum(), (scores.accuracy * valid).sum()])

    loss, accuracy = _totals(network, batches, num_examples, world, score, 2)
    return {"val/loss": loss / num_examples, "val/patch_accuracy": accuracy / num_examples}


def _totals(
    network: Network,
    batches: Iterable[Batch],
    num_examples: int,
    world: World,
    score: Callable[[Batch], Tensor],
    num_sums: int,
) -> list[float]:
    """The `num_sums` sums that `score` gives for a batch on the device, added over the batches of all ranks."""
    was_training = network.training
    network.eval()
    # On the device until the end, so that the host need not wait for it in every batch.
    sums = torch.zeros(num_sums + 1, dtype=torch.float64, device=world.device)
    for (batch,) in DevicePrefetcher(([each] for each in batches), world.device):
        sums += torch.cat([score(batch).double(), batch.valid.sum()[None].double()])
    network.train(was_training)
    *totals, seen = world.sum(sums).tolist()
    if seen != num_examples:
        raise RuntimeError(
            f"{seen:,.0f} examples were evaluated, but the split has {num_examples:,}. "
            "The score is not reported. Run `vitline data verify` on the corpus."
        )
    return totals


def _predictions(batch: Batch, logits: Float[Tensor, "B K"], losses: Float[Tensor, " B"], loss: str) -> Predictions:
    """The predictions for the valid examples of a batch of `eval_batches`, which come first in it."""
    n = batch.num_valid
    scores = logits[:n].float().cpu()
    probabilities = scores.sigmoid() if loss == "sigmoid" else scores.softmax(dim=-1)
    # On the device, like `num_correct`, so that both choose the same class among equal logits.
    classes = logits.argmax(dim=-1)
    predicted = classes[:n].cpu()
    if isinstance(batch.labels, MultiLabels):
        first = batch.labels.dense(logits.shape[1])[:n].argmax(dim=-1)
        labels = torch.where(hits(batch.labels, classes)[:n], classes[:n], first).cpu()
    else:
        labels = batch.labels[:n].cpu()
    return Predictions(
        row=batch.first_slot + np.arange(n),
        label=labels.numpy().astype(np.int32),
        predicted=predicted.numpy().astype(np.int32),
        probability=probabilities.gather(1, predicted[:, None])[:, 0].numpy(),
        loss=losses[:n].float().cpu().numpy(),
    )
