"""What MLflow may lack, in the store: an entry for every run and pipeline that was followed and is not wholly sent.

`tracking/outbox/<kind>/<key>.json` is written before the shipper hears of it, and deleted by whoever has sent the end of
it. So nothing depends on who dies: a child, its flow process, the MLflow server. Imports no engine.
"""

import contextlib
import json
import time
import uuid
from typing import Literal, NamedTuple

from flows.records import read_pipeline
from infra.runs.run_state import read_state
from infra.storage import Store, json_bytes

Kind = Literal["run", "pipeline"]
PREFIX = "tracking/outbox/"


class OutboxEntry(NamedTuple):
    """A run or pipeline of which MLflow may lack something."""

    kind: Kind
    key: str


def put(root: Store, entry: OutboxEntry) -> None:
    """Notes that MLflow is to get this. Again for one that stands there: who sends it now has not seen what is new."""
    body = {"schema_version": 1, "at": time.time(), "nonce": uuid.uuid4().hex}  # equal bytes could not be told apart
    root.write(_path(entry), json_bytes(body))


def mark_of(root: Store, entry: OutboxEntry) -> str | None:
    """What `clear` wants, to be read before the run is; None where nothing is noted."""
    try:
        return json.loads(root.read(_path(entry)))["nonce"]
    except FileNotFoundError:
        return None


def clear(root: Store, entry: OutboxEntry, mark: str | None) -> None:
    """Forgets an entry, unless it was put again since its mark was read."""
    if mark is not None and mark_of(root, entry) == mark:
        root.delete(_path(entry))


def entries(root: Store) -> list[OutboxEntry]:
    """All of them; one listing of what is at work or was left."""
    found = []
    for path in root.list(PREFIX):
        kind, _, name = path.removeprefix(PREFIX).partition("/")
        if kind in ("run", "pipeline") and name.endswith(".json"):
            found.append(OutboxEntry(kind, name.removesuffix(".json")))  # type: ignore[arg-type]
    return found


def left(root: Store, quiet_s: float = 0.0) -> list[OutboxEntry]:
    """Entries of what ended at least `quiet_s` ago: its own shipper has had the time to send it."""
    return [
        entry for entry in entries(root) if (at := ended_at(root, entry)) is not None and time.time() - at >= quiet_s
    ]


def ended_at(root: Store, entry: OutboxEntry) -> float | None:
    """Unix seconds at which it ended; None while it runs. One that is gone from the store ended long ago."""
    if entry.kind == "run":
        run = root.child(f"runs/{entry.key}")
        state = read_state(run)
        if state is None:
            return None if run.exists("config.json") else 0.0
        # The next attempt may have begun and not have said so yet.
        newer = run.exists(f"attempts/a{state['attempt'] + 1}.json")
        return None if newer or state["state"] == "running" else state["updated_at"]
    with contextlib.suppress(FileNotFoundError):
        record = read_pipeline(root, entry.key)
        return None if record.state == "running" else record.updated_at
    return 0.0


def _path(entry: OutboxEntry) -> str:
    return f"{PREFIX}{entry.kind}/{entry.key}.json"
