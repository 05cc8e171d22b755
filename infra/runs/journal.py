"""The journal: metrics of a run as immutable segments, journal/a<attempt>/segment-000000.jsonl.

Rank 0 writes these segments. Other writers (the machines of other ranks) have a folder of their own,
journal/a<attempt>/<writer>/, and record other keys.

A record is (seq, key, value, step, timestamp_ms). Records are kept in memory; a thread seals a segment every 30 s, or at the next try
where the store is away; a long or large training seals less often (`seal_factor`). Sealed records are never changed. An attempt first
closes the journals of all earlier ones, each by an empty segment. Records that a killed process had not sealed are dropped. The journal
is sealed before every checkpoint manifest, so the resumed run computes the dropped records again.
"""

import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

from vitline.infra.runs.lease import LeaseLost
from vitline.infra.runs.segments import JournalRecord, Segment, list_segments, read_segments
from vitline.infra.storage import PreconditionFailed, Store

log = logging.getLogger(__name__)
_FIRST_READ = 16
"""Segments that are read first, from the newest back; 30 s each."""
_FEW_WRITERS = 8
_FEW_SEGMENTS = 1000


class Journal:
    """The journal of one attempt, written by one process. A (key, step) that is sealed already is not recorded again.

    An empty `writer` is rank 0. Writers share no keys. A thread seals every `seal_every_s`; if the store is unavailable it
    tries again later and loses nothing.
    """

    def __init__(
        self,
        run: Store,
        attempt: int,
        seal_every_s: float = 30.0,
        writer: str = "",
        check_lease: Callable[[], object] = lambda: None,
        from_step: int = 0,
        writers: int = 1,
    ) -> None:
        """`from_step`: nothing is recorded of earlier steps. Segments that have only earlier ones are then not read, so that a start
        does not take longer the older a run is. `writers`: the number of processes that write journals like this one."""
        self._run, self._attempt, self._writer = run, attempt, writer
        self._check_lease = check_lease
        self._known: dict[str, set[int]] = {}
        self._next_seq = self._next_segment = 0
        for segment, records in _close_earlier(run, attempt, writer, from_step).items():
            for record in records:
                self._known.setdefault(record.key, set()).add(record.step)
                self._next_seq = max(self._next_seq, record.seq + 1)
            if segment.attempt == attempt:
                self._next_segment = max(self._next_segment, segment.number + 1)
        # Kept in memory: a local file would be lost with the process as well, and a full disk would cut its records short.
        self._unsealed = list[JournalRecord]()
        self._recording, self._sealing = threading.Lock(), threading.Lock()
        stop = threading.Event()
        # The thread has no strong reference, so that an unused journal is garbage-collected and its thread ends.
        self._finish = weakref.finalize(self, stop.set)
        self._thread = threading.Thread(
            target=_seal_on, args=(weakref.ref(self), stop, seal_every_s, writers), name="journal-seal", daemon=True
        )
        self._thread.start()

    def record(self, values: Mapping[str, float], step: int) -> None:
        """Records the values of a step in memory, without waiting for the store."""
        now_ms = time.time_ns() // 1_000_000
        with self._recording:
            for key, value in values.items():
                record = JournalRecord(self._next_seq, key, float(value), int(step), now_ms)
                steps = self._known.setdefault(key, set())
                if step not in steps:
                    steps.add(step)
                    self._unsealed.append(record)
                    self._next_seq += 1

    @property
    def num_segments(self) -> int:
        """Of this writer, in this attempt."""
        return self._next_segment

    @property
    def newest_step(self) -> int:
        """The newest step that this writer has recorded, also in earlier attempts; 0 if there is none."""
        return max((step for steps in self._known.values() for step in steps), default=0)

    def seal(self) -> None:
        """Writes everything recorded so far into one segment. Call it before each checkpoint manifest.

        Raises errors of the store, and then keeps the records for the next seal. `check_lease` is called first: an attempt
        that has lost its lease seals nothing, and the thread ends.
        """
        with self._sealing:
            self._check_lease()
            with self._recording:
                records = self._unsealed.copy()
            self._publish(records)
            with self._recording:
                del self._unsealed[: len(records)]

    def close(self) -> None:
        """Ends the thread and seals the remaining records."""
        self._finish()
        self._thread.join()
        self.seal()

    def _publish(self, records: Sequence[JournalRecord]) -> None:
        while records:
            segment = Segment(self._attempt, self._writer, self._next_segment)
            try:
                self._run.create(segment.key, b"".join(map(_line, records)))
                records = []
            except PreconditionFailed:
                # The segment exists: from an earlier try whose reply was lost, or from a replaced worker of this attempt
                # that still ran. What was sealed first stays; the rest goes into the next segment.
                there = {(record.key, record.step) for record in read_segments(self._run, [segment])[0]}
                records = [record for record in records if (record.key, record.step) not in there]
                # Or a later attempt has closed this journal: then the lease is lost, and nothing is written after it.
                self._check_lease()
            self._next_segment += 1


