"""Progress of a preparation, written to the store for observers."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import NotRequired, Protocol, TypedDict

from vitline.data_prep.records import WORK
from vitline.infra.runs.progress import ESTIMATE_AFTER_S, RunProgress
from vitline.infra.runs.watchdog import note_progress
from vitline.infra.storage import Store

PROGRESS_KEY = f"{WORK}/progress.json"
STAGES = ("list", "examine", "plan", "leakage", "write", "publish")
_OF_EXAMINING: Mapping[str, float] = {"plan": 0.05, "leakage": 0.05, "write": 0.25, "publish": 0.05}
"""Seconds of each stage per second of examining; measured with photographs of 10 and of 93 KB, tests/benchmarks/README.md."""
_WRITE_EVERY_S = 1.0


class StageProgress(TypedDict):
    """`_work/progress.json` of a corpus: the progress of its current stage."""

    stage: str
    done: int
    """Finished units."""
    total: int
    """0 while a source is being listed."""
    unit: str
    rate: float
    """Units per second of this attempt; 0 before there is something to estimate from."""
    images: int
    images_per_s: float
    bytes_per_s: float
    refused: int
    started_at: float
    """Unix seconds."""
    examine_s: NotRequired[float | None]


class Progress:
    """One stage of one corpus: counts finished units and writes progress.json at most once per second."""

    def __init__(
        self,
        corpus: Store,
        stage: str,
        total: int,
        unit: str,
        done: int = 0,
        refused: int = 0,
        examine_s: float | None = None,
    ) -> None:
        """`examine_s`: seconds of the examine stage, from which the time of later stages is estimated."""
        assert stage in STAGES, stage
        self._examine_s = examine_s
        self._corpus, self._stage, self._total, self._unit = corpus, stage, total, unit
        self._already, self._done, self.refused = done, done, refused
        self._images = self._bytes = 0
        self._started_at, self._start, self._written = time.time(), time.monotonic(), -_WRITE_EVERY_S
        self.write()

    def add(self, done: int, refused: int = 0, *, images: int = 0, num_bytes: int = 0) -> None:
        """Count finished units, their images and their bytes; `refused` images were refused."""
        self._done += done
        self.refused += refused
        self._images += images
        self._bytes += num_bytes
        note_progress()
        if self._done >= self._total or time.monotonic() - self._written >= _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        seconds = self._written - self._start

        def rate(count: int) -> float:
            return count / seconds if seconds > 0 else 0.0

        fields: StageProgress = {
            "stage": self._stage,
            "done": self._done,
            "total": self._total,
            "unit": self._unit,
            # Units that an earlier attempt finished do not count for the speed of this one.
            "rate": rate(self._done - self._already) if seconds >= ESTIMATE_AFTER_S else 0.0,
            "images": self._images,
            "images_per_s": rate(self._images),
            "bytes_per_s": rate(self._bytes),
            "refused": self.refused,
            "started_at": self._started_at,
            "examine_s": self._examine_s,
        }
        self._corpus.write_json(PROGRESS_KEY, fields)


class Show(Protocol):
    """Receives the progress of a stage that learns its amount of work while it runs."""

    def begin(self, corpus: str, total: int, unit: str) -> None:
        """Announce the amount of work for a corpus, given by its URI."""

    def add(self, corpus: str, done: int) -> None: ...


def remaining_s(stage: str, parts: Sequence[StageProgress]) -> float | None:
    """Seconds to the end of a preparation, from the progress files of the corpora in this stage; None while its speed is
    unknown. The rest of this stage is estimated from its own speed, later stages from the time of examining."""
    done, total = sum(part["done"] for part in parts), sum(part["total"] for part in parts)
    rate = sum(part["rate"] for part in parts)
    own_s = (total - done) / rate if rate else None
    if stage == "examine":
        examine_s = total / rate if rate else None
    else:
        examine_s = max((part.get("examine_s") or 0.0 for part in parts), default=0.0) or None
    if examine_s is None:
        return own_s if stage in ("write", "publish") else None
    if own_s is None:
        since = time.time() - min(part["started_at"] for part in parts)
        own_s = max(_OF_EXAMINING[stage] * examine_s - since, 0.0)
    return own_s + examine_s * sum(_OF_EXAMINING[later] for later in STAGES[STAGES.index(stage) + 1 :])


def preparation_progress(corpora: Sequence[Store]) -> RunProgress | None:
    """Merge the progress files of the corpora: progress in the current stage, and the time to the end of all stages."""
    parts = list[StageProgress]()
    for corpus in corpora:
        with contextlib.suppress(FileNotFoundError):
            parts.append(corpus.read_json(PROGRESS_KEY))
    if not parts:
        return None
    # A corpus that has finished a stage waits for the others. While a source is being listed, its size is unknown.
    at_work = [p for p in parts if p["done"] < p["total"] or not p["total"]] or parts
    stage = min((p["stage"] for p in at_work), key=STAGES.index)
    now = [p for p in parts if p["stage"] == stage]
    return {
        "step": sum(p["done"] for p in now),
        "total_steps": sum(p["total"] for p in now),
        "unit": f"{now[0]['unit']} ({stage})",
        "images_per_s": sum(p["images_per_s"] for p in now),
        "bytes_per_s": sum(p["bytes_per_s"] for p in now),
        "refused": sum(p["refused"] for p in parts),
        "remaining_s": remaining_s(stage, now),
    }
