"""Keeps the checkpoint of the best validation score (`execution.keep_best`)."""

import math
from typing import TypedDict

from vitline.infra.storage import Store
from vitline.vit.checkpoints.names import BEST, FOLDER, CheckpointName, find_checkpoints


class BestMark(TypedDict):
    """`best.json` in a checkpoint."""

    step: int
    score: float
    """A fraction: top-1, or what stands in its place."""


class BestCheckpoint:
    """Marks it in the store, where the mark protects it from deletion. One rank does."""

    def __init__(self, run: Store) -> None:
        self._run = run
        self._scores: dict[int, float] = {}

    def scored(self, step: int, score: float) -> None:
        """The state of a step has this score; the larger, the better."""
        if math.isfinite(score):
            self._scores[step] = score

    def mark(self) -> None:
        """Moves the mark to the best checkpoint that is committed and has a score; of equal ones the newest. A mark is written before
        the older one is deleted, so that a kill between the two keeps both."""
        if not self._scores:
            return
        found = find_checkpoints(self._run.list(FOLDER))
        scores = {name: self._score_in(name) for name in found.best}
        scores |= {name: self._scores[name.step] for name in found.unmarked if name.step in self._scores}
        if not scores:
            return
        best = max(scores, key=lambda name: (scores[name], name))
        if best not in found.best:
            mark: BestMark = {"step": best.step, "score": scores[best]}
            self._run.write_json(f"{best.prefix}/{BEST}", mark)
        for name in found.best:
            if name != best:
                self._run.delete(f"{name.prefix}/{BEST}")

    def _score_in(self, name: CheckpointName) -> float:
        mark: BestMark = self._run.read_json(f"{name.prefix}/{BEST}")
        return mark["score"]


def best_checkpoint(run: Store) -> BestMark | None:
    """The mark of the best kept checkpoint of a run; None where there is none."""
    marks: list[BestMark] = [run.read_json(f"{name.prefix}/{BEST}") for name in find_checkpoints(run.list(FOLDER)).best]
    return max(marks, key=lambda mark: (mark["score"], mark["step"]), default=None)
