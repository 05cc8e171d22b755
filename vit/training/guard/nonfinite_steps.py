"""Updates that the optimizer has left out because their gradient was not finite."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class NonfiniteSteps:
    """Counts non-finite steps in a row. The gradient norms stay on the device, which found out by itself what to apply, until `read`."""

    def __init__(self) -> None:
        self._unread: list[tuple[int, Tensor]] = []
        self._in_a_row = 0

    def add(self, step: int, grad_norm: Tensor) -> None:
        """Does not wait for the device. `grad_norm` is 0-d and equal on every rank."""
        self._unread.append((step, grad_norm))

    def read(self, report: Callable[[int, Mapping[str, float]], None]) -> int:
        """Waits for the device and reports each non-finite step as the how many-th in a row. Returns the most in a row that it found."""
        steps, self._unread, most = self._unread, [], 0
        norms = torch.stack([norm for _, norm in steps]).tolist() if steps else []
        for (step, _), norm in zip(steps, norms, strict=True):
            self._in_a_row = 0 if math.isfinite(norm) else self._in_a_row + 1
            most = max(most, self._in_a_row)
            if self._in_a_row:
                report(step, {"guard/nonfinite_steps": self._in_a_row})
        return most