def read_journal(run: Store) -> list[JournalRecord]:
    """The records of a run in the order of attempts, writers and segments. Of each (key, step) the first sealed counts."""
    first: dict[tuple[str, int], JournalRecord] = {}
    for _, record in _records_of(run, list_segments(run)):
        first.setdefault((record.key, record.step), record)
    return list(first.values())


def _close_earlier(run: Store, attempt: int, writer: str, from_step: int) -> dict[Segment, list[JournalRecord]]:
    """The newest segments of a writer, back to one of steps before `from_step`, after the journals of all attempts before `attempt` were
    closed by an empty segment each.

    An earlier attempt may be suspended between its look at the lease and its write. When it wakes, its segment exists, it looks
    at the lease again and stops. So whatever it has sealed is known here, and it seals nothing after this attempt has begun.
    """
    own = [segment for segment in list_segments(run) if segment.writer == writer]
    found = _newest(run, own, from_step)
    for earlier in range(1, attempt):
        last = max((segment for segment in own if segment.attempt == earlier), default=None)
        if last is not None and last not in found:
            found[last] = read_segments(run, [last])[0]
        while last is None or found[last]:
            last = Segment(earlier, writer, last.number + 1 if last else 0)
            try:
                run.create(last.key, b"")
                found[last] = []
            except PreconditionFailed:
                found[last] = read_segments(run, [last])[0]
    return found


def _newest(run: Store, segments: Sequence[Segment], from_step: int) -> dict[Segment, list[JournalRecord]]:
    """The last of some segments, back to the first that has steps before `from_step` only; steps of a writer do not decrease."""
    found: dict[Segment, list[JournalRecord]] = {}
    size, rest = _FIRST_READ, list(segments)
    while rest:
        part, rest = rest[-size:], rest[:-size]
        records = read_segments(run, part)
        found |= zip(part, records, strict=True)
        if any(each and max(record.step for record in each) < from_step for each in records):
            break
        size *= 2
    return found


def _records_of(run: Store, segments: Sequence[Segment]) -> Iterator[tuple[Segment, JournalRecord]]:
    for segment, records in zip(segments, read_segments(run, segments), strict=True):
        for record in records:
            yield segment, record


def _line(record: JournalRecord) -> bytes:
    # JSON has no nan and inf. They are written as strings, which every reader accepts and float() converts back.
    value = record.value if math.isfinite(record.value) else str(record.value)
    return json.dumps(record._asdict() | {"value": value}).encode() + b"\n"


def seal_factor(num_segments: int, writers: int) -> float:
    """How much less often than at first one of so many writers seals after so many segments of its own.

    Readers list all segments of a run that is at work. In 30 days one writer comes to 13,000 of them, 8 to 37,000 and 125 to 146,000,
    not to 86,000 each.
    """
    return max(1, writers / _FEW_WRITERS) * max(1, num_segments * min(writers, _FEW_WRITERS) / _FEW_SEGMENTS)


def _seal_on(journal: "weakref.ref[Journal]", stop: threading.Event, every_s: float, writers: int) -> None:
    wait_s = every_s * seal_factor(0, writers)
    while not stop.wait(wait_s):
        living = journal()
        if living is None:
            return
        try:
            living.seal()
        except LeaseLost as lost:
            log.warning("the journal is not sealed any more: %s", lost)
            return
        except Exception:
            log.warning("the journal could not be sealed; its records wait in memory for the next try", exc_info=True)
        wait_s = every_s * seal_factor(living.num_segments, writers)
        del living
