"""The progress of a running job, as `progress.json` in its folder and on the pages of observers."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from vitline.infra.html.text import clock

if TYPE_CHECKING:  # the console words progress, and must load fast
    from vitline.infra.storage import Store


class RunProgress(TypedDict, total=False):
    """How far a job is. A job writes the fields that it knows; each of these files has `step` and `total_steps`."""

    step: int
    """Finished steps, trials or units of the current stage."""
    total_steps: int
    """0 if the total is unknown."""
    unit: str
    """What the steps are; `steps` without it."""
    images_per_s: float
    bytes_per_s: float
    remaining_s: float | None
    """Seconds to the end; None if the speed is not known yet."""
    loss: float | None
    validation: str
    """The newest scores of the validation split, and their step; missing before the first."""
    spikes: str
    """How many spikes the spike guard has left out, and the newest step; missing before the first."""
    devices: str
    """The devices that train."""
    input_wait: str
    """How much of its time a training waits for data, and why; empty where it is little."""
    slow_rank: str
    """The rank that all others wait for, and how much of the time; empty where it is little."""
    refused: int
    """Examples that a preparation refused."""
    running: list[str]
    """Keys of the trials that run."""
    waiting_for: str
    """What the workers wait for before they start."""
    no_room: int
    """The attempt that waits for room which other jobs have; missing if it waits for something else."""
    waits: str
    """Why a job has reported nothing; only shown, never stored."""


ESTIMATE_AFTER_S = 10.0
"""Work of less than this says little of the speed: it holds the start of processes, compilers and caches."""


def remaining_s(done: float, left: float, elapsed_s: float) -> float | None:
    """Seconds for what is left, at the speed of what was done in this time; None before there is something to estimate from."""
    return left * elapsed_s / done if done > 0 and elapsed_s >= ESTIMATE_AFTER_S else None


class ProgressWriter:
    """Counts the finished units of a job, and writes its progress at most once a second, with the time left."""

    key: ClassVar = "progress.json"

    def __init__(
        self, run: "Store", unit: str, total: int, done: int = 0, check_lease: Callable[[], object] = lambda: None
    ) -> None:
        """`done` units were finished before, and do not count for the speed. `check_lease` is called before each write."""
        self._run, self._unit, self._total, self._check_lease = run, unit, total, check_lease
        self._done = self._done_before = done
        self._running: list[str] | None = None
        self._started = time.monotonic()
        self.write()

    def add(self, count: int) -> None:
        self._done += count
        if self._done >= self._total or time.monotonic() - self._written >= 1.0:
            self.write()

    def show(self, done: int, *, running: list[str]) -> None:
        """Writes at once that `done` units are finished, and which ones run."""
        self._done, self._running = done, running
        self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        self._check_lease()
        self._run.write_json(self.key, self.fields(self._written - self._started))

    def fields(self, elapsed_s: float) -> Mapping[str, Any]:
        """What is written, from the seconds since the first write."""
        done_now = self._done - self._done_before
        shown: RunProgress = {
            "step": self._done,
            "total_steps": self._total,
            "unit": self._unit,
            "remaining_s": remaining_s(done_now, self._total - self._done, elapsed_s),
        }
        if self._unit == "images" and done_now and elapsed_s:
            shown["images_per_s"] = done_now / elapsed_s
        if self._running is not None:
            shown["running"] = self._running
        return shown


def position(p: RunProgress | None) -> tuple[object, ...]:
    """How far a job is. A line that shows the same again is not worth a place in a log."""
    return () if p is None else (p.get("step"), p.get("unit"), p.get("waiting_for"), p.get("waits"))


def progress_line(title: str, p: RunProgress | None, elapsed_s: float) -> str:
    """`pretrain 120/600 steps, 640 images/s, loss 2.31, 1:10 left`"""
    if p is None:
        return f"{title}: waiting for the job to start ({clock(elapsed_s)})"
    if p.get("waiting_for"):
        others = f"; {p['waits']}" if p.get("waits") else ""
        return f"{title}: waiting for {p['waiting_for']} ({clock(elapsed_s)}){others}"
    if "waits" in p:
        return f"{title}: no progress yet after {clock(elapsed_s)}; {p['waits']}"
    of = f"/{p['total_steps']:,}" if p["total_steps"] else ""
    parts = [f"{title}: {p['step']:,}{of} {p.get('unit', 'steps')}"]
    if p.get("images_per_s"):
        parts.append(f"{p['images_per_s']:,.0f} images/s")
    if p.get("bytes_per_s"):
        parts.append(f"{p['bytes_per_s'] / 1e6:,.1f} MB/s")
    if (loss := p.get("loss")) is not None:
        parts.append(f"loss {loss:.3f}")
    devices = f"on {p['devices']}" if p.get("devices") else None
    parts += filter(None, (p.get("validation"), p.get("spikes"), devices, p.get("input_wait"), p.get("slow_rank")))
    if p.get("refused"):
        parts.append(f"{p['refused']:,} refused")
    if (remaining_s := p.get("remaining_s")) is not None:
        parts.append(f"{clock(remaining_s)} left")
    return ", ".join(parts)
