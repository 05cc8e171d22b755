"""Whoever follows runs ships them to MLflow through a child process: neither a flow nor a command waits for MLflow.

Imports no MLflow. The child is `flows/to_mlflow/ship_runs.py`; it dies with its parent, and its log is `shipper.log`. A child that
was killed is replaced. What is left nevertheless stands in the store (`outbox.py`), where `ship_left.py` finds it.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from flows.to_mlflow import outbox
from flows.to_mlflow.outbox import Kind, OutboxEntry
from infra.mlflow.tracking_ids import IDS_KEY, TrackingIds, pipeline_ids_key
from infra.settings import Settings, inherited_environment
from infra.storage import open_store

log = logging.getLogger(__name__)
_LOOK_S = 1.0  # between two looks whether the child lives
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # before a dead one is replaced, growing: it may be unable to start at all
_WORTH_A_START_S = 3.0  # of the time to close
_HURRIED_S = 6.0  # after an error or a cancellation, which is to be over soon
_ANSWER_S = 2.0  # of the time to close, for the child's answer
# MLflow's own defaults wait minutes. Whoever is sent to later may be asked briefly now.
_CHILD_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "DO_NOT_TRACK": "true",
}


class SyncReport(NamedTuple):
    """Keys of runs and pipelines: sent now, in MLflow already, deleted there by somebody; and why some could not be."""

    sent: list[str]
    unchanged: list[str]
    deleted: list[str]
    left: dict[str, str]


class Shipper:
    """Context: ships the runs that it is told to follow. Does nothing at all where there is no MLflow server."""

    def __init__(self, settings: Settings, log_dir: Path) -> None:
        self._settings, self._log_dir = settings, log_dir
        self._child: subprocess.Popen[bytes] | None = None
        self._next_start, self._wait_s = 0.0, _FIRST_WAIT_S
        self._told: list[dict[str, str]] = []
        self._urls: dict[str, str] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close() if kind is None else self.close(_HURRIED_S)

    def follow(self, run_key: str) -> None:
        """A run has started, or was found finished: it is shipped as it grows. Costs a small object in the store."""
        self._follow("run", run_key)

    def follow_pipeline(self, key: str) -> None:
        """The same for a pipeline's record: the parent of its stages' runs."""
        self._follow("pipeline", key)

    def run_url(self, run_key: str) -> str | None:
        """The run's page in MLflow; None until it is there. Reads one object of the store."""
        return self._url(f"runs/{run_key}/{IDS_KEY}")

    def pipeline_url(self, key: str) -> str | None:
        """The same of a pipeline: the page of the parent run."""
        return self._url(pipeline_ids_key(key))

    def _url(self, ids_key: str) -> str | None:
        uri = self._settings.mlflow_tracking_uri
        if uri is None:
            return None
        if ids_key not in self._urls:
            if (url := TrackingIds(open_store(self._settings.root), uri, ids_key).read().get("url")) is None:
                return None
            self._urls[ids_key] = url
        return self._urls[ids_key]

    def close(self, timeout_s: float = 20) -> list[str]:
        """Lets the child send what is left, no longer than this; one that has died is replaced if there is the time.
        Returns the keys that are not wholly sent: they stand in the outbox."""
        self._closed.set()
        deadline = time.monotonic() + timeout_s
        with self._lock:
            told, self._told = self._told, []
            while self._child is not None:
                child, self._child = self._child, None
                remaining = max(deadline - time.monotonic(), 0.1)
                line = json.dumps({"close": max(remaining - _ANSWER_S, remaining / 2)}).encode() + b"\n"
                try:
                    answer, _ = child.communicate(line, timeout=remaining)
                    return json.loads(answer)["left"]
                except subprocess.TimeoutExpired:  # it hangs
                    child.kill()
                    child.communicate()
                except ValueError:  # it died without a word
                    if deadline - time.monotonic() > _WORTH_A_START_S:
                        self._start(told)
        return sorted({key for each in told for key in each.values()})

    def _follow(self, kind: Kind, key: str) -> None:
        if self._settings.mlflow_tracking_uri is None:
            return
        try:
            outbox.put(open_store(self._settings.root), OutboxEntry(kind, key))
        except (OSError, RuntimeError):  # MLflow holds nothing up, and the child may yet send it
            log.warning("%s %s is not noted as one that MLflow may lack", kind, key, exc_info=True)
        line: dict[str, str] = {kind: key}
        with self._lock:
            if line in self._told or self._closed.is_set():
                return
            self._told.append(line)
            if self._child is None:
                self._start(self._told)
                threading.Thread(target=self._keep_alive, name="shipper", daemon=True).start()
            else:
                self._tell(self._child, [line])  # one that has died is replaced in a moment, and told all

    def _keep_alive(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with self._lock:
                dead = self._child is not None and self._child.poll() is not None
                if dead and time.monotonic() >= self._next_start and not self._closed.is_set():
                    self._start(self._told)

    def _start(self, lines: Sequence[dict[str, str]]) -> None:
        if self._child is not None:
            self._child.communicate()
        self._next_start = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        arguments = ["--parent", str(os.getpid())]
        self._child = start_child(self._settings, arguments, self._log_dir / "shipper.log")
        self._tell(self._child, lines)

    def _tell(self, child: subprocess.Popen[bytes], lines: Sequence[dict[str, str]]) -> None:
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            child.stdin.flush()


def sync_runs(settings: Settings, keys: Sequence[str] | None = None) -> SyncReport:
    """Sends what MLflow has not of every run and pipeline below the root, or of some, named by key or its start.

    Raises ValueError for a key that is none and where there is no MLflow server to send to.
    """
    if settings.mlflow_tracking_uri is None:
        raise ValueError("MLFLOW_TRACKING_URI is not set, so there is no server to send runs to; `vitline stack up`.")
    root = open_store(settings.root)
    from flows.records import list_run_keys
    from flows.to_mlflow.stage_snapshots import list_pipelines

    known = [*list_run_keys(root), *list_pipelines(root)]
    if keys is not None and not keys:
        return SyncReport([], [], [], {})
    chosen = []
    for key in keys or ():
        found = [name for name in known if name == key] or [name for name in known if name.startswith(key)]
        if not found:
            raise ValueError(f"{key!r} is no run below {root.uri}; `vitline runs ls` lists them.")
        chosen += found
    child = start_child(settings, ["--sync", *chosen], None)
    answer, _ = child.communicate()
    if child.returncode:
        raise RuntimeError("the shipper ended without an answer; its words are above.")
    report: dict[str, Any] = json.loads(answer)
    return SyncReport(report["sent"], report["unchanged"], report["deleted"], report["left"])


def start_child(settings: Settings, arguments: Sequence[str], log_file: Path | None) -> subprocess.Popen[bytes]:
    """The child process. Credentials reach it as they reached us: by the environment."""
    assert settings.mlflow_tracking_uri is not None
    environment = inherited_environment((), **_CHILD_ENVIRONMENT, MLFLOW_TRACKING_URI=settings.mlflow_tracking_uri)
    with contextlib.ExitStack() as stack:
        if log_file is not None:
            log_file.parent.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(open(log_file, "ab")) if log_file is not None else None
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "flows.to_mlflow.ship_runs",
                "--root",
                open_store(settings.root).uri,
                *arguments,
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the parent, which closes the child in order
        )
