"""Curves as TensorBoard's event files, for whoever reads curves there or in a tool that takes such files.

A folder for each run, with every point of its journal. What the files of a folder hold is not written again, so the command can be
interrupted and repeated, and a run that goes on is written on. Imports tensorboardX, which Ray Train needs as well.
"""

import contextlib
import logging
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from flows.records import list_run_keys
from infra.names import matching, there_are
from infra.runs.beside import beside
from infra.runs.run_state import read_state
from infra.runs.segments import Segment, list_segments, read_segments
from infra.storage import Store, open_store

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

log = logging.getLogger(__name__)
POLL_S = 15.0
EVENTS = "events.out.tfevents.*"
_HEADER, _FOOTER = struct.Struct("<QI"), 4  # the length of an event and its checksum; the checksum of the event
Point = tuple[str, int]  # metric and step


class Curves:
    """The event files of one run."""

    def __init__(self, run: Store, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._written: set[Point] | None = None
        self._read = set[Segment]()
        self._writer: SummaryWriter | None = None

    def write(self) -> int:
        """Writes the points of the journal that the files lack; their number."""
        if self._written is None:
            self._written = set(points_of(self._folder))
        before = len(self._written)
        new = [segment for segment in list_segments(self._run) if segment not in self._read]
        for segment, records in zip(new, read_segments(self._run, new), strict=True):
            for record in records:
                if (record.key, record.step) not in self._written:
                    self._written.add((record.key, record.step))
                    self._open().add_scalar(record.key, record.value, record.step, record.timestamp_ms / 1000)
            self._read.add(segment)
        if self._writer is not None:
            self._writer.flush()
        return len(self._written) - before

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # By itself the name has only seconds, and another file of the same second would take its place.
            self._writer = SummaryWriter(str(self._folder), filename_suffix=f".{uuid.uuid4().hex[:8]}")
        return self._writer


def points_of(folder: Path) -> Iterator[Point]:
    """The points that the event files of a folder hold. A process that was killed may have cut the last event of its file short."""
    from tensorboardX.proto.event_pb2 import Event

    for file in folder.glob(EVENTS):
        data, at = file.read_bytes(), 0
        while at + _HEADER.size <= len(data):
            first = at + _HEADER.size
            at = first + _HEADER.unpack_from(data, at)[0] + _FOOTER
            if at > len(data):
                break
            event = Event.FromString(data[first : at - _FOOTER])
            yield from ((value.tag, event.step) for value in event.summary.value)


class CurveWriter:
    """Context that writes the curves of the runs that a flow or command follows to a folder, from a thread beside the work. Does
    nothing without a folder. What goes wrong is logged once and disturbs nothing: `vitline runs tensorboard` adds what is missing."""

    def __init__(self, root: str, folder: Path | None) -> None:
        self._root, self._folder = root, folder
        self._going = dict[str, Curves]()
        self._lock, self._failed = threading.Lock(), False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._stack.enter_context(beside(self._write_on, name="curves"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._write()
        for curves in self._going.values():
            curves.close()

    def follow(self, key: str) -> None:
        """Writes the curves of this run, and what it adds, until the context ends."""
        if self._folder is not None:
            with self._lock:
                self._going.setdefault(key, Curves(open_store(self._root).child(f"runs/{key}"), self._folder / key))

    def _write_on(self, over: threading.Event) -> None:
        while not over.wait(POLL_S):
            self._write()

    def _write(self) -> None:
        with self._lock:
            going = list(self._going.values())
        for curves in going:
            try:
                curves.write()
            except Exception:  # the disk is full, the store is away, tensorboardX is missing
                if not self._failed:
                    log.warning("curves could not be written to %s", self._folder, exc_info=True)
                self._failed = True


def write_curves(
    root: Store,
    folder: str | os.PathLike[str],
    keys: Sequence[str] = (),
    *,
    follow: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Writes the curves of the runs whose keys begin with one of `keys`, or of all. With `follow` it goes on: with what unfinished
    runs add and, without keys, with new runs. Reports the number of points by run. Raises ValueError for a key that matches no run."""
    ended, going = set[str](), dict[str, Curves]()
    try:
        while True:
            chosen = _chosen(root, keys)
            for key in (each for each in chosen if each not in ended):
                run = root.child(f"runs/{key}")
                over = _is_over(run)  # before its journal is read, which is whole then
                if key not in going:
                    going[key] = Curves(run, Path(folder, key))
                if number := going[key].write():
                    report(f"{key}: {number:,} points")
                if over:
                    going.pop(key).close()
                    ended.add(key)
            if not follow or (keys and ended.issuperset(chosen)):
                return
            time.sleep(POLL_S)
    finally:
        for curves in going.values():
            curves.close()


def _chosen(root: Store, keys: Sequence[str]) -> list[str]:
    known = list_run_keys(root)
    for key in keys:
        if not matching(known, key):
            raise ValueError(f"There is no run {key!r} below {root.uri}; {there_are(key, known)}")
    return list(dict.fromkeys(found for key in keys for found in matching(known, key))) if keys else known


def _is_over(run: Store) -> bool:
    state = read_state(run)
    return state is not None and state["state"] in ("finished", "diverged", "cancelled", "failed")
