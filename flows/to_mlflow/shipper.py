"""Sends the runs that this process follows to MLflow through a child process, so that no flow or command waits for MLflow.

Imports no MLflow. The child is `flows/to_mlflow/ship_runs.py`; it dies with its parent, and its log is `shipper.log`. A child
that was killed is replaced. What was not sent stays in the outbox (`outbox.py`), from which `ship_left.py` sends it.
"""

import contextlib
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from vitline.flows.catalog.records import list_pipeline_keys, list_run_keys
from vitline.flows.to_mlflow import outbox
from vitline.flows.to_mlflow.messages import ParentLine, SyncAnswer
from vitline.flows.to_mlflow.outbox import Kind, OutboxEntry
from vitline.infra.children import start_python
from vitline.infra.local.service_logs import open_private, shorten
from vitline.infra.mlflow.tracking_ids import IDS_KEY, TrackingIds, pipeline_ids_key
from vitline.infra.names import matching
from vitline.infra.settings import Settings, inherited_environment
from vitline.infra.storage import open_store

log = logging.getLogger(__name__)
_LOOK_S = 1.0  # interval of the checks that the child is alive
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # growing waits before a dead child is replaced: it may be unable to start
_WORTH_A_START_S = 3.0  # time to close that is left when it is still worth replacing a dead child
_HURRIED_S = 6.0  # time to close after an error or a cancellation
_ANSWER_S = 2.0  # part of the time to close that is kept for the child's answer
# MLflow's defaults wait for minutes and repeat a POST that a slow server has not answered, so that it creates two of what the POST
# creates. Here nothing is repeated: whatever fails is sent again later, and searched for before it is created.
_CHILD_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "DO_NOT_TRACK": "true",
}


class SyncReport(NamedTuple):
    """Keys of runs and pipelines: sent now, already in MLflow, deleted there by a user; and by key why some are left unsent."""

    sent: list[str]
    unchanged: list[str]
    deleted: list[str]
    left: dict[str, str]


class Shipper:
    """Context that sends the followed runs to MLflow. Does nothing if no MLflow server is configured."""

    def __init__(self, settings: Settings, log_dir: Path) -> None:
        self._settings, self._log_dir = settings, log_dir
        self._child: subprocess.Popen[bytes] | None = None
        self._next_start, self._wait_s = 0.0, _FIRST_WAIT_S
        self._followed: list[ParentLine] = []
        self._urls: dict[str, str] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close() if kind is None else self.close(_HURRIED_S)

    def follow(self, run_key: str) -> None:
        """Sends a started or finished run, and what it adds later. Writes one small object to the store."""
        self._follow("run", run_key)

    def follow_pipeline(self, key: str) -> None:
        """The same for the record of a pipeline, the parent of its stages' runs."""
        self._follow("pipeline", key)

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
            if (url := TrackingIds(open_store(self._settings.root), uri, ids_key).read().get("url")) is None:
                return None
            self._urls[ids_key] = url
        return self._urls[ids_key]

    def close(self, timeout_s: float = 20) -> list[str]:
        """Lets the child send the rest within the timeout; a dead child is replaced if there is time. Returns the keys that
        are not completely sent; they stay in the outbox."""
        self._closed.set()
        deadline = time.monotonic() + timeout_s
        with self._lock:
            followed, self._followed = self._followed, []
            while self._child is not None:
                child, self._child = self._child, None
                remaining = max(deadline - time.monotonic(), 0.1)
                line: ParentLine = {"close": max(remaining - _ANSWER_S, remaining / 2)}
                try:
                    answer, _ = child.communicate(json.dumps(line).encode() + b"\n", timeout=remaining)
                    left: list[str] = json.loads(answer)["left"]
                    return left
                except subprocess.TimeoutExpired:  # it hangs
                    child.kill()
                    child.communicate()
                except ValueError:  # it died without an answer
                    if deadline - time.monotonic() > _WORTH_A_START_S:
                        self._start(followed)
        return sorted({each["run"] if "run" in each else each["pipeline"] for each in followed})

    def _follow(self, kind: Kind, key: str) -> None:
        if self._settings.mlflow_tracking_uri is None:
            return
        try:
            outbox.put(open_store(self._settings.root), OutboxEntry(kind, key))
        except (OSError, RuntimeError):  # sending to MLflow must not stop a run, and the child may still send it
            log.warning("%s %s could not be put into the outbox", kind, key, exc_info=True)
        line: ParentLine = {"run": key} if kind == "run" else {"pipeline": key}
        with self._lock:
            if line in self._followed or self._closed.is_set():
                return
            self._followed.append(line)
            if self._child is None:
                self._start(self._followed)
                threading.Thread(target=self._keep_alive, name="shipper", daemon=True).start()
            else:
                self._write_lines(self._child, [line])  # a dead child is replaced soon, and gets all lines

    def _keep_alive(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with self._lock:
                dead = self._child is not None and self._child.poll() is not None
                if dead and time.monotonic() >= self._next_start and not self._closed.is_set():
                    self._start(self._followed)

    def _start(self, lines: Sequence[ParentLine]) -> None:
        if self._child is not None:
            self._child.communicate()
        self._next_start = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        arguments = ["--parent", str(os.getpid())]
        self._child = start_child(self._settings, arguments, self._log_dir / "shipper.log")
        self._write_lines(self._child, lines)

    def _write_lines(self, child: subprocess.Popen[bytes], lines: Sequence[ParentLine]) -> None:
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            child.stdin.flush()


def sync_runs(settings: Settings, keys: Sequence[str] | None = None) -> SyncReport:
    """Sends what MLflow lacks of all runs and pipelines below the root, or of those whose keys begin with one of `keys`.

    Raises ValueError for a key that matches none, and if no MLflow server is configured.
    """
    if settings.mlflow_tracking_uri is None:
        raise ValueError(
            "MLFLOW_TRACKING_URI is not set, so there is no server to send runs to. Set it, or start one: `vitline stack up`."
        )
    root = open_store(settings.root)
    known = [*list_run_keys(root), *list_pipeline_keys(root)]
    if keys is not None and not keys:
        return SyncReport([], [], [], {})
    chosen = []
    for key in keys or ():
        found = matching(known, key)
        if not found:
            raise ValueError(f"There is no run or pipeline {key!r} below {root.uri}; `vitline runs ls` lists them.")
        chosen += found
    child = start_child(settings, ["--sync", *chosen], None)
    answer, _ = child.communicate()
    if child.returncode:
        raise RuntimeError(
            "the shipper failed; its messages are above. Fix the cause, then run `vitline runs send` again."
        )
    report: SyncAnswer = json.loads(answer)
    return SyncReport(report["sent"], report["unchanged"], report["deleted"], report["left"])


def start_child(settings: Settings, arguments: Sequence[str], log_file: Path | None) -> subprocess.Popen[bytes]:
    """Starts the child process. It gets credentials as this process did, through the environment."""
    assert settings.mlflow_tracking_uri is not None
    environment = inherited_environment((), **_CHILD_ENVIRONMENT, MLFLOW_TRACKING_URI=settings.mlflow_tracking_uri)
    with contextlib.ExitStack() as stack:
        if log_file is not None:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # such as a full disk
                shorten(log_file)
        log = stack.enter_context(open(open_private(log_file), "ab")) if log_file is not None else None
        return start_python(
            "vitline.flows.to_mlflow.ship_runs",
            "--root",
            open_store(settings.root).uri,
            *arguments,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C goes to the parent only, which closes the child
        )
