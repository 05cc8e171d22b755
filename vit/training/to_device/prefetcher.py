"""Micro-batches on the device of a training: on a GPU through pinned memory, on a stream of copies beside the computation.

The host queues the work of the next steps while the device computes, at most two steps ahead of it. On a CPU the
batches pass through untouched. CI has no GPU: `tests/vit/training/to_device` follows the calls.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from vitline.vit.input.batches import Batch, MultiLabels

MOST_QUEUED = 2


class DevicePrefetcher(Iterator[Sequence[Batch]]):
    """The micro-batches of each step, on the device.

    `is_ready()` is true where `batches` has the next step and gives it without a wait.
    """

    def __init__(
        self, batches: Iterator[Sequence[Batch]], device: torch.device, is_ready: Callable[[], bool] = lambda: False
    ) -> None:
        self._batches, self._device, self._is_ready = batches, device, is_ready
        self._copies = None if device.type == "cpu" else torch.cuda.Stream(device)
        self._ahead: Sequence[Batch] | None = None
        self._unfinished: deque[torch.cuda.Event] = deque()
        self.waited_s = 0.0
        """Seconds that the device has waited for the steps so far: those of the host but for the time in which it still had work."""

    def __next__(self) -> Sequence[Batch]:
        start = time.perf_counter()
        if self._copies is None:
            step = next(self._batches)
            self.waited_s += time.perf_counter() - start
            return step
        step, self._ahead = self._ahead or self._copied(self._copies), None
        computing = torch.cuda.current_stream(self._device)
        self.waited_s += min(time.perf_counter() - start, self._idle_s(computing))
        # The device waits, not the host, and for this step only: the copies of later ones have not been queued.
        computing.wait_stream(self._copies)
        for batch in step:
            _mapped(batch, lambda tensor: _used_by(tensor, computing))
        return step

    def copy_ahead(self) -> None:
        """Queues the copy of the next step, if it is ready. To be called when the work of a step is queued and before the host
        waits for its result: then the copy takes place while the device computes.
        """
        if self._copies is not None and self._ahead is None and self._is_ready():
            self._ahead = self._copied(self._copies)

    def limit_queue(self) -> None:
        """To be called when a step is queued whole. Queues the copy of the next one, if that has not been done, and waits until the device
        has at most `MOST_QUEUED` unfinished steps: enough that it never idles, and few enough that their batches fit beside each other."""
        if self._copies is None:
            return
        self.copy_ahead()
        done = torch.cuda.Event(enable_timing=True, blocking=True)
        done.record(torch.cuda.current_stream(self._device))
        self._unfinished.append(done)
        if len(self._unfinished) > MOST_QUEUED:
            self._unfinished.popleft().synchronize()

    def _idle_s(self, computing: "torch.cuda.Stream") -> float:
        """Seconds for which the device has had nothing to do. Waits for it only where it is idle."""
        if not self._unfinished or not self._unfinished[-1].query():
            return 0.0
        now = torch.cuda.Event(enable_timing=True)
        now.record(computing)
        now.synchronize()
        return float(self._unfinished[-1].elapsed_time(now)) / 1_000

    def _copied(self, copies: "torch.cuda.Stream") -> Sequence[Batch]:
        step = next(self._batches)
        with torch.cuda.stream(copies):
            # Pinned here, and not where pixels are decoded: it costs one copy in memory, and any process may decode. The memory is
            # used again only after the copy to the device, which torch's allocator of pinned memory sees to.
            return [
                _mapped(batch, lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True)) for batch in step
            ]


def _mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with each of its tensors changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, MultiLabels):
            return MultiLabels(change(value.ids), change(value.weights))
        return change(value) if isinstance(value, Tensor) else value

    return replace(batch, **{each.name: changed(getattr(batch, each.name)) for each in fields(batch)})


def _used_by(tensor: Tensor, stream: "torch.cuda.Stream") -> Tensor:
    """Keeps the memory of a tensor of another stream until this one has done what is queued until its release."""
    tensor.record_stream(stream)
    return tensor
