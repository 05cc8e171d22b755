"""The outbox: an entry in the store for every run and pipeline of which MLflow may still lack something.

`tracking/outbox/<kind>/<key>.json` is written before the shipper is told of the run, and deleted by the process that has
sent its end. So nothing is lost if a shipper, its flow process or the MLflow server dies. Imports no engine.
"""

import contextlib
import logging
import time
import uuid
from typing import Literal, NamedTuple

from vitline.flows.catalog.records import read_pipeline
from vitline.infra.records import readable
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import Store, json_bytes

log = logging.getLogger(__name__)

Kind = Literal["run", "pipeline"]
PREFIX = "tracking/outbox/"


class OutboxEntry(NamedTuple):
    """A run or pipeline of which MLflow may lack something."""

    kind: Kind
    key: str


def put(root: Store, entry: OutboxEntry) -> None:
    """Adds an entry. An existing one gets a new mark, so that a shipper that started before this call does not clear it."""
    body = {"schema_version": 1, "at": time.time(), "nonce": uuid.uuid4().hex}  # the nonce distinguishes two puts
    root.write(_path(entry), json_bytes(body))


def mark_of(root: Store, entry: OutboxEntry) -> str | None:
    """The mark that `clear` needs; read it before the run is read. None if there is no entry."""
    try:
        return root.read_tagged(_path(entry))[1]
    except FileNotFoundError:
        return None


def clear(root: Store, entry: OutboxEntry, mark: str | None) -> None:
    """Deletes an entry, unless it was put again since its mark was read."""
    if mark is not None and mark_of(root, entry) == mark:
        root.delete(_path(entry))


def entries(root: Store) -> list[OutboxEntry]:
    """All entries, from one listing."""
    found = []
    for path in root.list(PREFIX):
        kind, _, name = path.removeprefix(PREFIX).partition("/")
        if kind in ("run", "pipeline") and name.endswith(".json"):
            found.append(OutboxEntry(kind, name.removesuffix(".json")))  # type: ignore[arg-type]
    return found


def left(root: Store, quiet_s: float = 0.0) -> list[OutboxEntry]:
    """Entries of runs and pipelines that ended at least `quiet_s` ago, so that their own shipper had time to send them. Of one
    that cannot be read, nobody knows whether it has ended: it stays in the outbox, and the log says so."""
    ends = readable(
        entries(root), lambda entry: (entry, ended_at(root, entry)), lambda odd: log.warning("not sent: %s", odd)
    )
    return [entry for entry, at in ends if at is not None and time.time() - at >= quiet_s]


def ended_at(root: Store, entry: OutboxEntry) -> float | None:
    """When it ended, in Unix seconds; None while it runs, 0 if it was deleted from the store."""
    if entry.kind == "run":
        run = root.child(f"runs/{entry.key}")
        state = read_state(run)
        if state is None:
            return None if run.exists("config.json") else 0.0
        # The next attempt may have started without having written its state yet.
        newer = run.exists(f"attempts/a{state['attempt'] + 1}.json")
        return None if newer or state["state"] == "running" else state["updated_at"]
    with contextlib.suppress(FileNotFoundError):
        record = read_pipeline(root, entry.key)
        return None if record.state == "running" else record.updated_at
    return 0.0


def _path(entry: OutboxEntry) -> str:
    return f"{PREFIX}{entry.kind}/{entry.key}.json"
