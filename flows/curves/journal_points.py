"""The points of a run's journal, on their way to a reader of curves that may have some of them already."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from vitline.infra.runs.segments import JournalRecord, Segment, list_segments, read_segments
from vitline.infra.storage import Store

Point = tuple[str, int]  # metric and step


class Curves(ABC):
    """The curves of one run at one reader."""

    def __init__(self, run: Store) -> None:
        self._run = run
        self._written: set[Point] | None = None
        self._read = set[Segment]()

    def write(self) -> int:
        """Writes the points of the journal that the reader lacks; their number. After an error of the reader, not of the run's store,
        the next call asks again what the reader has."""
        if self._written is None:
            self._written = set(self.points())
        new = [segment for segment in list_segments(self._run) if segment not in self._read]
        records = [record for part in read_segments(self._run, new) for record in part]
        try:
            number = self._write(records, self._written)
        except Exception:
            self._written = None
            self._read.clear()
            raise
        self._read.update(new)
        return number

    def _write(self, records: Iterable[JournalRecord], written: set[Point]) -> int:
        before = len(written)
        for record in records:
            if (record.key, record.step) not in written:
                written.add((record.key, record.step))
                self.add(record)
        self.flush()
        return len(written) - before

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
