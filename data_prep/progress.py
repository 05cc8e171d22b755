"""Progress of a preparation, written to the store for observers."""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NotRequired, TypedDict

from vitline.data_prep.records import WORK
from vitline.infra.runs.progress import ESTIMATE_AFTER_S, ProgressWriter, RunProgress
from vitline.infra.runs.watchdog import note_progress
from vitline.infra.storage import Store

PROGRESS_KEY = f"{WORK}/progress.json"
STAGES = ("list", "examine", "plan", "leakage", "write", "publish")
_OF_EXAMINING: Mapping[str, float] = {"plan": 0.05, "leakage": 0.05, "write": 0.25, "publish": 0.05}
"""Seconds of each stage per second of examining; measured with photographs of 10 and of 93 KB, tests/benchmarks/README.md."""


class StageFields(TypedDict):
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


class StageProgress:
    """One stage of several corpora, given by their URIs: counts finished units and writes their progress files."""

    def __init__(self, stage: str, corpora: Iterable[Store], examine_s: float | None = None) -> None:
        """`examine_s`: seconds of the examine stage, from which the time of later stages is estimated."""
        self._stage, self._examine_s = stage, examine_s
        self._corpora = {corpus.uri: corpus for corpus in corpora}
        self._written = dict[str, _CorpusProgress]()

    def begin(self, corpus: str, total: int = 1, unit: str = "corpus", done: int = 0, refused: int = 0) -> None:
        """Starts to count the work of a corpus, or a further part of it; images refused before stay counted."""
        if corpus in self._written:
            refused = refused or self._written[corpus].refused
        self._written[corpus] = _CorpusProgress(
            self._corpora[corpus], self._stage, total, unit, done, refused, self._examine_s
        )

    def add(self, corpus: str, done: int = 1, refused: int = 0, *, images: int = 0, num_bytes: int = 0) -> None:
        """Counts finished units, their images and their bytes; `refused` images were refused."""
        note_progress()
        self._written[corpus].count(done, refused, images, num_bytes)


class _CorpusProgress(ProgressWriter):
    """`_work/progress.json` of a corpus."""

    key = PROGRESS_KEY

    def __init__(
        self, corpus: Store, stage: str, total: int, unit: str, done: int, refused: int, examine_s: float | None
    ) -> None:
        assert stage in STAGES, stage
        self._stage, self.refused, self._examine_s = stage, refused, examine_s
        self._images = self._bytes = 0
        self._started_at = time.time()
        super().__init__(corpus, unit, total, done)

    def count(self, done: int, refused: int, images: int, num_bytes: int) -> None:
        self.refused += refused
        self._images += images
        self._bytes += num_bytes
        self.add(done)

    def fields(self, elapsed_s: float) -> StageFields:
        def rate(count: int) -> float:
            return count / elapsed_s if elapsed_s > 0 else 0.0

        return {
            "stage": self._stage,
            "done": self._done,
            "total": self._total,
            "unit": self._unit,
            "rate": rate(self._done - self._done_before) if elapsed_s >= ESTIMATE_AFTER_S else 0.0,
            "images": self._images,
            "images_per_s": rate(self._images),
            "bytes_per_s": rate(self._bytes),
            "refused": self.refused,
            "started_at": self._started_at,
            "examine_s": self._examine_s,
        }


def remaining_s(stage: str, parts: Sequence[StageFields]) -> float | None:
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
    parts = list[StageFields]()
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
