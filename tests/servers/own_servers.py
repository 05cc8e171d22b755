"""A Prefect with a worker, an MLflow and a Ray of a test's own, whose servers can be taken away and whose databases locked."""

import contextlib
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil

from vitline.infra.children import child_environment, is_running
from vitline.infra.local.databases import database_file
from vitline.infra.local.processes import free_ports, temporary_folder
from vitline.infra.local.stack import check_services, find_stack, stack_environment, start_stack, stop_stack
from vitline.infra.plain_text import last_words

from ..end_to_end.check_server_logs import unexplained_tracebacks
from ..eventually import eventually
from .stack import FINAL

SERVICES = ("mlflow", "prefect", "prefect-worker", "sender", "ray")
PORTS = ("mlflow", "prefect", "ray")
# What a client or a server says of a server that is away is the fault itself.
AWAY = (
    "Connect(ion)?(Error|Refused)|connection attempts failed|Max retries exceeded|disconnected|RemoteProtocolError"
    "|did not receive a valid HTTP response"  # of a server that was killed while a websocket was opened
    # Prefect on SQLite inserts a row without values where a client sends again, after a break, only events that are stored.
    r"|NOT NULL constraint failed: events\.occurred"
    # What watches for cancels in Prefect's worker gives up after a while; flows read their own state.
    r"|prefect-worker\.log: .*(Service exceeded error threshold|NoEventLoopError|CancelledError)"
)
_KILLED_S, _BACK_S, _ENDED_S, _LOCK_S, _BUSY_S = 10.0, 600.0, 600.0, 60.0, 60.0


