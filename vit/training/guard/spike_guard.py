"""The spike guard: which updates a training leaves out because of a spike of its loss or gradient norm.

A spike is a loss or gradient norm far above the median of its latest values, measured by their spread. The guard decides between
clipping and the optimizer's step, from numbers that are equal on every rank, so a spike moves neither weights nor moments. All it
knows is in the manifest of every checkpoint: a resumed training decides as the uninterrupted one.

Sources: skipping by a rolling window is that of OLMo 2 (arXiv:2501.00656, `SkipStepOptimizer`), here with median and MAD, so that one
outlier does not hide the next; going back and leaving out the batches around a spike is that of PaLM (arXiv:2204.02311, Sec. 5.1).
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, TypedDict

from vitline.vit.config import SpikeGuardConfig

GAUSSIAN = 1.4826
"""The median absolute deviation of a normal distribution times this is its standard deviation."""
LEAST_SPREAD = 0.02
"""Least spread as a fraction of the median: values that hardly vary would make every change a spike."""


class Spike(TypedDict):
    """A step that was found to be a spike, and the steps whose updates are left out for it."""

    step: int
    first: int
    last: int
    loss: float
    loss_limit: float
    grad_norm: float
    grad_norm_limit: float


class GuardRecord(TypedDict):
    """A guard in the manifest of a checkpoint."""

    losses: list[float]
    grad_norms: list[float]
    spikes: list[Spike]


class SpikeGuard:
    """The latest losses and gradient norms of applied updates, and the spikes so far; the same on every rank."""

    def __init__(self, config: SpikeGuardConfig) -> None:
        self.config = config
        self.losses, self.grad_norms = (deque[float](maxlen=config.window_steps) for _ in range(2))
        self.spikes: list[Spike] = []

    @property
    def is_on(self) -> bool:
        return self.config.action != "off"

    def judge(self, step: int, loss: float, grad_norm: float) -> Spike | None:
        """The spike that a step is, which is then known; else None, and its values join the window.

        `loss` is the mean over the valid examples of all ranks (NaN without any), `grad_norm` a finite number, before clipping.
        """
        limits = self.limits()
        if loss > limits[0] or grad_norm > limits[1]:
            around = self.config.steps_back
            spike = Spike(
                step=step,
                first=max(1, step - around),
                last=step + around,
                loss=loss,
                loss_limit=limits[0],
                grad_norm=grad_norm,
                grad_norm_limit=limits[1],
            )
            self.spikes.append(spike)
            return spike
        if not math.isnan(loss):
            self.losses.append(loss)
            self.grad_norms.append(grad_norm)
        return None

    def limits(self) -> tuple[float, float]:
        """Largest loss and gradient norm that are no spike; infinite while the window is less than half full."""
        if 2 * len(self.losses) < self.config.window_steps:
            return math.inf, math.inf
        return _limit(self.losses, self.config.threshold), _limit(self.grad_norms, self.config.threshold)

    def skips(self, step: int) -> bool:
        """Whether the update of a step is left out because of a spike that is known already."""
        return any(spike["first"] <= step <= spike["last"] for spike in self.spikes)

    def lr_factor(self, step: int) -> float:
        """Factor of the learning rate of a step: `lr_factor` in the `lr_steps` steps after a spike's updates, else 1."""
        lowered = any(spike["last"] < step <= spike["last"] + self.config.lr_steps for spike in self.spikes)
        return self.config.lr_factor if lowered else 1.0

    def too_many(self, step: int) -> bool:
        return len(self._recent(step)) > self.config.max_spikes

    def reason(self, step: int) -> str:
        """Why too many spikes end the run, where they were, and what to change."""
        recent, config = self._recent(step), self.config
        last, steps = recent[-1], ", ".join(f"{spike['step']:,}" for spike in recent[-20:])
        return (
            f"{len(recent)} spikes of the loss or gradient norm in {config.max_spikes_steps:,} steps, at the steps "
            f"{steps}, but recipe.spike_guard.max_spikes={config.max_spikes} are allowed. "
            f"The last had loss {last['loss']:.4g} (limit {last['loss_limit']:.4g}) and gradient norm {last['grad_norm']:.4g} (limit "
            f"{last['grad_norm_limit']:.4g}). If the loss rises for good, start a new run with a lower recipe.optim.peak_lr or a longer "
            "recipe.optim.warmup_steps; if it does not, with a higher recipe.spike_guard.threshold. The pictures of each spike are in "
            "the folder spikes of the run."
        )

    def record(self) -> GuardRecord:
        return {"losses": list(self.losses), "grad_norms": list(self.grad_norms), "spikes": list(self.spikes)}

    def load(self, record: Mapping[str, Any] | None) -> None:
        """The inverse of `record`. None, of a checkpoint without a guard, is an empty window, and so is any for a guard that is off."""
        found = record if record and self.is_on else GuardRecord(losses=[], grad_norms=[], spikes=[])
        for window, values in ((self.losses, found["losses"]), (self.grad_norms, found["grad_norms"])):
            window.clear()
            window.extend(values)
        self.spikes = list(found["spikes"])

    def _recent(self, step: int) -> list[Spike]:
        return [spike for spike in self.spikes if spike["step"] > step - self.config.max_spikes_steps]


def _limit(values: deque[float], threshold: float) -> float:
    middle = median(values)
    spread = GAUSSIAN * median(abs(value - middle) for value in values)
    return middle + threshold * max(spread, LEAST_SPREAD * abs(middle))
