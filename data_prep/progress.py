"""Progress of a preparation, left in the store for whoever follows it."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from data_prep.records import WORK
from infra.storage import Store

PROGRESS_KEY = f"{WORK}/progress.json"
STAGES = ("list", "examine", "plan", "leakage", "write", "publish")
_OF_EXAMINING: Mapping[str, float] = {"plan": 0.05, "leakage": 0.05, "write": 0.25, "publish": 0.05}
"""What stages take for each second of examining; measured with photographs of 10 and of 93 KB, tests/benchmarks/README.md."""
_WRITE_EVERY_S = 1.0


class Progress:
    """One stage of one corpus: counts what is done and writes progress.json at most once a second."""

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
        """`examine_s`: seconds that examining took, of which follows what later stages will take."""
        assert stage in STAGES, stage
        self._examine_s = examine_s
        self._corpus, self._stage, self._total, self._unit = corpus, stage, total, unit
        self._already, self._done, self.refused = done, done, refused
        self._images = self._bytes = 0
        self._started_at, self._start, self._written = time.time(), time.monotonic(), -_WRITE_EVERY_S
        self.write()

    def add(self, done: int, refused: int = 0, *, images: int = 0, num_bytes: int = 0) -> None:
        """Count finished units, and the images and bytes in them; `refused` images were refused."""
        self._done += done
        self.refused += refused
        self._images += images
        self._bytes += num_bytes
        if self._done >= self._total or time.monotonic() - self._written >= _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        seconds = self._written - self._start

        def rate(count: int) -> float:
            return count / seconds if seconds > 0 else 0.0

        fields = {
            "stage": self._stage,
            "done": self._done,
            "total": self._total,
            "unit": self._unit,
            # What an earlier attempt had finished is no speed of this one.
            "rate": rate(self._done - self._already),
            "images": self._images,
            "images_per_s": rate(self._images),
            "bytes_per_s": rate(self._bytes),
            "refused": self.refused,
            "started_at": self._started_at,
            "examine_s": self._examine_s,
        }
        self._corpus.write_json(PROGRESS_KEY, fields)


class Show(Protocol):
    """Whom a stage tells what it does, once it is known how much that is."""

    def begin(self, corpus: str, total: int, unit: str) -> None:
        """So much is to be done of a corpus, by its URI."""

    def add(self, corpus: str, done: int) -> None: ...


def remaining_s(stage: str, parts: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds to the end of a preparation, from the progress files of the corpora that are in this stage; None while
    nothing is known of its pace. What is left of the stage follows from its own pace, later stages from examining."""
    done, total, rate = (sum(part[name] for part in parts) for name in ("done", "total", "rate"))
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


def preparation_progress(corpora: Sequence[Store]) -> dict | None:
    """The progress files of the corpora as one: what is done of the present stage, and the time to the end of all."""
    parts = []
    for corpus in corpora:
        with contextlib.suppress(FileNotFoundError):
            parts.append(corpus.read_json(PROGRESS_KEY))
    if not parts:
        return None
    # A corpus that is through with a stage waits for the others; while a source is listed, its size is not known.
    at_work = [p for p in parts if p["done"] < p["total"] or not p["total"]] or parts
    stage = min((p["stage"] for p in at_work), key=STAGES.index)
    now = [p for p in parts if p["stage"] == stage]
    done, total = (sum(p[name] for p in now) for name in ("done", "total"))
    return {
        "step": done,
        "total_steps": total,
        "unit": f"{now[0]['unit']} ({stage})",
        "images_per_s": sum(p["images_per_s"] for p in now),
        "bytes_per_s": sum(p["bytes_per_s"] for p in now),
        "refused": sum(p["refused"] for p in parts),
        "remaining_s": remaining_s(stage, now),
    }
