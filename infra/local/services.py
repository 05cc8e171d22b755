"""The six programs of the local stack: how each is started, and what shows that it works rather than only listens."""

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shutil import rmtree
from typing import Any

from infra.local import seaweed
from infra.local.place import MARK, Place
from infra.local.prepared import copy_database
from infra.local.processes import child_environment
from infra.local.ray_node import FOREIGN_TO_RAY, RayHead

POOL = "vitline"
"""The work pool that the stack's Prefect worker serves."""
WORKER = "vitline-local"
_OTHERS = ("AWS_", "MLFLOW_", "_MLFLOW_", "PREFECT_")  # settings for other servers than the stack's
_SILENT_S = 600.0  # it looks every few seconds, but sending much takes its time
# Lines of Prefect's logs say the time of the day only; a log that is read a week later wants the date.
_DATED = {f"PREFECT_LOGGING_FORMATTERS_{name}_DATEFMT": "%Y-%m-%d %H:%M:%S" for name in ("STANDARD", "FLOW_RUNS")}
_PROBE = "/api/2.0/mlflow-artifacts/artifacts/.stack/probe"


@dataclass(frozen=True)
class Program:
    """One service: what starts it, and `problem(place, since)`, empty once it works; `since` is the Unix time at which
    this process of it began."""

    name: str
    command: Callable[[Place], list[str]]
    problem: Callable[[Place, float], str]
    environment: Callable[[Place], dict[str, str]]
    needs: tuple[str, ...] = ()
    first_tries: int = 1
    """How often it may die before it has ever worked; a wrong setting is to be told at once."""
    before: Callable[[Place], object] = lambda place: None
    after: Callable[[Place, Path], object] = lambda place, log_dir: None

    def check(self, place: Place, since: float) -> str:
        """`problem`, where a check that fails in an unexpected way is a problem, too."""
        try:
            return self.problem(place, since)
        except Exception as error:  # half an answer, an answer of another program
            return f"{self.name} answers oddly: {type(error).__name__}: {error}"

    def full_environment(self, place: Place) -> dict[str, str]:
        """Of its processes, credentials included: what a flow or job inherits is what it can use."""
        mine = {**place.environment(), MARK: f"{place.id}/{self.name}", **self.environment(place)}
        if self.name in ("ray", "mlflow"):  # a server that is told to be its own client attaches to itself
            mine = {k: v for k, v in mine.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
        # The store of somebody else is opened with the credentials that the supervisor has inherited.
        others = tuple(prefix for prefix in _OTHERS if not (place.root and prefix == "AWS_"))
        return child_environment(mine, FOREIGN_TO_RAY, others)


def programs(num_cpus: int | None = None) -> dict[str, Program]:
    """Every program by name; Ray with all CPUs of this machine, or `num_cpus`."""

    def head(place: Place) -> RayHead:
        return RayHead(place.folder / "ray", place.ray_token, place.ports["ray"], num_cpus)

    def leave(place: Place, log_dir: Path) -> None:
        head(place).keep_logs(log_dir)
        rmtree(head(place).folder, ignore_errors=True)

    found = (
        Program(
            "s3",
            seaweed.command,
            lambda place, since: seaweed.problem(place),
            lambda place: seaweed.ENVIRONMENT,
            before=lambda place: (place.directory / "s3").mkdir(exist_ok=True),
            after=lambda place, log_dir: seaweed.remove_sockets(place),
        ),
        Program(
            "mlflow",
            _mlflow,
            lambda place, since: _mlflow_problem(place),
            _mlflow_environment,
            before=lambda place: copy_database("mlflow", _mlflow_database(place)),
        ),
        Program(
            "prefect",
            lambda place: _module("prefect", "server", "start", "--host=127.0.0.1", f"--port={place.ports['prefect']}"),
            lambda place, since: _prefect_problem(place),
            lambda place: _DATED,
            before=lambda place: copy_database("prefect", place.directory / "prefect" / "prefect.db"),
        ),
        Program(
            "prefect-worker",
            lambda place: _module("flows.worker", "--pool", POOL, "--name", WORKER),
            _worker_problem,
            # 10 by default; people who press Run are waiting
            lambda place: {"PREFECT_WORKER_QUERY_SECONDS": "2", **_DATED},
            needs=("prefect",),
        ),
        Program(
            "shipper",  # of another room, so named here and not imported
            lambda place: _module("flows.to_mlflow.ship_left", "--alive", str(_alive(place))),
            _shipper_problem,
            lambda place: {},
            needs=("s3",),
        ),
        Program(
            "ray",
            lambda place: head(place).command(),
            lambda place, since: head(place).problem(),
            lambda place: head(place).environment(),
            first_tries=2,  # it gives up by itself after 30 s that nobody can lengthen, on a busy machine several times
            after=leave,
        ),
    )  # fmt: skip
    return {program.name: program for program in found}


def links(place: Place) -> dict[str, str]:
    """What a person opens in a browser."""
    return {
        "Prefect UI": place.url("prefect"),
        "MLflow UI": place.url("mlflow"),
        "Ray dashboard": place.url("ray"),
    }


def _module(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", *words]


def _mlflow_database(place: Place) -> Path:
    return place.directory / "mlflow" / "mlflow.db"


def _mlflow(place: Place) -> list[str]:
    port = place.ports["mlflow"]
    return _module(
        "mlflow",
        "server",
        "--host=127.0.0.1",
        f"--port={port}",
        "--workers=1",  # four by default, 180 MB each
        f"--backend-store-uri=sqlite:///{_mlflow_database(place)}",
        f"--artifacts-destination={place.artifacts}",
        # Names of hosts without their port are refused; the same names are the origins that its pages may post from.
        f"--allowed-hosts=127.0.0.1:{port},localhost:{port}",
        f"--cors-allowed-origins=http://127.0.0.1:{port},http://localhost:{port}",
    )


def _mlflow_environment(place: Place) -> dict[str, str]:
    # Without job execution it starts 2 processes instead of 9, and in a fifth of the time.
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    known = place.open_environment()
    endpoint = known.get("AWS_ENDPOINT_URL_S3") or known.get("AWS_ENDPOINT_URL")
    return env | ({"MLFLOW_S3_ENDPOINT_URL": endpoint} if endpoint else {})


def _mlflow_problem(place: Place) -> str:
    try:
        _ask(place.url("mlflow", "/api/2.0/mlflow/experiments/search"), {"max_results": 1})
        _ask(place.url("mlflow", _PROBE), b"vitline", "PUT")
        found = _ask(place.url("mlflow", _PROBE))
    except OSError as error:
        return f"MLflow at {place.url('mlflow')} does not list experiments or keep an artifact ({_told(error)})"
    return "" if found == b"vitline" else f"MLflow at {place.url('mlflow')} gave back another artifact than it was sent"


def _prefect_problem(place: Place) -> str:
    try:
        healthy = json.loads(_ask(place.url("prefect", "/api/health")))
    except (OSError, ValueError) as error:
        return f"the Prefect server at {place.url('prefect')} does not answer ({_told(error)})"
    return "" if healthy is True else f"the Prefect server at {place.url('prefect')} says {healthy!r}"


def _worker_problem(place: Place, since: float) -> str:
    try:
        workers = json.loads(_ask(place.url("prefect", f"/api/work_pools/{POOL}/workers/filter"), {}))
    except (OSError, ValueError) as error:
        return f"the work pool {POOL!r} at {place.url('prefect')} cannot be read ({_told(error)})"
    for worker in workers:
        seen = datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
        if worker["name"] == WORKER and worker["status"] == "ONLINE" and seen >= since:
            return ""
    return f"no worker is online in the work pool {POOL!r} of {place.url('prefect')}"


def _alive(place: Place) -> Path:
    return place.directory / "shipper-alive"


def _shipper_problem(place: Place, since: float) -> str:
    path = _alive(place)
    seen = path.stat().st_mtime if path.exists() else 0.0
    if seen >= max(since, time.time() - _SILENT_S):
        return ""
    return f"the shipper has not looked for what MLflow lacks since {time.ctime(seen) if seen else 'its start'}"


def _ask(url: str, body: Any = None, method: str | None = None) -> bytes:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    request.add_header("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
    with urllib.request.urlopen(request, timeout=10) as reply:
        return reply.read()


def _told(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error)
