"""Linear maps from frozen features to classes: least squares in closed form, and multinomial logistic regression."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitline.infra.runs.watchdog import note_progress
from vitline.vit.training.optim import uncompiled

# From the few-shot evaluation of the authors' later code (big_vision, evaluators/fewshot_lsr.py); not in the paper.
RIDGE = 2.0**10
BIAS_FEATURE = 100.0
STD_FLOOR = 1e-5

# Regularisation strengths of the linear probe, relative to the mean loss. From strong to weak, so that each fit starts at
# the solution of a smoother problem.
STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MAX_ITERATIONS = 500
# A fit has converged if no entry of its gradient is larger than this.
GRADIENT_TOLERANCE = 1e-7
_CHUNK_ROWS = 8192


@dataclass(frozen=True)
class Scaling:
    """Subtracts the mean and divides by the standard deviation plus 1e-5, so a constant feature becomes 0."""

    mean: Float[Tensor, " D"]
    scale: Float[Tensor, " D"]

    @classmethod
    def of(cls, features: Float[Tensor, "N D"]) -> "Scaling":
        """From the mean and (biased) standard deviation of each feature, in float64, chunk by chunk."""
        count = len(features)
        mean = sum((chunk.double().sum(dim=0) for chunk in features.split(_CHUNK_ROWS)), torch.tensor(0.0)) / count
        spread = (((chunk.double() - mean) ** 2).sum(dim=0) for chunk in features.split(_CHUNK_ROWS))
        variance = sum(spread, torch.tensor(0.0)) / count
        return cls(mean, variance.sqrt() + STD_FLOOR)

    def __call__(self, features: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        return (features.double() - self.mean) / self.scale


@dataclass(frozen=True)
class LinearReadout:
    """Features -> classes[argmax(scaled features @ weight + bias)]."""

    scaling: Scaling
    weight: Float[Tensor, "D K"]
    bias: Float[Tensor, " K"]
    classes: Int[Tensor, " K"]

    def scores(self, features: Float[Tensor, "n D"]) -> Float[Tensor, "n K"]:
        return self.scaling(features) @ self.weight + self.bias

    def predict(self, features: Float[Tensor, "n D"]) -> Int[Tensor, " n"]:
        return self.classes[self.scores(features).argmax(dim=1)]


def draw_shots(labels: Int[Tensor, " n"], num_classes: int, shots: int, seed: int) -> Int[Tensor, " k"]:
    """The rows of `shots` examples of each class, drawn by the seed; all examples of a class that has fewer.

    One generator permutes the examples class by class, as the authors' code does, and the first of each class are taken.
    So more shots only add examples. The drawn examples differ from the authors', because rows are in another order here.
    """
    generator, rows = np.random.default_rng(seed), labels.cpu().numpy()
    drawn = [generator.permutation(np.flatnonzero(rows == c))[:shots] for c in range(num_classes)]
    return torch.from_numpy(np.concatenate(drawn))


def least_squares(
    features: Float[Tensor, "N D"], labels: Int[Tensor, " N"], num_classes: int, ridge: float = RIDGE
) -> LinearReadout:
    """Regularised least squares to targets +-1, in float64 and closed form (arXiv:2010.11929, Sec. 4.1).

    The scaling, the constant feature of 100 (which makes the bias nearly unregularised) and the strength are those of the
    authors' later code. min over W of |X W - Y|^2 + ridge |W|^2 is solved in the smaller of (D + 1) and N unknowns.
    """
    scaling = Scaling.of(features)
    x = F.pad(scaling(features), (0, 1), value=BIAS_FEATURE)
    y = 2.0 * F.one_hot(labels, num_classes).double() - 1.0
    fewer_features = x.shape[1] <= x.shape[0]
    solution = _solve(x.T @ x, ridge, x.T @ y) if fewer_features else x.T @ _solve(x @ x.T, ridge, y)
    classes = torch.arange(num_classes, device=features.device)
    return LinearReadout(scaling, solution[:-1], BIAS_FEATURE * solution[-1], classes)


def _solve(gram: Float[Tensor, "M M"], ridge: float, right: Float[Tensor, "M K"]) -> Float[Tensor, "M K"]:
    factor = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return torch.cholesky_solve(right, factor)


@dataclass(frozen=True)
class Fit:
    """A logistic regression, and whether its minimisation converged."""

    strength: float
    readout: LinearReadout
    iterations: int
    converged: bool


def logistic_fits(
    features: Float[Tensor, "N D"], labels: Int[Tensor, " N"], strengths: Sequence[float] = STRENGTHS
) -> Iterator[Fit]:
    """Multinomial logistic regressions, one per strength, each starting from the previous solution.

    Minimises mean cross-entropy + strength / 2 * |W|^2 over the weights and an unregularised bias, on scaled features, by
    full-batch L-BFGS in float64. scikit-learn's C is 1 / (strength * N). Classes without examples are never predicted:
    the objective has no minimum in their bias. Features are converted from float32 to float64 chunk by chunk.
    """
    classes, targets = labels.unique(return_inverse=True)
    scaling = Scaling.of(features)
    shape = (features.shape[1] + 1, len(classes))
    weights = torch.zeros(shape, dtype=torch.float64, device=features.device, requires_grad=True)
    for strength in strengths:
        iterations, converged = _minimise(weights, _objective(scaling, features, targets, strength))
        solution = weights.detach().clone()
        yield Fit(strength, LinearReadout(scaling, solution[:-1], solution[-1], classes), iterations, converged)


def _objective(
    scaling: Scaling, features: Float[Tensor, "N D"], targets: Int[Tensor, " N"], strength: float
) -> Callable[[Tensor], Tensor]:
    """A function: weights (D + 1, K), whose last row is the bias -> the objective. It adds the gradient to the weights'."""
    chunks = list(zip(features.split(_CHUNK_ROWS), targets.split(_CHUNK_ROWS), strict=True))
    # A small problem is converted and scaled once, a large one in every evaluation, so that it needs no second copy.
    ready = [(scaling(chunks[0][0]), chunks[0][1])] if len(chunks) == 1 else None

    def evaluate(weights: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=weights.device)
        for x, y in ready or ((scaling(x), y) for x, y in chunks):
            loss = F.cross_entropy(x @ weights[:-1] + weights[-1], y, reduction="sum") / len(targets)
            loss.backward()
            note_progress()
            total += loss.detach()
        penalty = strength / 2 * weights[:-1].square().sum()
        penalty.backward()
        return total + penalty.detach()

    return evaluate


def _minimise(weights: Tensor, objective: Callable[[Tensor], Tensor]) -> tuple[int, bool]:
    """L-BFGS with strong Wolfe line search, from the current weights. Returns (iterations, converged)."""
    optimizer = uncompiled(torch.optim.LBFGS)(
        [weights],
        max_iter=MAX_ITERATIONS,
        max_eval=2 * MAX_ITERATIONS,
        tolerance_grad=GRADIENT_TOLERANCE,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimizer.zero_grad()
        return float(objective(weights))

    optimizer.step(closure)
    closure()
    assert weights.grad is not None
    return optimizer.state[weights]["n_iter"], bool(weights.grad.abs().max() <= GRADIENT_TOLERANCE)
