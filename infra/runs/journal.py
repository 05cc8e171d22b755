"""The journal: metrics of a run as immutable segments, journal/a<attempt>/segment-000000.jsonl (docs/design.md, "Journal").

Rank 0 writes these segments. Other writers (the machines of other ranks) have a folder of their own,
journal/a<attempt>/<writer>/, and record other keys.

Sealed records are never changed. Records that a killed process had not sealed are dropped, even if its local file still
exists. The journal is sealed before every checkpoint manifest, so the resumed run computes the dropped records again.
"""

import json
import logging
import math
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from infra.storage import PreconditionFailed, Store

log = logging.getLogger(__name__)

_SEGMENT = re.compile(r"journal/a(\d+)/(?:([a-z0-9-]+)/)?segment-(\d+)\.jsonl")
_READERS = 16  # each segment costs a round trip, and three days of 30 s segments are 8,640 small objects


class JournalRecord(NamedTuple):
    """One value of one metric. `seq` counts all records of its writer; `value` may be nan or infinite."""

    seq: int
    key: str
    value: float
    step: int
    timestamp_ms: int


class Segment(NamedTuple):
    """A sealed segment: in the order of these fields a run is read. `writer` is "" for rank 0."""

    attempt: int
    writer: str
    number: int

    @property
    def key(self) -> str:
        return f"{_folder(self.attempt, self.writer)}/segment-{self.number:06d}.jsonl"


class Journal:
    """The journal of one attempt, written by one process. A (key, step) that is sealed already is not recorded again.

    An empty `writer` is rank 0. Writers share no keys. A thread seals every `seal_every_s`; if the store is unavailable it
    tries again later and loses nothing. `local_dir` belongs to this run and holds the unsealed records.
    """

    def __init__(self, run: Store, attempt: int, local_dir: Path, seal_every_s: float = 30.0, writer: str = "") -> None:
        self._run, self._attempt, self._writer = run, attempt, writer
        self._known: dict[str, set[int]] = {}
        self._next_seq = self._next_segment = 0
        own = [segment for segment in list_segments(run) if segment.writer == writer]
        for segment, record in _records_of(run, own):
            self._known.setdefault(record.key, set()).add(record.step)
            self._next_seq = max(self._next_seq, record.seq + 1)
            if segment.attempt == attempt:
                self._next_segment = segment.number + 1
        local_dir.mkdir(parents=True, exist_ok=True)
        self._path = local_dir / f"journal-a{attempt}{writer and '-'}{writer}.jsonl"
        self._local = open(self._path, "wb", buffering=0)  # noqa: SIM115  open as long as the journal
        self._recording, self._sealing = threading.Lock(), threading.Lock()
        stop = threading.Event()
        # The thread has no strong reference, so that an unused journal is garbage-collected and its thread ends.
        self._finish = weakref.finalize(self, stop.set)
        self._thread = threading.Thread(
            target=_seal_on, args=(weakref.ref(self), stop, seal_every_s), name="journal-seal", daemon=True
        )
        self._thread.start()

    def record(self, values: Mapping[str, float], step: int) -> None:
        """Records the values of a step by one write to a local file, without waiting for the store."""
        now_ms = time.time_ns() // 1_000_000
        with self._recording:
            lines = []
            for key, value in values.items():
                steps = self._known.setdefault(key, set())
                if step not in steps:
                    steps.add(step)
                    lines.append(_line(JournalRecord(self._next_seq, key, float(value), int(step), now_ms)))
                    self._next_seq += 1
            if lines:
                self._local.write(b"".join(lines))

    def seal(self) -> None:
        """Writes everything recorded so far into one segment. Call it before each checkpoint manifest.

        Raises errors of the store, and then keeps the records for the next seal.
        """
        with self._sealing:
            with self._recording:
                data = self._path.read_bytes()
            self._publish(data)
            with self._recording:
                rest = self._path.read_bytes()[len(data) :]
                self._local.seek(0)
                self._local.truncate()
                self._local.write(rest)

    def close(self) -> None:
        """Seals the remaining records, ends the thread and removes the local file."""
        self._finish()
        self._thread.join()
        self.seal()
        self._local.close()
        self._path.unlink(missing_ok=True)

    def _publish(self, data: bytes) -> None:
        while data:
            key = Segment(self._attempt, self._writer, self._next_segment).key
            try:
                self._run.create(key, data)
                data = b""
            except PreconditionFailed:
                # The segment exists: from an earlier try whose reply was lost, or from a replaced worker of this attempt
                # that still ran. What was sealed first stays; the rest goes into the next segment.
                there = {(record.key, record.step) for record in _parse(self._run, key)}
                kept = [record for record in _records(data) if (record.key, record.step) not in there]
                data = b"".join(map(_line, kept))
            self._next_segment += 1


def read_journal(run: Store) -> list[JournalRecord]:
    """The records of a run in the order of attempts, writers and segments. Of each (key, step) the first sealed counts."""
    first: dict[tuple[str, int], JournalRecord] = {}
    for _, record in _records_of(run, list_segments(run)):
        first.setdefault((record.key, record.step), record)
    return list(first.values())


def list_segments(run: Store) -> list[Segment]:
    """The sealed segments of a run, in reading order."""
    found = map(_SEGMENT.fullmatch, run.list("journal/a"))
    return sorted(Segment(int(match[1]), match[2] or "", int(match[3])) for match in found if match)


def read_segments(run: Store, segments: Sequence[Segment]) -> list[list[JournalRecord]]:
    """The records of each segment. Raises ValueError naming a segment that is invalid."""
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(lambda segment: list(_parse(run, segment.key)), segments))


def _records_of(run: Store, segments: Sequence[Segment]) -> Iterator[tuple[Segment, JournalRecord]]:
    for segment, records in zip(segments, read_segments(run, segments), strict=True):
        for record in records:
            yield segment, record


def _folder(attempt: int, writer: str) -> str:
    return f"journal/a{attempt}/{writer}" if writer else f"journal/a{attempt}"


def _parse(run: Store, key: str) -> Iterator[JournalRecord]:
    try:
        yield from _records(run.read(key))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run.uri_of(key)} is not a valid journal segment: {error!r}. Move it away and retry."
        ) from error


def _records(data: bytes) -> Iterator[JournalRecord]:
    for line in data.splitlines():
        fields = json.loads(line)
        yield JournalRecord(**{**fields, "value": float(fields["value"])})


def _line(record: JournalRecord) -> bytes:
    # JSON has no nan and inf. They are written as strings, which every reader accepts and float() converts back.
    value = record.value if math.isfinite(record.value) else str(record.value)
    return json.dumps(record._asdict() | {"value": value}).encode() + b"\n"


def _seal_on(journal: "weakref.ref[Journal]", stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        living = journal()
        if living is None:
            return
        try:
            living.seal()
        except Exception:
            log.warning("the journal could not be sealed; its records stay local until the next try", exc_info=True)
        del living
