"""Curves as TensorBoard's event files, for whoever reads curves there or in a tool that takes such files.

A folder for each run, with every point of its journal. What the files of a folder hold is not written again, so the command can be
interrupted and repeated, and a run that goes on is written on. Imports tensorboardX, which Ray Train needs as well.
"""

import os
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitline.flows.curves.journal_points import Curves, Point
from vitline.flows.records import list_run_keys
from vitline.infra.names import matching, there_are
from vitline.infra.runs.run_state import read_state
from vitline.infra.runs.segments import JournalRecord
from vitline.infra.storage import Store

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

POLL_S = 15.0
EVENTS = "events.out.tfevents.*"
_HEADER, _FOOTER = struct.Struct("<QI"), 4  # the length of an event and its checksum; the checksum of the event


class EventFiles(Curves):
    """The event files of one run."""

    def __init__(self, run: Store, folder: Path) -> None:
        super().__init__(run)
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def points(self) -> Iterator[Point]:
        return points_of(self._folder)

    def add(self, record: JournalRecord) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # By itself the name has only seconds, and another file of the same second would take its place.
            self._writer = SummaryWriter(str(self._folder), filename_suffix=f".{uuid.uuid4().hex[:8]}")
        self._writer.add_scalar(record.key, record.value, record.step, record.timestamp_ms / 1000)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


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
    ended, going = set[str](), dict[str, EventFiles]()
    try:
        while True:
            chosen = _chosen(root, keys)
            for key in (each for each in chosen if each not in ended):
                run = root.child(f"runs/{key}")
                over = _is_over(run)  # before its journal is read, which is whole then
                if key not in going:
                    going[key] = EventFiles(run, Path(folder, key))
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
