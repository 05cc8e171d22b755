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
from infra.local.first_start import copy_database
from infra.local.processes import child_environment
from infra.local.ray_node import FOREIGN_TO_RAY, RayHead
from infra.local.stack_config import MARK, StackConfig

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
    command: Callable[[StackConfig], list[str]]
    problem: Callable[[StackConfig, float], str]
    environment: Callable[[StackConfig], dict[str, str]]
    needs: tuple[str, ...] = ()
    first_tries: int = 1
    """How often it may die before it has ever worked; a wrong setting is to be told at once."""
    before: Callable[[StackConfig], object] = lambda config: None
    after: Callable[[StackConfig, Path], object] = lambda config, log_dir: None

    def check(self, config: StackConfig, since: float) -> str:
        """`problem`, where a check that fails in an unexpected way is a problem, too."""
        try:
            return self.problem(config, since)
        except Exception as error:  # half an answer, an answer of another program
            return f"{self.name} answers oddly: {type(error).__name__}: {error}"

    def full_environment(self, config: StackConfig) -> dict[str, str]:
        """Of its processes, credentials included: what a flow or job inherits is what it can use."""
        mine = {**config.environment(), MARK: f"{config.id}/{self.name}", **self.environment(config)}
        if self.name in ("ray", "mlflow"):  # a server that is told to be its own client attaches to itself
            mine = {k: v for k, v in mine.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
        # The store of somebody else is opened with the credentials that the supervisor has inherited.
        others = tuple(prefix for prefix in _OTHERS if not (config.root and prefix == "AWS_"))
        return child_environment(mine, FOREIGN_TO_RAY, others)


def programs(num_cpus: int | None = None) -> dict[str, Program]:
    """Every program by name; Ray with all CPUs of this machine, or `num_cpus`."""

    def head(config: StackConfig) -> RayHead:
        return RayHead(config.folder / "ray", config.ray_token, config.ports["ray"], num_cpus)

    def leave(config: StackConfig, log_dir: Path) -> None:
        head(config).keep_logs(log_dir)
        rmtree(head(config).folder, ignore_errors=True)

    found = (
        Program(
            "s3",
            seaweed.command,
            lambda config, since: seaweed.problem(config),
            lambda config: seaweed.ENVIRONMENT,
            before=lambda config: (config.directory / "s3").mkdir(exist_ok=True),
            after=lambda config, log_dir: seaweed.remove_sockets(config),
        ),
        Program(
            "mlflow",
            _mlflow,
            lambda config, since: _mlflow_problem(config),
            _mlflow_environment,
            before=lambda config: copy_database("mlflow", _mlflow_database(config)),
        ),
        Program(
            "prefect",
            lambda config: _module("prefect", "server", "start", "--host=127.0.0.1", f"--port={config.ports['prefect']}"),
            lambda config, since: _prefect_problem(config),
            lambda config: _DATED,
            before=lambda config: copy_database("prefect", config.directory / "prefect" / "prefect.db"),
        ),
        Program(
            "prefect-worker",
            lambda config: _module("flows.worker", "--pool", POOL, "--name", WORKER),
            _worker_problem,
            # 10 by default; people who press Run are waiting
            lambda config: {"PREFECT_WORKER_QUERY_SECONDS": "2", **_DATED},
            needs=("prefect",),
        ),
        Program(
            "shipper",  # of another room, so named here and not imported
            lambda config: _module("flows.to_mlflow.ship_left", "--alive", str(_alive(config))),
            _shipper_problem,
            lambda config: {},
            needs=("s3",),
        ),
        Program(
            "ray",
            lambda config: head(config).command(),
            lambda config, since: head(config).problem(),
            lambda config: head(config).environment(),
            first_tries=2,  # it gives up by itself after 30 s that nobody can lengthen, on a busy machine several times
            after=leave,
        ),
    )  # fmt: skip
    return {program.name: program for program in found}


def links(config: StackConfig) -> dict[str, str]:
    """What a person opens in a browser."""
    return {
        "Prefect UI": config.url("prefect"),
        "MLflow UI": config.url("mlflow"),
        "Ray dashboard": config.url("ray"),
    }


def _module(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", *words]


def _mlflow_database(config: StackConfig) -> Path:
    return config.directory / "mlflow" / "mlflow.db"


def _mlflow(config: StackConfig) -> list[str]:
    port = config.ports["mlflow"]
    return _module(
        "mlflow",
        "server",
        "--host=127.0.0.1",
        f"--port={port}",
        "--workers=1",  # four by default, 180 MB each
        f"--backend-store-uri=sqlite:///{_mlflow_database(config)}",
        f"--artifacts-destination={config.artifacts}",
        # Names of hosts without their port are refused; the same names are the origins that its pages may post from.
        f"--allowed-hosts=127.0.0.1:{port},localhost:{port}",
        f"--cors-allowed-origins=http://127.0.0.1:{port},http://localhost:{port}",
    )


def _mlflow_environment(config: StackConfig) -> dict[str, str]:
    # Without job execution it starts 2 processes instead of 9, and in a fifth of the time.
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    known = config.open_environment()
    endpoint = known.get("AWS_ENDPOINT_URL_S3") or known.get("AWS_ENDPOINT_URL")
    return env | ({"MLFLOW_S3_ENDPOINT_URL": endpoint} if endpoint else {})


def _mlflow_problem(config: StackConfig) -> str:
    try:
        _ask(config.url("mlflow", "/api/2.0/mlflow/experiments/search"), {"max_results": 1})
        _ask(config.url("mlflow", _PROBE), b"vitline", "PUT")
        found = _ask(config.url("mlflow", _PROBE))
    except OSError as error:
        return f"MLflow at {config.url('mlflow')} does not list experiments or keep an artifact ({_told(error)})"
    return (
        "" if found == b"vitline" else f"MLflow at {config.url('mlflow')} gave back another artifact than it was sent"
    )


def _prefect_problem(config: StackConfig) -> str:
    try:
        healthy = json.loads(_ask(config.url("prefect", "/api/health")))
    except (OSError, ValueError) as error:
        return f"the Prefect server at {config.url('prefect')} does not answer ({_told(error)})"
    return "" if healthy is True else f"the Prefect server at {config.url('prefect')} says {healthy!r}"


def _worker_problem(config: StackConfig, since: float) -> str:
    try:
        workers = json.loads(_ask(config.url("prefect", f"/api/work_pools/{POOL}/workers/filter"), {}))
    except (OSError, ValueError) as error:
        return f"the work pool {POOL!r} at {config.url('prefect')} cannot be read ({_told(error)})"
    for worker in workers:
        seen = datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
        if worker["name"] == WORKER and worker["status"] == "ONLINE" and seen >= since:
            return ""
    return f"no worker is online in the work pool {POOL!r} of {config.url('prefect')}"


def _alive(config: StackConfig) -> Path:
    return config.directory / "shipper-alive"


def _shipper_problem(config: StackConfig, since: float) -> str:
    path = _alive(config)
    seen = path.stat().st_mtime if path.exists() else 0.0
    if seen >= max(since, time.time() - _SILENT_S):
        return ""
    return f"the shipper has not looked for what MLflow lacks since {time.ctime(seen) if seen else 'its start'}"


def _ask(url: str, body: Any = None, method: str | None = None) -> bytes:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    request.add_header("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
    with urllib.request.urlopen(request, timeout=10) as reply:
        answer: bytes = reply.read()
    return answer


def _told(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error)