class OwnServers:
    """The servers, which work on the root that they were given."""

    def __init__(self, directory: Path, log_dir: Path) -> None:
        self.directory, self.log_dir = directory, log_dir
        self.env = stack_environment(directory)
        login = self.env["MLFLOW_TRACKING_USERNAME"], self.env["MLFLOW_TRACKING_PASSWORD"]  # those of Prefect, too
        url = {"prefect": self.env["PREFECT_API_URL"], "mlflow": f"{self.env['MLFLOW_TRACKING_URI']}/api/2.0/mlflow"}
        self._logged = dict[str, int]()
        self._apis = {name: httpx.Client(base_url=url[name], auth=login, timeout=60) for name in url}

    def ask(
        self, server: str, path: str, body: dict[str, Any] | None = None, method: str = "POST", **query: Any
    ) -> Any:
        """The JSON that Prefect or MLflow answers to a GET, or to a `method` with `body`."""
        method = "GET" if body is None else method
        reply = answer_of(lambda: self._apis[server].request(method, path, json=body, params=query))
        return reply.json() if reply.content else None

    def deploy(self) -> None:
        """Registers the flows. The reconciler is paused: it must not repair what a test finds."""
        command = [sys.executable, "-P", "-m", "vitline.flows.cli.main", "flows", "deploy"]
        done = subprocess.run(command, env=child_environment(self.env), capture_output=True, text=True)
        assert done.returncode == 0, f"the flows cannot be registered: {last_words(done.stderr)}"
        reconcile = self.ask("prefect", "/deployments/name/reconcile/default")["id"]
        self.ask("prefect", f"/deployments/{reconcile}", {"paused": True}, method="PATCH")

    def start(self, deployment: str, request: dict[str, Any], in_s: float = 0.0) -> str:
        """Starts a deployment as its page in Prefect does, now or later; the id of the flow run."""
        at = (datetime.now(UTC) + timedelta(seconds=in_s)).isoformat()
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": at}}
        found = self.ask("prefect", f"/deployments/name/{deployment}")["id"]
        run = {"parameters": {"request": request}, "state": state}
        return str(self.ask("prefect", f"/deployments/{found}/create_flow_run", run)["id"])

    def ended(self, flow_run: str) -> str:
        """The name of its final state and the message of that."""
        found = dict[str, Any]()

        def is_final() -> bool:
            with contextlib.suppress(httpx.HTTPError):  # a server that has just come back
                found.update(self.ask("prefect", f"/flow_runs/{flow_run}"))
            return found.get("state_type") in FINAL

        eventually(is_final, _ENDED_S, f"the end of flow run {flow_run} in Prefect")
        return f"{found['state_name']}: {found['state']['message']}"

    def curve(self, run_key: str, metric: str) -> list[tuple[int, float]]:
        """Steps and values that MLflow has of a metric, each point as often as it is there; of no run, none."""
        experiments = self.ask("mlflow", "/experiments/search", {"max_results": 100}).get("experiments", ())
        wanted = {"experiment_ids": [experiment["experiment_id"] for experiment in experiments]}
        found = self.ask("mlflow", "/runs/search", wanted | {"filter": f"tags.`vitline.run_key` = '{run_key}'"})
        points = list[tuple[int, float]]()
        for run in found.get("runs", ()):
            query = {"run_id": run["info"]["run_id"], "metric_key": metric, "max_results": 25_000}
            history = self.ask("mlflow", "/metrics/get-history", **query).get("metrics", ())
            points += [(int(point["step"]), float(point["value"])) for point in history]
        return sorted(points)

    def has_points(self, run_key: str, metric: str, number: int) -> bool:
        """Whether MLflow answers and has at least so many points of a metric."""
        with contextlib.suppress(httpx.HTTPError):
            return len(self.curve(run_key, metric)) >= number
        return False

    @contextlib.contextmanager
    def away(self, service: str) -> Iterator[None]:
        """SIGKILL to every process of a service, which stays away until the end of the context: meanwhile the supervisor, which
        starts it again, stands still."""
        stack = find_stack(self.directory)
        assert stack is not None
        supervisor = psutil.Process(stack.supervisor_pid)
        (pid,) = (each.pid for each in stack.services if each.name == service)
        supervisor.suspend()
        try:
            server = psutil.Process(pid)
            processes = [server, *server.children(recursive=True)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs([process for process in processes if is_running(process)], _KILLED_S)
            yield
        finally:  # also for the next test, which uses the same servers
            supervisor.resume()
            eventually(lambda: not any(check_services(self.directory).values()), _BACK_S, f"{service} works again")

    @contextlib.contextmanager
    def locked(self, service: str) -> Iterator[None]:
        """Another process holds the lock of the SQLite database of a service, as a copy of it or a look into it may."""
        file = database_file(self.directory, service)
        with contextlib.closing(sqlite3.connect(file, timeout=_LOCK_S, isolation_level=None)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            yield  # closing the connection releases the lock

    def new_tracebacks(self, explained: str) -> list[str]:
        """Those in the logs of the servers since the last call whose text does not match a pattern."""
        new = list[str]()
        for line in unexplained_tracebacks(self.log_dir):
            log, times, text = re.fullmatch(r"(\S+: )(\d+) x (.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
            before, self._logged[log + text] = self._logged.get(log + text, 0), int(times)
            if int(times) > before and not re.search(explained, line):
                new.append(line)
        return new


def answer_of(request: Callable[[], httpx.Response]) -> httpx.Response:
    """The answer of a server that is up. It answers 503 for a moment where another of its own writers holds its database."""
    deadline = time.monotonic() + _BUSY_S
    while (reply := request()).status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < deadline:
        time.sleep(0.2)
    return reply.raise_for_status()


@contextlib.contextmanager
def own_servers(root: str | None, num_cpus: int = 1) -> Iterator[OwnServers]:
    """The servers, with the flows registered, until the context ends. They use the store at `root`; None: an S3 server of their own,
    which can be taken away as well. `num_cpus`: of Ray."""
    s3 = () if root else ("s3",)
    ports = (*s3, *PORTS)
    with temporary_folder() as folder:
        directory, logs = folder / "stack", folder / "logs"
        start_stack(
            directory,
            log_dir=logs,
            services=(*s3, *SERVICES),
            ports=dict(zip(ports, free_ports(len(ports)), strict=True)),
            root=root,
            num_cpus=num_cpus,
            ends_with_caller=True,
            announce=lambda text: None,
        )
        try:
            servers = OwnServers(directory, logs)
            servers.deploy()
            servers.new_tracebacks("")  # a start that was tried twice, as on a busy machine, is none of the faults
            yield servers
        finally:
            stop_stack(directory)
