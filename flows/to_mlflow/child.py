"""Sends what this process follows to MLflow through a child process, so that no flow or command waits for MLflow.

Imports no MLflow. The child is a sender (`send.py`): it ends with its parent, and its log is `sender.log`. What to send stands in the
outbox alone (`outbox.py`), so it does not matter which sender sends it.
"""

import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from vitline.flows.catalog.records import list_pipeline_keys, list_run_keys
from vitline.flows.to_mlflow import outbox
from vitline.flows.to_mlflow.outbox import OutboxEntry
from vitline.infra.children import start_python
from vitline.infra.local.service_logs import open_private, shorten
from vitline.infra.mlflow.tracking_ids import IDS_KEY, TrackingIds, pipeline_ids_key
from vitline.infra.names import matching
from vitline.infra.records import read_each
from vitline.infra.runs.in_background import in_background
from vitline.infra.settings import Settings, inherited_environment
from vitline.infra.storage import Store, open_store

log = logging.getLogger(__name__)
HURRY_S = 5.0
"""Time to close after an error or a cancellation."""
_LOOK_S = 1.0  # interval of the checks that the child is alive
_LONGEST_WAIT_S = 60.0  # growing waits before a dead child is replaced: it may be unable to start
_END_S = 2.0  # after it was asked to end
_STDERR = 2


class SyncReport(NamedTuple):
    """Keys of runs and pipelines that MLflow has now, and by key why the others are incomplete there."""

    done: list[str]
    left: dict[str, str]


class SenderChild:
    """Context that sends the followed runs to MLflow. Does nothing if no MLflow server is configured."""

    def __init__(self, settings: Settings, log_dir: Path) -> None:
        self._settings, self._log_dir = settings, log_dir
        self._followed: list[OutboxEntry] = []
        self._urls: dict[str, str] = {}
        self._child, self._lock = contextlib.ExitStack(), threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(HURRY_S)

    def follow(self, run_key: str) -> None:
        """Sends a started or finished run, and what it adds later. Writes one small object to the store."""
        self._follow(OutboxEntry("run", run_key))

    def follow_pipeline(self, key: str) -> None:
        """The same for the record of a pipeline, the parent of its stages' runs."""
        self._follow(OutboxEntry("pipeline", key))

    def run_url(self, run_key: str) -> str | None:
        """URL of the run's page in MLflow; None until the run is there. Reads one object of the store."""
        return self._url(f"runs/{run_key}/{IDS_KEY}")

    def pipeline_url(self, key: str) -> str | None:
        """The same for a pipeline: URL of the page of the parent run."""
        return self._url(pipeline_ids_key(key))

    def _url(self, ids_key: str) -> str | None:
        uri = self._settings.mlflow_tracking_uri
        if uri is None:
            return None
        if ids_key not in self._urls:
            if (url := TrackingIds(self._root, uri, ids_key).read().get("url")) is None:
                return None
            self._urls[ids_key] = url
        return self._urls[ids_key]

    def close(self, timeout_s: float = 20) -> list[str]:
        """Waits until what was followed is sent in its present state, and ends the child. Returns the keys of which MLflow lacks
        parts after this time, or which a sender has tried in vain; they stay in the outbox."""
        with self._lock:
            followed, self._followed = self._followed, []
        left = {entry.key for entry in followed}
        try:
            listed = outbox.listed(self._root) if followed else {}
            unsent = [entry for entry in followed if entry in listed]
            for entry in unsent:  # once more, so that it is tried now whatever came of it before
                outbox.put(self._root, entry)
            left = {*outbox.wait(self._root, unsent, timeout_s)}
        except (OSError, RuntimeError):
            log.warning("the outbox cannot be read", exc_info=True)
        finally:
            self._child.close()
        return sorted(left)

    @property
    def _root(self) -> Store:
        return open_store(self._settings.root)

    def _follow(self, entry: OutboxEntry) -> None:
        if self._settings.mlflow_tracking_uri is None:
            return
        try:
            outbox.put(self._root, entry)
        except (OSError, RuntimeError):  # must not stop a run; `reconcile` puts it again once it has ended
            log.warning("%s %s could not be put into the outbox", *entry, exc_info=True)
        with self._lock:
            if not self._followed:
                self._child.enter_context(in_background(self._keep_alive, name="sender", join_s=2 * _END_S))
            if entry not in self._followed:
                self._followed.append(entry)

    def _keep_alive(self, over: threading.Event) -> None:
        """Runs the child, and replaces it if it dies."""
        wait_s = _LOOK_S
        while not over.is_set():
            with contextlib.suppress(OSError), self._log() as file:  # such as a full disk
                child = start_sender(
                    self._settings,
                    "--parent",
                    str(os.getpid()),
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C goes to this process only, which ends the child when it closes
                )
                while child.poll() is None and not over.wait(_LOOK_S):
                    pass
                child.terminate()
                try:
                    child.wait(_END_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
            over.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _log(self) -> IO[bytes]:
        path = self._log_dir / "sender.log"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            shorten(path)
        return open(open_private(path), "ab")


def sync_runs(settings: Settings, keys: Sequence[str] | None = None) -> SyncReport:
    """Sends what MLflow lacks of all runs and pipelines below the root, or of those whose keys begin with one of `keys`.

    Puts them into the outbox and waits until a sender has tried each. Raises ValueError for a key that matches none, and if no
    MLflow server is configured.
    """
    if settings.mlflow_tracking_uri is None:
        raise ValueError(
            "MLFLOW_TRACKING_URI is not set, so there is no server to send runs to. Set it, or start one: `vitline stack up`."
        )
    root = open_store(settings.root)
    known = {key: OutboxEntry("run", key) for key in list_run_keys(root)}
    known |= {key: OutboxEntry("pipeline", key) for key in list_pipeline_keys(root)}
    chosen = dict(known) if keys is None else {}
    for key in keys or ():
        found = matching(known, key)
        if not found:
            raise ValueError(f"There is no run or pipeline {key!r} below {root.uri}; `vitline runs ls` lists them.")
        chosen |= {each: known[each] for each in found}
    if not chosen:
        return SyncReport([], {})
    read_each(chosen.values(), partial(outbox.put, root))
    if start_sender(settings, "--once", stdout=_STDERR).wait():
        raise RuntimeError(
            "the sender failed; its messages are above. Fix the cause, then run `vitline runs send` again."
        )
    left = outbox.wait(root, list(chosen.values()), 0)
    return SyncReport([key for key in chosen if key not in left], left)


def start_sender(settings: Settings, *arguments: str, **popen: Any) -> subprocess.Popen[bytes]:
    """Starts a sender. It gets credentials as this process did, through the environment. `popen`: as for `subprocess.Popen`."""
    assert settings.mlflow_tracking_uri is not None
    root = open_store(settings.root).uri
    environment = inherited_environment((), MLFLOW_TRACKING_URI=settings.mlflow_tracking_uri, VITLINE_ROOT=root)
    return start_python(
        "vitline.flows.to_mlflow.send",
        *arguments,
        env=environment,
        stdin=subprocess.DEVNULL,
        **popen,
    )
