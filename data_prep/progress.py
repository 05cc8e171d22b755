"""Progress of a preparation, left in the store for whoever follows it."""

import time

from data_prep.records import WORK
from infra.storage import Store

PROGRESS_KEY = f"{WORK}/progress.json"
_WRITE_EVERY_S = 1.0


class Progress:
    """One stage of one corpus: counts what is done and writes progress.json at most once a second."""

    def __init__(self, corpus: Store, stage: str, total: int, unit: str, done: int = 0, refused: int = 0) -> None:
        self._corpus, self._stage, self._total, self._unit = corpus, stage, total, unit
        self._already, self._done, self.refused = done, done, refused
        self._started_at, self._start, self._written = time.time(), time.monotonic(), -_WRITE_EVERY_S
        self.write()

    def add(self, done: int, refused: int = 0) -> None:
        """Count finished units; `refused` of them were refused."""
        self._done += done
        self.refused += refused
        if self._done >= self._total or time.monotonic() - self._written >= _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        seconds = self._written - self._start
        fields = {
            "stage": self._stage,
            "done": self._done,
            "total": self._total,
            "unit": self._unit,
            # What an earlier attempt had finished is no speed of this one.
            "rate": (self._done - self._already) / seconds if seconds > 0 else 0.0,
            "refused": self.refused,
            "started_at": self._started_at,
        }
        self._corpus.write_json(PROGRESS_KEY, fields)
