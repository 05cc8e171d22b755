"""Labels of images that may have any number each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitline.vit.input.decoded_cache import Label

Arrays = tuple[np.ndarray, np.ndarray]
"""Ids and weights of `MultiLabels`, as they are sent to another process."""


@dataclass(frozen=True)
class MultiLabels:
    """Labels of n images that may have any number each, as class ids with weights, in m columns. Padding has weight 0. Rows of all
    classes are made of them where they are needed, on the device."""

    ids: Tensor
    """int64 (n, m)."""
    weights: Tensor
    """float32 (n, m)."""

    @classmethod
    def of(
        cls, labels: Sequence[Label], num_rows: int, rows: Sequence[int] | np.ndarray | None = None
    ) -> "MultiLabels":
        """The labels of these rows, by default the first; all others are padding. A class without a weight has weight 1."""
        several = [([label], None) if isinstance(label, int) else label for label in labels]
        sizes = np.array([len(ids) for ids, _ in several], dtype=np.int64)
        row = np.repeat(np.arange(len(several)) if rows is None else rows, sizes)
        column = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        ids = np.zeros((num_rows, sizes.max(initial=0)), dtype=np.int64)
        weights = np.zeros(ids.shape, dtype=np.float32)
        ids[row, column] = [i for of_image, _ in several for i in of_image]
        weights[row, column] = [w for of_image, given in several for w in given or [1.0] * len(of_image)]
        return cls(torch.from_numpy(ids), torch.from_numpy(weights))

    @classmethod
    def joined(cls, parts: Sequence[Arrays]) -> "MultiLabels":
        """Labels of the same n images in parts, of which each has labels of rows that are padding in the others."""
        columns = max(ids.shape[1] for ids, _ in parts)
        ids = np.zeros((len(parts[0][0]), columns), dtype=np.int64)
        weights = np.zeros(ids.shape, dtype=np.float32)
        for ids_of_part, weights_of_part in parts:
            ids[:, : ids_of_part.shape[1]] += ids_of_part
            weights[:, : ids_of_part.shape[1]] += weights_of_part
        return cls(torch.from_numpy(ids), torch.from_numpy(weights))

    def arrays(self) -> Arrays:
        return self.ids.numpy(), self.weights.numpy()

    def dense(self, num_classes: int) -> Tensor:
        """float32 (n, num_classes): the weight of each class. Of a class that an image has twice, which a class map may cause, the
        larger."""
        rows = torch.zeros(len(self.ids), num_classes, device=self.ids.device)
        return rows.scatter_reduce_(1, self.ids, self.weights, "amax")


Labels = Tensor | MultiLabels
"""int64 (n,) class ids where every image has one label."""
