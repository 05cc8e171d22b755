"""Metrics of a training run: rank 0's journal and `progress.json`, and the load of each machine."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vitline.infra.runs.handle import Run
from vitline.infra.runs.journal import Journal
from vitline.infra.runs.lease import LeaseLost
from vitline.infra.runs.progress import RunProgress, remaining_s
from vitline.infra.system_metrics import SystemSampler
from vitline.vit.training.metrics import Metrics
from vitline.vit.training.timing.input_waits import wait_reason
from vitline.vit.training.timing.slow_ranks import slow_rank_text
from vitline.vit.training.world import World

log = logging.getLogger(__name__)
PROGRESS_EVERY_S = 1.0
STEPS_EVERY_S = 5.0


class Reporter:
    """Writes metrics to the journal, and a small `progress.json` for readers of the store. Does nothing unless `active`.

    A thread writes `progress.json`, always the latest one: a store that is unavailable for a while must not delay a step,
    and a failed write must not end the training.
    """

    def __init__(self, held: Run, total_steps: int, active: bool, devices: str = "", from_step: int = 0):
        """`from_step`: the step that the training resumes from, unless it may go back."""
        self.held, self.total_steps, self.devices = held, total_steps, devices
        self.journal = held.journal(from_step=from_step) if active else None
        self.started, self.shown, self.reached_at = time.monotonic(), 0.0, -STEPS_EVERY_S
        self.first_step: int | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self.latest: RunProgress | None = None
        self.written: RunProgress | None = None
        self.writing: Future[None] | None = None
        self.lost = False
        self.noted = ""
        self.validation = self.spikes = self.slow_rank = ""
        self.last_spike: int | None = None
        self.newest = -1

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.shutdown()
        self._write_progress()
        if self.journal is not None:
            self.journal.close()

    def record(self, step: int, metrics: Metrics) -> None:
        if self.journal is None:
            return
        self.journal.record(metrics, step)
        # The first batch takes longer, because it opens all shards.
        waits = "" if self.first_step is None else wait_reason(metrics)
        if (fraction := metrics.get("time/slowest_rank_wait_fraction")) is not None:
            self.slow_rank = slow_rank_text(metrics["time/slowest_rank"], fraction)
        self._note_waits(step, waits)
        if "val/loss" in metrics:
            self.validation = validation_text(step, metrics)
            log.info("%s", self.validation)
        if count := int(metrics.get("guard/spikes", 0)):
            self.last_spike = step if "guard/loss" in metrics else self.last_spike
            self.spikes = spikes_text(count, self.last_spike)
        now = time.monotonic()
        # After a rewind the rate counts from the step that the training has gone back to.
        if self.first_step is None or step < self.newest:
            self.first_step, self.started = step, now
        self.newest = step
        if "train/loss" in metrics and (now - self.shown > PROGRESS_EVERY_S or step == self.total_steps):
            self.shown = now
            done, loss = step - self.first_step, metrics["train/loss"]
            self.latest = {
                "step": step,
                "total_steps": self.total_steps,
                "loss": loss if math.isfinite(loss) else None,  # JSON has no NaN; the journal keeps it
                "images_per_s": metrics["throughput/images_per_s"],
                "validation": self.validation,
                "spikes": self.spikes,
                "devices": self.devices,
                "input_wait": waits,
                "slow_rank": self.slow_rank,
                "remaining_s": remaining_s(done, self.total_steps - step, now - self.started),
            }
            self._show()

    def reached(self, step: int) -> None:
        """Shows a finished step between two that are recorded, which may be minutes apart."""
        now = time.monotonic()
        if self.journal is None or step <= self.newest or now - self.reached_at < STEPS_EVERY_S:
            return
        self.reached_at = now
        known = self.latest or RunProgress(total_steps=self.total_steps, devices=self.devices)
        self.latest = {**known, "step": step}
        self._show()

    def _show(self) -> None:
        if self.writing is None or self.writing.done():
            self.writing = self.thread.submit(self._write_progress)

    def _note_waits(self, step: int, reason: str) -> None:
        """Logs for what the training waits, once for each reason."""
        what = reason.partition(": ")[2]
        if what and what != self.noted:
            self.noted = what
            log.warning("step=%d: training %s; `vitline data bench` says what to change", step, reason)

    def _write_progress(self) -> None:
        progress = self.latest
        if progress is None or progress is self.written:
            return
        try:
            self.held.show(progress)
            self.written = progress
        except LeaseLost:
            if not self.lost:
                log.warning("progress.json is not written any more, because another attempt holds the lease")
            self.lost = True
        except (OSError, RuntimeError):
            log.warning("progress.json could not be written; training continues and tries again", exc_info=True)

    def seal(self) -> None:
        if self.journal is not None:
            self.journal.seal()


def validation_text(step: int, metrics: Metrics) -> str:
    """`val loss 2.31, top-1 41.2 % at step 1,000`; of several labels the mean average precision instead of top-1, and of masked
    patches the share that is right."""
    names = {"val/mean_average_precision": "mAP", "val/patch_accuracy": "patches", "val/top1": "top-1"}
    found = next(name for name in names if name in metrics)
    return f"val loss {metrics['val/loss']:.3f}, {names[found]} {100 * metrics[found]:.1f} % at step {step:,}"


def spikes_text(count: int, last: int | None) -> str:
    """`2 spikes left out, the last at step 1,234`; without the step where these workers have not seen it."""
    return f"{count:,} spike{'s' * (count > 1)} left out" + (f", the last at step {last:,}" if last else "")


@contextlib.contextmanager
def system_metrics(held: Run, world: World, journal: Journal | None, step: Callable[[], int]) -> Iterator[None]:
    """Samples the load of this machine while the context is open, from one process per machine. Every rank must enter it.

    Rank 0's machine writes into `journal`; every other machine opens a journal of its own.
    """
    machines = max(world.gather(world.node_rank)) + 1
    if world.local_rank:
        yield
        return
    with contextlib.ExitStack() as stack:
        if journal is None:
            journal = held.journal(f"node-{world.node_rank}", from_step=step(), writers=machines)
            stack.callback(close_quietly, journal)
        stack.enter_context(
            SystemSampler(journal.record, world.node_rank, step, lambda: gpu_memory_used_bytes(world.device))
        )
        yield


def close_quietly(journal: Journal) -> None:
    """Closes a journal of system metrics. An error is only logged: it must not fail a finished training."""
    try:
        journal.close()
    except LeaseLost as lost:
        log.warning("the last system metrics of this machine are not written: %s", lost)
    except Exception:
        log.warning("the last system metrics of this machine could not be written", exc_info=True)


def gpu_memory_used_bytes(device: torch.device) -> int | None:
    """Memory that all processes use on this GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free
