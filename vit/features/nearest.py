"""Nearest neighbours in frozen features: the nearest training examples vote, weighted by similarity."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

NEIGHBOURS = 20
TEMPERATURE = 0.07
# Number of queries that are compared at once with the examples of one part.
_CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Neighbours:
    """Cosine similarity and label of the k nearest examples of each query, nearest first."""

    similarity: Float[Tensor, "n k"]
    labels: Int[Tensor, "n k"]

    def vote(self, num_classes: int, temperature: float = TEMPERATURE) -> Int[Tensor, " n"]:
        """The class with the most votes."""
        return self.votes(num_classes, temperature).argmax(dim=1)

    def votes(self, num_classes: int, temperature: float = TEMPERATURE) -> Float[Tensor, "n K"]:
        """Votes for each class: the sum of exp(similarity / temperature) over the neighbours that have it, up to a factor.

        Source: the kNN evaluation of DINO (arXiv:2104.14294, Sec. 4.1; k = 20 and 0.07 in its code).
        """
        # Relative to the nearest example: the result is the same, and nothing overflows at a low temperature.
        weights = ((self.similarity - self.similarity[:, :1]) / temperature).exp()
        votes = torch.zeros(len(weights), num_classes, dtype=weights.dtype, device=weights.device)
        return votes.scatter_add_(1, self.labels, weights)


def nearest(
    queries: Float[Tensor, "n D"],
    examples: Iterable[tuple[Float[Tensor, "p D"], Int[Tensor, " p"]]],
    k: int = NEIGHBOURS,
) -> Neighbours:
    """The k nearest examples by cosine similarity, or all of them if there are fewer.

    Examples are streamed: memory holds the queries, one part of the examples and k candidates per query.
    """
    queries = F.normalize(queries, dim=1)
    similarity = queries.new_zeros(len(queries), 0)
    labels = torch.zeros(len(queries), 0, dtype=torch.int64, device=queries.device)
    for features, classes in examples:
        scaled = F.normalize(features.to(queries), dim=1)
        classes = classes.to(labels)
        nearer = [
            _merge(s, n, q @ scaled.T, classes, k)
            for q, s, n in zip(
                queries.split(_CHUNK_ROWS), similarity.split(_CHUNK_ROWS), labels.split(_CHUNK_ROWS), strict=True
            )
        ]
        similarity, labels = (torch.cat(column) for column in zip(*nearer, strict=True))
    return Neighbours(similarity, labels)


def _merge(
    similarity: Float[Tensor, "n j"],
    labels: Int[Tensor, "n j"],
    found: Float[Tensor, "n p"],
    classes: Int[Tensor, " p"],
    k: int,
) -> tuple[Float[Tensor, "n i"], Int[Tensor, "n i"]]:
    """Merges the k nearest examples so far with those of one part."""
    all_similar = torch.cat([similarity, found], dim=1)
    all_labels = torch.cat([labels, classes.expand(len(labels), -1)], dim=1)
    best = all_similar.topk(min(k, all_similar.shape[1]), dim=1)
    return best.values, all_labels.gather(1, best.indices)
