"""Sealed segments of a journal, and the object that they are merged into once their run has ended.

journal/a<attempt>/segment-000000.jsonl    a segment: one record per line, never changed
journal/merged-000000.jsonl                all segments of the run, as they were

The first line of a merged journal has schema_version and, per segment in reading order, [journal, number, bytes]; the bytes of
the segments follow. A segment keeps its attempt, writer and number, so a reader need not know where it is stored, and a sender continues
at the same number. Merged journals never change: a later merge writes one with the next number, which holds all of the earlier.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from vitline.infra.storage import Keys, Store

T = TypeVar("T")

_SEGMENT = re.compile(r"journal/a(\d+)/(?:([a-z0-9-]+)/)?segment-(\d+)\.jsonl")
_MERGED = re.compile(r"journal/merged-(\d{6})\.jsonl")
_READERS = 16  # each segment costs a round trip, and three days of 30 s segments are 8,640 small objects
_HEADER_BYTES = 1 << 16
_TRIES = 3


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
        return f"journal/{self.journal}/segment-{self.number:06d}.jsonl"

    @property
    def journal(self) -> str:
        """The folder of its journal, such as "a1", or "a1/node-1" of another writer."""
        return f"a{self.attempt}/{self.writer}".rstrip("/")


class _Merged(NamedTuple):
    """The newest merged journal of a run."""

    key: str
    number: int
    places: Mapping[Segment, tuple[int, int]]
    """First and last byte, exclusive, of each segment in the object."""


def list_segments(run: Store) -> list[Segment]:
    """The sealed segments of a run, in reading order. Raises ValueError naming a merged journal that is invalid."""
    return _again(lambda: _list(run))


def read_segments(run: Store, segments: Sequence[Segment]) -> list[list[JournalRecord]]:
    """The records of each segment. Raises ValueError naming a segment that is invalid."""
    texts = _again(lambda: _texts(run, segments))
    return [list(_parse(text, run.uri_of(segment.key))) for segment, text in zip(segments, texts, strict=True)]


def journal_keys(keys: Iterable[str]) -> Keys:
    """Those of the keys of a run that are segments or merged journals."""
    return [key for key in keys if _SEGMENT.fullmatch(key) or _MERGED.fullmatch(key)]


def merge_journal(run: Store) -> Keys:
    """Merges the sealed segments of a run that has ended into one object. Returns the keys to delete afterwards.

    Whatever of them is deleted, readers find the same records. A merged journal that this one replaces is returned by the next
    merge only, because somebody may read it at this moment. Where there is nothing to merge, nothing is written.

    Raises PreconditionFailed where another process merges at the same time, and ValueError naming a segment that is invalid.
    """
    loose, before = _loose(run), _newest(run)
    there = before.places if before else {}
    if all(segment in there for segment in loose):
        replaced = [_merged_key(number) for number in _numbers(run) if before and number < before.number]
        return [*(segment.key for segment in loose), *replaced]
    segments = sorted({*loose, *there})
    texts = _texts(run, segments)
    for segment, text in zip(segments, texts, strict=True):
        if segment not in there:
            for _ in _parse(text, run.uri_of(segment.key)):
                pass
    index = [[segment.journal, segment.number, len(text)] for segment, text in zip(segments, texts, strict=True)]
    header = json.dumps({"schema_version": 1, "segments": index}, separators=(",", ":")).encode()
    run.create(_merged_key(before.number + 1 if before else 0), b"".join([header, b"\n", *texts]))
    return [segment.key for segment in loose]


def _again(read: Callable[[], T]) -> T:
    """Reads once more where an object was not found: a merge has overtaken this reader, and it has moved."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def _list(run: Store) -> list[Segment]:
    # In this order: a segment that is not listed any more was in a merged journal before.
    loose, merged = _loose(run), _newest(run)
    return sorted({*loose, *(merged.places if merged else ())})


def _loose(run: Store) -> list[Segment]:
    """Segments that are objects of their own."""
    found = map(_SEGMENT.fullmatch, run.list("journal/a"))
    return sorted(Segment(int(match[1]), match[2] or "", int(match[3])) for match in found if match)


def _texts(run: Store, segments: Sequence[Segment]) -> list[bytes]:
    """The bytes of each segment. What is merged counts: behind it, an attempt that lost its lease may have sealed once more."""
    merged = _newest(run) if segments else None
    places = {segment: merged.places[segment] for segment in segments if segment in merged.places} if merged else {}
    first = min((start for start, _ in places.values()), default=0)
    last = max((end for _, end in places.values()), default=0)
    data = run.read(merged.key, first, last) if merged and last > first else b""
    if len(data) != last - first:
        raise ValueError(
            f"{run.uri_of(merged.key if merged else '')} is not a merged journal: it ends too early.{_ANEW}"
        )

    def text(segment: Segment) -> bytes:
        if segment in places:
            start, end = places[segment]
            return data[start - first : end - first]
        return run.read(segment.key)

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(text, segments))


_ANEW = " Restore it from a copy, or move it away: the metrics in it are lost then."


def _newest(run: Store) -> _Merged | None:
    """The newest merged journal of a run, by its first line; None if there is none."""
    number = max(_numbers(run), default=None)
    if number is None:
        return None
    key, size = _merged_key(number), _HEADER_BYTES
    while b"\n" not in (data := run.read(key, 0, size)) and len(data) == size:
        size *= 4
    try:
        header = json.loads(data.partition(b"\n")[0])
        if header["schema_version"] != 1:
            raise ValueError(f"it has schema_version {header['schema_version']}, and this vitline reads 1")
        places, start = {}, data.index(b"\n") + 1
        for journal, position, num_bytes in header["segments"]:
            match = _SEGMENT.fullmatch(f"journal/{journal}/segment-{position:06d}.jsonl")
            if match is None or num_bytes < 0:
                raise ValueError(f"it has an entry {[journal, position, num_bytes]}")
            places[Segment(int(match[1]), match[2] or "", position)] = (start, start + num_bytes)
            start += num_bytes
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{run.uri_of(key)} is not a merged journal: {error!r}.{_ANEW}") from error
    return _Merged(key, number, places)


def _numbers(run: Store) -> list[int]:
    return [int(match[1]) for match in map(_MERGED.fullmatch, run.list("journal/merged-")) if match]


def _merged_key(number: int) -> str:
    return f"journal/merged-{number:06d}.jsonl"


def _parse(text: bytes, uri: str) -> Iterator[JournalRecord]:
    """The records of a segment."""
    try:
        for line in text.splitlines():
            fields = json.loads(line)
            known = {name: fields[name] for name in JournalRecord._fields}  # a newer version may write more
            yield JournalRecord(**{**known, "value": float(known["value"])})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{uri} is not a valid journal segment: {error!r}. Move it away and retry.") from error
