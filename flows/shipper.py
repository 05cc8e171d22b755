"""Whoever follows runs ships them to MLflow through a child process: neither a flow nor a command waits for MLflow.

Imports no MLflow. The child is `flows/ship_runs.py`; it dies with its parent, and its log is `shipper.log`.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from flows.run_views import list_pipelines, list_run_keys
from infra.settings import Settings, inherited_environment
from infra.storage import open_store
from infra.tracking_ids import IDS_KEY, TrackingIds, pipeline_ids_key

_MAX_STARTS = 3
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
        self._starts = 0
        self._told: list[dict[str, str]] = []
        self._urls: dict[str, str] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close() if kind is None else self.close(_HURRIED_S)

    def follow(self, run_key: str) -> None:
        """A run has started, or was found finished: it is shipped as it grows. Costs a line in a pipe."""
        self._follow({"run": run_key})

    def follow_pipeline(self, key: str) -> None:
        """The same for a pipeline's record: the parent of its stages' runs."""
        self._follow({"pipeline": key})

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
        """Lets the child send what is left, no longer than this. Returns the keys that are not wholly sent:
        `vitline runs sync` sends them."""
        with self._lock:
            child, told, self._child, self._told = self._child, self._told, None, []
        if child is None:
            return []
        line = json.dumps({"close": max(timeout_s - _ANSWER_S, timeout_s / 2)}).encode() + b"\n"
        try:
            answer, _ = child.communicate(line, timeout=timeout_s)
            return json.loads(answer)["left"]
        except (subprocess.TimeoutExpired, ValueError):  # it hangs, or died without a word
            child.kill()
            child.communicate()
            return sorted({key for each in told for key in each.values()})

    def _follow(self, line: dict[str, str]) -> None:
        if self._settings.mlflow_tracking_uri is None:
            return
        with self._lock:
            if line in self._told:
                return
            self._told.append(line)
            if self._child is not None and self._tell([line]):
                return
            while self._starts < _MAX_STARTS:  # the first, or one in the place of one that died; its log says why
                self._start()
                if self._tell(self._told):
                    return

    def _start(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
        self._child = start_child(self._settings, ["--parent", str(os.getpid())], self._log_dir / "shipper.log")
        self._starts += 1

    def _tell(self, lines: Sequence[dict[str, str]]) -> bool:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            self._child.stdin.flush()
        except OSError:
            return False
        return self._child.poll() is None


def sync_runs(settings: Settings, keys: Sequence[str] | None = None) -> SyncReport:
    """Sends what MLflow has not of every run and pipeline below the root, or of some, named by key or its start.

    Raises ValueError for a key that is none and where there is no MLflow server to send to.
    """
    if settings.mlflow_tracking_uri is None:
        raise ValueError("MLFLOW_TRACKING_URI is not set, so there is no server to send runs to; `vitline stack up`.")
    root = open_store(settings.root)
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
            [sys.executable, "-P", "-m", "flows.ship_runs", "--root", open_store(settings.root).uri, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the parent, which closes the child in order
        )
