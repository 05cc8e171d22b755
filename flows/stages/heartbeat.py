"""A sign of life of every flow process, in the store: what tells a flow run that works from one whose process was killed.

`flow-runs/<flow run id>.json` is written every few seconds and deleted at the end, so that what lies there is at work or
was killed. Prefect itself does not know: a run whose worker died with it stays RUNNING for ever.
"""

import contextlib
import getpass
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

from infra.storage import Store

log = logging.getLogger(__name__)
BEAT_S = 10.0
PREFIX = "flow-runs/"


@contextlib.contextmanager
def beating(root: Store, flow_run_id: str) -> Iterator[None]:
    """Beats while the context is open. A store that does not answer holds nothing up."""
    over = threading.Event()
    key = f"{PREFIX}{flow_run_id}.json"
    owner = f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}"

    def beat() -> None:
        try:
            root.write_json(key, {"schema_version": 1, "owner": owner, "heartbeat": time.time()})
        except Exception:
            log.warning("no sign of life of flow run %s; trying again", flow_run_id, exc_info=True)

    def beat_on() -> None:
        beat()
        while not over.wait(BEAT_S):
            beat()

    thread = threading.Thread(target=beat_on, name="flow-run-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=BEAT_S)
        forget(root, flow_run_id)


def beat_of(root: Store, flow_run_id: str) -> float | None:
    """Unix seconds of the last sign of life of one flow run; None where it ended in order, or never began."""
    try:
        return float(root.read_json(f"{PREFIX}{flow_run_id}.json")["heartbeat"])
    except FileNotFoundError:
        return None


def beats(root: Store) -> dict[str, float]:
    """Unix seconds of the last sign of life by flow run id, of those that have not ended in order."""
    found = {}
    for key in root.list(PREFIX):
        with contextlib.suppress(FileNotFoundError):  # it ended in this moment
            found[key.removeprefix(PREFIX).removesuffix(".json")] = float(root.read_json(key)["heartbeat"])
    return found


def forget(root: Store, flow_run_id: str) -> None:
    """Nothing of a flow run that has ended stays behind; what cannot be deleted now is garbage later."""
    try:
        root.delete(f"{PREFIX}{flow_run_id}.json")
    except Exception:
        log.warning("the sign of life of flow run %s is left behind", flow_run_id, exc_info=True)
