"""Heartbeats of flow processes in the store, which distinguish an active flow run from one whose process was killed.

`flow-runs/<flow run id>.json` is written every few seconds and deleted at the end. So a flow run with such an object is active
or was killed. Prefect itself does not know: a run whose worker died with it stays RUNNING for ever.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from vitline.infra.records import UnreadableRecord, reading
from vitline.infra.runs.beside import beside
from vitline.infra.settings import user_at_host
from vitline.infra.storage import Store

log = logging.getLogger(__name__)
BEAT_S = 10.0
PREFIX = "flow-runs/"


def this_process() -> str:
    """`user@host:pid`, the owner that heartbeats and claims name."""
    return f"{user_at_host()}:{os.getpid()}"


@contextlib.contextmanager
def beating(root: Store, flow_run_id: str) -> Iterator[None]:
    """Writes heartbeats while the context is open. A store that does not answer delays nothing."""
    key = f"{PREFIX}{flow_run_id}.json"
    owner = this_process()

    def beat() -> None:
        try:
            root.write_json(key, {"schema_version": 1, "owner": owner, "heartbeat": time.time()})
        except Exception:
            log.warning("could not write the heartbeat of flow run %s; trying again", flow_run_id, exc_info=True)

    def beat_until(over: threading.Event) -> None:
        beat()
        while not over.wait(BEAT_S):
            beat()

    try:
        with beside(beat_until, name="flow-run-heartbeat", join_s=BEAT_S):
            yield
    finally:
        forget(root, flow_run_id)


def beat_of(root: Store, flow_run_id: str) -> float | None:
    """Unix seconds of the last heartbeat of a flow run; None if it has ended properly or not started. Raises
    UnreadableRecord."""
    key = f"{PREFIX}{flow_run_id}.json"
    with reading(root.uri_of(key)):
        found = root.read_json_or_none(key)
        return None if found is None else float(found["heartbeat"])


def beats(root: Store, report: Callable[[str, UnreadableRecord], None] | None = None) -> dict[str, float]:
    """Unix seconds of the last heartbeat by flow run id, for the flow runs that have not ended properly. `report` gets the id
    of a flow run whose heartbeat cannot be read, and why: treat it as alive. Without it, the error is raised."""
    found = dict[str, float]()
    for flow_run_id in [key.removeprefix(PREFIX).removesuffix(".json") for key in root.list(PREFIX)]:
        try:
            at = beat_of(root, flow_run_id)
        except UnreadableRecord as odd:
            if report is None:
                raise
            report(flow_run_id, odd)
            continue
        if at is not None:
            found[flow_run_id] = at
    return found


def forget(root: Store, flow_run_id: str) -> None:
    """Deletes the heartbeat of an ended flow run; if that fails, collect-garbage deletes it later."""
    try:
        root.delete(f"{PREFIX}{flow_run_id}.json")
    except Exception:
        log.warning("could not delete the heartbeat of flow run %s", flow_run_id, exc_info=True)
