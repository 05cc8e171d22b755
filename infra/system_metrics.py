"""Samples CPU, memory, disk, network and GPU memory of a machine during training."""

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

import psutil

log = logging.getLogger(__name__)

EVERY_S = 10.0


class SystemSampler:
    """Context manager: a thread passes a sample to `record` every `every_s`, as `system/node<k>/...` at the current step.

    A shorter run gets one sample at its end. `gpu_memory_bytes` returns None if there is no GPU. An error is logged once
    and does not affect the training.
    """

    def __init__(
        self,
        record: Callable[[Mapping[str, float], int], None],
        node: int,
        step: Callable[[], int],
        gpu_memory_bytes: Callable[[], int | None] = lambda: None,
        every_s: float = EVERY_S,
    ) -> None:
        self._record, self._prefix, self._step = record, f"system/node{node}", step
        self._gpu_memory_bytes, self._every_s = gpu_memory_bytes, every_s
        self._process, self._folder = psutil.Process(), tempfile.gettempdir()
        self._stop, self._sampled = threading.Event(), False
        self._received_bytes, self._received_at = received_bytes(), time.monotonic()
        self._thread = threading.Thread(target=self._sample_on, name="system-metrics", daemon=True)

    def __enter__(self) -> Self:
        psutil.cpu_percent()  # the first call only sets the start of the measured interval
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if not self._sampled:
            self._take()

    def sample(self) -> dict[str, float]:
        """Fractions of the whole machine, bytes, and bytes per second since the previous sample."""
        memory, gpu = psutil.virtual_memory(), self._gpu_memory_bytes()
        now, received = time.monotonic(), received_bytes()
        rate = (received - self._received_bytes) / max(now - self._received_at, 1e-3)
        self._received_bytes, self._received_at = received, now
        values = {
            "cpu_fraction": psutil.cpu_percent() / 100,
            "memory_used_bytes": memory.total - memory.available,
            "process_memory_bytes": self._process.memory_info().rss,
            "disk_used_fraction": psutil.disk_usage(self._folder).percent / 100,
            "network_receive_bytes_per_s": max(rate, 0.0),  # negative if an interface was removed with its counters
        } | ({} if gpu is None else {"gpu_memory_used_bytes": gpu})
        return {f"{self._prefix}/{name}": float(value) for name, value in values.items()}

    def _sample_on(self) -> None:
        while not self._stop.wait(self._every_s):
            self._take()

    def _take(self) -> None:
        try:
            self._record(self.sample(), self._step())
        except Exception:
            if not self._sampled:
                log.warning("the system metrics of this machine cannot be sampled", exc_info=True)
        self._sampled = True


def received_bytes() -> int:
    """Bytes received by all interfaces except the loopback, since they are up."""
    return sum(c.bytes_recv for name, c in psutil.net_io_counters(pernic=True).items() if name != "lo")
