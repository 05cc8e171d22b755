"""The outbox: an entry in the store for every run and pipeline of which MLflow may still lack something.

`tracking/outbox/<kind>/<key>.json` is the only list of what there is to send. A flow puts an entry before anything else; the
sender (`send.py`) notes in it what came of its last try, and deletes it once it has sent the end. So nothing is lost if a sender,
a flow process or the MLflow server dies. Imports no MLflow.
"""

import contextlib
import importlib.metadata
import json
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple

from vitline.flows.catalog.records import read_pipeline
from vitline.infra.config import replace
from vitline.infra.records import StoredRecord, readable
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import PreconditionFailed, Store, json_bytes

log = logging.getLogger(__name__)

Kind = Literal["run", "pipeline"]
PREFIX = "tracking/outbox/"
VERSION = importlib.metadata.version("vitline")
_LOOK_S = 0.5


class OutboxEntry(NamedTuple):
    """A run or pipeline of which MLflow may lack something."""

    kind: Kind
    key: str


class Mark(StoredRecord):
    """The content of an entry."""

    schema_version: int = 1
    nonce: str
    """Different at every put."""
    at: float
    version: str
    """The version of vitline that put the entry. Only a sender of this version sends it."""
    why: str | None = None
    """Why the last try failed; empty if it sent all that there was; None before the first try."""


def put(root: Store, entry: OutboxEntry) -> None:
    """Adds an entry, or renews it, so that it is tried soon and a sender that read the run before this call does not clear it."""
    root.write(_path(entry), json_bytes(Mark(nonce=uuid.uuid4().hex, at=time.time(), version=VERSION)))


def listed(root: Store) -> dict[OutboxEntry, str]:
    """All entries, from one listing, with a tag that changes when the entry does."""
    found = {}
    for each in root.scan(PREFIX):
        kind, _, name = each.key.removeprefix(PREFIX).partition("/")
        if kind in ("run", "pipeline") and name.endswith(".json"):
            found[OutboxEntry(kind, name.removesuffix(".json"))] = each.tag  # type: ignore[arg-type]
    return found


def read(root: Store, entry: OutboxEntry) -> Mark | None:
    """The content of an entry; None if there is none."""
    return _read(root, entry)[0]


def note(root: Store, entry: OutboxEntry, nonce: str, why: str) -> None:
    """Notes what came of a try, unless the entry was put again since it was read."""
    mark, tag = _read(root, entry)
    if mark is not None and mark.nonce == nonce:
        with contextlib.suppress(PreconditionFailed):
            root.compare_and_swap(_path(entry), json_bytes(replace(mark, why=why)), tag)


def clear(root: Store, entry: OutboxEntry, nonce: str) -> None:
    """Deletes an entry, unless it was put again since it was read."""
    mark = read(root, entry)
    if mark is not None and mark.nonce == nonce:
        root.delete(_path(entry))


def is_untried(root: Store, entry: OutboxEntry) -> bool:
    """Whether no sender of this version has tried the entry since it was put."""
    mark = read(root, entry)
    return mark is not None and mark.why is None and mark.version == VERSION


def wait(root: Store, awaited: Sequence[OutboxEntry], timeout_s: float) -> dict[str, str]:
    """Waits until all entries were tried since they were put. Returns why some are not sent, by key of the run or pipeline."""
    deadline, left = time.monotonic() + timeout_s, {}
    for entry in awaited:  # one after the other: few requests, however many are awaited
        while (mark := read(root, entry)) and mark.why is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if mark and mark.why != "":
            left[entry.key] = mark.why or "no sender has tried it yet"
    return left


def left(root: Store) -> list[OutboxEntry]:
    """Entries of runs and pipelines that have ended. One whose records cannot be read is not among them, and the log says so."""
    ends = readable(
        listed(root), lambda entry: (entry, has_ended(root, entry)), lambda odd: log.warning("not sent: %s", odd)
    )
    return [entry for entry, ended in ends if ended]


def has_ended(root: Store, entry: OutboxEntry) -> bool:
    """Whether it has ended, or was deleted from the store."""
    if entry.kind == "run":
        run = root.child(f"runs/{entry.key}")
        state = read_state(run)
        if state is None:
            return not run.exists("config.json")
        # The next attempt may have started without having written its state yet.
        return state["state"] != "running" and not run.exists(f"attempts/a{state['attempt'] + 1}.json")
    try:
        return read_pipeline(root, entry.key).state != "running"
    except FileNotFoundError:
        return True


def _read(root: Store, entry: OutboxEntry) -> tuple[Mark | None, str]:
    try:
        data, tag = root.read_tagged(_path(entry))
    except FileNotFoundError:
        return None, ""
    try:
        return Mark.model_validate(json.loads(data)), tag
    except ValueError:  # its name says enough to send and delete it
        return Mark(nonce="", at=0.0, version=VERSION), tag


def _path(entry: OutboxEntry) -> str:
    return f"{PREFIX}{entry.kind}/{entry.key}.json"
