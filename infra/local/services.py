"""The six programs of the local stack: their commands, and checks that they work and do not only listen."""

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vitline.infra.children import child_environment
from vitline.infra.local import ray_node, seaweed
from vitline.infra.local.databases import check_database, database_file
from vitline.infra.local.stack_config import OWNER_VARIABLE, StackConfig
from vitline.infra.mlflow.mlflow_private import server_environment
from vitline.infra.mlflow.pages import experiments_url
from vitline.infra.settings import Settings, basic_authorization

WORKER = "vitline-local"
_OTHERS = ("AWS_", "MLFLOW_", "_MLFLOW_", "PREFECT_")  # settings that may belong to servers outside of the stack
_CLIENTS = {"mlflow": ("MLFLOW_", "_MLFLOW_"), "prefect": ("PREFECT_",)}
_SILENT_S = 600.0  # the sender works every few seconds, but sending much may take minutes
# By default Prefect's log lines have the time of day only; this adds the date.
_DATED = {f"PREFECT_LOGGING_FORMATTERS_{name}_DATEFMT": "%Y-%m-%d %H:%M:%S" for name in ("STANDARD", "FLOW_RUNS")}
_PROBE = "/api/2.0/mlflow-artifacts/artifacts/.stack/probe"


@dataclass(frozen=True)
class Program:
    """One service: its command, and `problem(config, since)`, which returns an empty text once it works.

    `since` is the Unix time at which its process was started.
    """

    name: str
    command: Callable[[StackConfig], list[str]]
    problem: Callable[[StackConfig, float], str]
    environment: Callable[[StackConfig], dict[str, str]]
    logins: Callable[[StackConfig], dict[str, str]] = lambda config: {}
    """The logins of services that it uses or serves."""
    uses: tuple[str, ...] = ()
    """The servers that it and its flows are clients of. For those that are the user's own it keeps the settings of its environment."""
    needs: tuple[str, ...] = ()
    before: Callable[[StackConfig], object] = lambda config: None
    after: Callable[[StackConfig, Path], object] = lambda config, log_dir: None

    def check(self, config: StackConfig, since: float) -> str:
        """Like `problem`, but an unexpected error of the check is a problem too."""
        try:
            return self.problem(config, since)
        except Exception as error:  # such as an incomplete reply, or the reply of another program
            return f"{self.name} gave an unexpected reply: {type(error).__name__}: {error}"

    def full_environment(self, config: StackConfig) -> dict[str, str]:
        """The environment of its processes, including credentials, which flows and jobs inherit from it."""
        mine = {**config.environment(), OWNER_VARIABLE: f"{config.id}/{self.name}", **self.environment(config)}
        for secret in (config.prefect_login().keys() | config.mlflow_login().keys()) - set(self.logins(config)):
            del mine[secret]
        if self.name in ("ray", "mlflow"):  # with these variables a server would connect to itself as a client
            mine = {k: v for k, v in mine.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
        # An existing store, and servers of the user's own, are used with the credentials that the supervisor has inherited.
        clients_of = [name for name in self.uses if not config.starts(name)]
        kept = {*_OTHERS} if config.only_ray else {"AWS_"} if config.root else set[str]()
        kept = kept.union(*(_CLIENTS.get(name, ()) for name in clients_of))
        others = tuple(prefix for prefix in _OTHERS if prefix not in kept)
        return child_environment(mine, () if "ray" in clients_of else ray_node.FOREIGN_TO_RAY, others)


def programs() -> dict[str, Program]:
    """All programs by name."""
    found = (  # infra may not import flows, so modules there are named as text
        Program(
            "s3",
            seaweed.command,
            lambda config, since: seaweed.problem(config),
            seaweed.environment,
            before=lambda config: (config.directory / "s3").mkdir(exist_ok=True),
            after=lambda config, log_dir: seaweed.remove_sockets(config),
        ),
        Program(
            "mlflow",
            _mlflow,
            lambda config, since: _mlflow_problem(config),
            _mlflow_environment,
            StackConfig.mlflow_login,
            before=lambda config: check_database(config.directory, "mlflow"),
        ),
        Program(
            "prefect",
            lambda config: _module(
                "vitline.flows.on_prefect.local_server", "--host=127.0.0.1", f"--port={config.ports['prefect']}"
            ),
            lambda config, since: _prefect_problem(config),
            _prefect_environment,
            StackConfig.prefect_login,
            before=lambda config: check_database(config.directory, "prefect"),
        ),
        Program(
            "prefect-worker",
            lambda config: _module(
                "vitline.flows.on_prefect.worker", "--pool", config.project, "--name", worker_name(config)
            ),
            _worker_problem,
            # 10 by default, which is long for somebody who has pressed Run
            lambda config: {"PREFECT_WORKER_QUERY_SECONDS": "2", **_DATED},
            lambda config: config.prefect_login() | config.mlflow_login(),
            uses=("prefect", "mlflow", "ray"),
            needs=("prefect",),
        ),
        Program(
            "sender",
            lambda config: _module("vitline.flows.to_mlflow.send", "--alive", str(_alive(config))),
            _sender_problem,
            lambda config: {},
            StackConfig.mlflow_login,
            uses=("mlflow",),
            needs=("s3",),
        ),
        Program(
            "ray",
            ray_node.command,
            lambda config, since: ray_node.problem(config),
            ray_node.environment,
            after=ray_node.keep_logs,
        ),
    )  # fmt: skip
    return {program.name: program for program in found}


def links(config: StackConfig) -> dict[str, str]:
    """The web pages of the stack's own servers."""
    pages = {
        "prefect": ("Prefect UI", config.url("prefect")),
        "mlflow": ("MLflow UI", experiments_url(config.url("mlflow"))),
        "ray": ("Ray dashboard", config.url("ray")),
    }
    return dict(page for name, page in pages.items() if config.starts(name))


def worker_name(config: StackConfig) -> str:
    """The name of the worker: at a Prefect of the user's own, where several stacks may have one, with the id of the stack."""
    return WORKER if config.starts("prefect") else f"{WORKER}-{config.id}"


def _module(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", *words]


def _mlflow(config: StackConfig) -> list[str]:
    # `mlflow server` loads MLflow, hands its options over in variables, starts this program, and stays beside it: 4 CPU-seconds
    # more at each start, and 200 MB.
    return _module("vitline.infra.local.access.mlflow_server", f"--port={config.ports['mlflow']}")


def _mlflow_environment(config: StackConfig) -> dict[str, str]:
    port = config.ports["mlflow"]
    env = server_environment(f"sqlite:///{database_file(config.directory, 'mlflow')}", config.artifacts) | {
        # Host names must include the port. The pages may send requests from the same origins.
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{port},localhost:{port}",
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # nothing here runs the jobs
    }
    known = config.open_environment()
    endpoint = known.get("AWS_ENDPOINT_URL_S3") or known.get("AWS_ENDPOINT_URL")
    return env | ({"MLFLOW_S3_ENDPOINT_URL": endpoint} if endpoint else {})


def _mlflow_problem(config: StackConfig) -> str:
    try:
        _ask(config, config.url("mlflow", "/api/2.0/mlflow/experiments/search"), {"max_results": 1})
        _ask(config, config.url("mlflow", _PROBE), b"vitline", "PUT")
        found = _ask(config, config.url("mlflow", _PROBE))
    except OSError as error:
        return f"MLflow at {config.url('mlflow')} cannot list experiments or store an artifact ({_reason(error)})"
    return (
        ""
        if found == b"vitline"
        else f"MLflow at {config.url('mlflow')} returned an artifact that differs from the stored one"
    )


def _prefect_environment(config: StackConfig) -> dict[str, str]:
    port = config.ports["prefect"]
    return (
        _DATED
        | {
            # Otherwise every web page, and every user of this machine, could register a flow and run it.
            "PREFECT_SERVER_API_AUTH_STRING": config.user_and_password(),
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",  # else a notice covers the first page that asks for the password
            # Every 5 s by default, which is more work than the flow runs of one machine are worth. A run that nobody takes is shown
            # as late after half a minute, and a suspended one ends up to a minute after its time.
            "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_LOOP_SECONDS": "60",
            "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_LOOP_SECONDS": "60",
            "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "15",
        }
    )


def _prefect_problem(config: StackConfig) -> str:
    try:
        healthy = json.loads(_ask(config, config.url("prefect", "/api/health")))
    except (OSError, ValueError) as error:
        return f"the Prefect server at {config.url('prefect')} does not answer ({_reason(error)})"
    return "" if healthy is True else f"the Prefect server at {config.url('prefect')} reports {healthy!r}"


def _worker_problem(config: StackConfig, since: float) -> str:
    at = config.address("prefect")
    headers = None if config.starts("prefect") else Settings().prefect_headers()
    try:
        workers = json.loads(_ask(config, f"{at}/work_pools/{config.project}/workers/filter", {}, headers=headers))
    except (OSError, ValueError) as error:
        return f"the work pool {config.project!r} at {at} cannot be read ({_reason(error)})"
    for worker in workers:
        seen = datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
        if worker["name"] == worker_name(config) and worker["status"] == "ONLINE" and seen >= since:
            return ""
    return f"no worker is online in the work pool {config.project!r} at {at}"


def _alive(config: StackConfig) -> Path:
    return config.directory / "sender-alive"


def _sender_problem(config: StackConfig, since: float) -> str:
    path = _alive(config)
    seen = path.stat().st_mtime if path.exists() else 0.0
    if seen >= max(since, time.time() - _SILENT_S):
        return ""
    return f"the sender to MLflow has not checked the outbox since {time.ctime(seen) if seen else 'its start'}"


def _ask(
    config: StackConfig, url: str, body: Any = None, method: str | None = None, headers: dict[str, str] | None = None
) -> bytes:
    """`headers`: a login in place of that of the stack."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    login = {"Authorization": basic_authorization(config.user_and_password())} if headers is None else headers
    request = urllib.request.Request(url, data=data, method=method, headers=login)
    request.add_header("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
    with urllib.request.urlopen(request, timeout=10) as reply:
        answer: bytes = reply.read()
    return answer


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error)
