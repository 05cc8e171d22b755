"""Progress of a preparation, left in the store for whoever follows it."""

import time

from data_prep.records import WORK
from infra.storage import Store

PROGRESS_KEY = f"{WORK}/progress.json"
STAGES = ("list", "examine", "plan", "leakage", "gather", "publish")
_WRITE_EVERY_S = 1.0


class Progress:
    """One stage of one corpus: counts what is done and writes progress.json at most once a second."""

    def __init__(self, corpus: Store, stage: str, total: int, unit: str, done: int = 0, refused: int = 0) -> None:
        assert stage in STAGES, stage
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
        }
        self._corpus.write_json(PROGRESS_KEY, fields)
