"""How often a stage starts a run again: only attempts without progress count."""

from collections.abc import Callable, Mapping

from vitline.infra.runs.progress import RunProgress

MAX_WITHOUT_PROGRESS = 3


class TriesWithoutProgress:
    """Counts attempts in a row that left nothing new for the next one to resume from.

    `kept()` returns what the next attempt finds done, as counts by kind, such as `{"checkpoint": 12000}`. A count makes
    progress when it exceeds all that were seen before, so work that is lost and done again is no progress.
    """

    def __init__(self, kept: Callable[[], Mapping[str, int]]) -> None:
        self._kept, self._most, self.number = kept, dict(kept()), 0

    def add(self) -> bool:
        """Counts an attempt that ended unfinished. Whether there were so many in a row that the stage gives up."""
        further = {kind: count for kind, count in self._kept().items() if count > self._most.get(kind, 0)}
        self._most |= further
        self.number = 0 if further else self.number + 1
        return self.number >= MAX_WITHOUT_PROGRESS


def finished_units(progress: RunProgress | None) -> dict[str, int]:
    """What a job keeps whose progress counts finished units, such as chunks, shards and trials."""
    return {progress.get("unit", "steps"): progress["step"]} if progress else {}
