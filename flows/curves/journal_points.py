"""The points of a run's journal, on their way to a reader of curves that may have some of them already."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from infra.runs.segments import JournalRecord, Segment, list_segments, read_segments
from infra.storage import Store

Point = tuple[str, int]  # metric and step


class Curves(ABC):
    """The curves of one run at one reader."""

    def __init__(self, run: Store) -> None:
        self._run = run
        self._written: set[Point] | None = None
        self._read = set[Segment]()

    def write(self) -> int:
        """Writes the points of the journal that the reader lacks; their number. After an error the next call starts anew."""
        try:
            return self._write()
        except Exception:
            self._written = None
            self._read.clear()
            raise

    def _write(self) -> int:
        if self._written is None:
            self._written = set(self.points())
        before = len(self._written)
        new = [segment for segment in list_segments(self._run) if segment not in self._read]
        for segment, records in zip(new, read_segments(self._run, new), strict=True):
            for record in records:
                if (record.key, record.step) not in self._written:
                    self._written.add((record.key, record.step))
                    self.add(record)
            self._read.add(segment)
        self.flush()
        return len(self._written) - before

    @abstractmethod
    def points(self) -> Iterable[Point]:
        """The points that the reader has, as far as it can tell."""

    @abstractmethod
    def add(self, record: JournalRecord) -> None:
        """Writes a point, at the latest with the next `flush`."""

    @abstractmethod
    def flush(self) -> None:
        """Hands over what was added."""

    @abstractmethod
    def close(self) -> None:
        """To be called once, when no more points come."""
