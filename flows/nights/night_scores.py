"""The scores of one night, as the statistics take them: by task and seed, with the predictions where there are any."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from jaxtyping import Bool, Float


@dataclass(frozen=True)
class TaskScore:
    """The accuracy of one model on the test split of one task."""

    value: float
    """Fraction of the test images, 0 to 1."""
    num_examples: int
    majority_fraction: float
    """Share of the majority class: what always predicting it scores."""
    split_digest: str
    """Identifies the test images and their order."""
    right: Bool[np.ndarray, " n"] | None = None
    """Per test image, in the order of the split, whether the model is right; None for probes."""
    wall_s: float = 0.0
    """Of all trainings for this score."""


@dataclass(frozen=True)
class NightScores:
    """One pipeline of a night, with a model for each of k seeds."""

    key: str
    """Key of the pipeline."""
    night: datetime | None
    models: tuple[str, ...]
    """Digests of the k models, in the order of the seeds."""
    tasks: Mapping[str, tuple[TaskScore, ...]]
    """By name of the metric, such as `tasks/digits/top1`: the scores of the k models."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the scores may depend on, by dotted name: request, corpora, code, versions, hardware."""

    def values(self, names: Sequence[str]) -> Float[np.ndarray, "k t"]:
        """The accuracies by seed and task."""
        return np.array([[score.value for score in self.tasks[name]] for name in names]).T

    def weighted(self, weights: Mapping[str, float]) -> Float[np.ndarray, " k"]:
        """The sum of the accuracies with these weights, by seed."""
        sums: Float[np.ndarray, " k"] = self.values([*weights]) @ np.array([*weights.values()])
        return sums
