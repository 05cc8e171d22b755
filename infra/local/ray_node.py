"""A one-node Ray on this machine that ends with the process that started it.

`LocalRay` starts a supervisor (this module as a program), which starts Ray. The supervisor is the subreaper of all
processes of Ray, so it can end all of them. It does so when the context ends, after Ctrl-C, and when its parent was
killed. It does not touch any other Ray on the machine.
"""

import argparse
import contextlib
import inspect
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict

import psutil

from vitline.infra.children import (
    KILLED_S,
    TERMINATED_S,
    adopt_orphans,
    child_environment,
    end_children,
    end_descendants,
    end_with_parent,
    reap,
)
from vitline.infra.local.paths import write_private
from vitline.infra.local.processes import (
    STILL_S,
    Stillness,
    free_ports,
    load,
    short_temporary,
    tail,
    temporary_folder,
)
from vitline.infra.plain_text import last_words
from vitline.infra.ray_jobs import ONE_TRAINING

OBJECT_STORE_BYTES = 512 * 1024 * 1024
AGENT_PORTS = 4
ORDERLY_S = 5.0  # Ray needs about 1 s; jobs that should write a checkpoint must be stopped before
_SAY_EVERY_S = 30.0
_NO_LIMIT_S = "86400"
"""For Ray's own limits of starting: `Stillness` ends what makes no progress."""
_LOG, _SUPERVISOR_LOG = (
    "local-ray.log",
    "local-ray-supervisor.log",
)  # other names than the stack's logs in the same folder
_CERTIFICATES = ("RAY_USE_TLS", "RAY_TLS_")
# Variables that would connect this Ray, or its drivers, to something else.
FOREIGN_TO_RAY = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_NAMESPACE",
    "RAY_RUNTIME_ENV_HOOK",
    "RAY_TMPDIR",
)


class SupervisorAnswer(TypedDict, total=False):
    """A line that the supervisor prints: what it waits for; at last the variables for clients of its Ray, or why Ray did not start."""

    waiting: str
    env: dict[str, str]
    error: str


class LocalRay:
    """Context manager: a one-node Ray cluster with all CPUs (or `num_cpus`) and the GPUs that Ray finds.

    `env` has the variables for its clients: RAY_ADDRESS (the http URL of the job server, also `.address`) and the token.
    All its ports are on 127.0.0.1, unless `more_nodes` may join. Those for gRPC demand a certificate that only this user can read, the
    others the token; without it they only give counters (for Prometheus) and health
    checks. At the end of the context all processes are ended, including running jobs (stop jobs that should write a
    checkpoint before), and Ray's logs are copied to `log_dir`. The start waits as long as Ray makes progress, and `announce`s what it
    waits for. Raises RuntimeError with the last error of the log if Ray does not start.
    """

    def __init__(
        self,
        log_dir: Path,
        num_cpus: int | None = None,
        object_store_bytes: int = OBJECT_STORE_BYTES,
        more_nodes: bool = False,
        announce: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._more_nodes, self._announce = more_nodes, announce
        self._log_dir, self._num_cpus, self._object_store_bytes = log_dir.absolute(), num_cpus, object_store_bytes
        self.address = ""
        self.env: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        arguments = ["--log-dir", str(self._log_dir), "--object-store-bytes", str(self._object_store_bytes)]
        arguments += ["--parent", str(os.getpid())]
        arguments += ["--num-cpus", str(self._num_cpus)] if self._num_cpus is not None else []
        arguments += ["--more-nodes"] if self._more_nodes else []
        with open(self._log_dir / _SUPERVISOR_LOG, "wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "vitline.infra.local.ray_node", *arguments],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach only the parent, which then ends the supervisor
            )
        try:
            self._read_answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def has_ended(self) -> bool:
        """Whether Ray has ended by itself; nothing starts it again."""
        return self._supervisor.poll() is not None

    def _read_answer(self) -> None:
        assert self._supervisor.stdout
        while (line := self._supervisor.stdout.readline()) and "waiting" in (said := json.loads(line)):
            self._announce(said["waiting"])
        answer: SupervisorAnswer = (
            json.loads(line)
            if line
            else {"error": f"its supervisor died: {last_words(tail(self._log_dir / _SUPERVISOR_LOG))}"}
        )
        if "error" in answer:
            raise RuntimeError(f"Ray did not start: {answer['error'].rstrip('.')}. See {self._log_dir / _LOG}.")
        self.env = answer["env"]
        self.address = self.env["RAY_ADDRESS"]

    def _end(self) -> None:
        self._supervisor.terminate()
        try:
            self._supervisor.wait(ORDERLY_S + TERMINATED_S + KILLED_S + 10)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"the supervisor of Ray, process {self._supervisor.pid}, did not end. See {self._log_dir}."
            ) from error
        finally:
            assert self._supervisor.stdout
            self._supervisor.stdout.close()


def main() -> None:
    """The supervisor: starts Ray, prints one line of JSON, waits for the end, and ends all processes of Ray."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--object-store-bytes", type=int, required=True)
    parser.add_argument("--num-cpus", type=int)
    parser.add_argument("--more-nodes", action="store_true")
    arguments = parser.parse_args()
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked_to_end.append(number))
    adopt_orphans()

    def over() -> bool:
        return bool(asked_to_end) or os.getppid() != arguments.parent

    if problem := _serve(arguments, over):
        _answer({"error": problem})


def _serve(arguments: argparse.Namespace, over: Callable[[], bool]) -> str:
    """Runs Ray until `over()`, then ends all its processes. Returns the reason if it did not start, else an empty text."""
    with temporary_folder() as folder:
        token = folder / "token"
        make_token(token)
        login = write_private(folder / "login", f"vitline:{secrets.token_hex(16)}")
        options = arguments.num_cpus, arguments.object_store_bytes, arguments.more_nodes
        head = RayHead(folder / "ray", token, login, free_ports(1)[0], *options)
        environment = head.environment()
        with open(arguments.log_dir / _LOG, "wb") as log:
            process = subprocess.Popen(
                head.command(),
                env=child_environment(environment, FOREIGN_TO_RAY),
                cwd=folder,  # its dashboard lets a worker of its own search the current folder first
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # If the supervisor itself is killed, Ray's head still ends in order.
                preexec_fn=end_with_parent,
            )
        children = {process.pid: process}
        try:
            if problem := _wait_until_ready(process, head, over):
                return f"{problem}: {last_words(tail(arguments.log_dir / _LOG))}"
            certificates = {name: value for name, value in environment.items() if name.startswith(_CERTIFICATES)}
            _answer({"env": head.client_environment() | certificates})
            while not over() and process.returncode is None:
                reap(children)
                time.sleep(0.2)
            return ""
        finally:
            end_children([process], ORDERLY_S)
            end_descendants(children)
            head.keep_logs(arguments.log_dir)


def _answer(line: SupervisorAnswer) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(line), flush=True)


@dataclass(frozen=True)
class RayHead:
    """The settings of a head node: its folder (with a short path), files with its token and with the login of its page, and the port
    of page and job server."""

    folder: Path
    token: Path
    login: Path
    page_port: int
    num_cpus: int | None = None
    object_store_bytes: int = OBJECT_STORE_BYTES
    more_nodes: bool = False
    """Whether further nodes may join. Ray then listens on all addresses."""

    def command(self) -> list[str]:
        """The command that runs it in the foreground, behind its page. Ports other than that of the page are free ones."""
        dashboard, client, *agents = free_ports(2 + AGENT_PORTS)
        options = {
            "port": 0,
            "ray-client-server-port": client,  # not used, but Ray always opens it
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "temp-dir": self.folder,
            "object-store-memory": self.object_store_bytes,
            "resources": json.dumps({ONE_TRAINING: 1}),
        }
        if self.num_cpus is not None:
            options["num-cpus"] = self.num_cpus
        page = [sys.executable, "-P", "-m", "vitline.infra.local.access.ray_page", f"--port={self.page_port}"]
        page += [f"--dashboard-port={dashboard}", f"--login={self.login}", "--"]
        return [*page, *node_command(options, agents), "--head", "--no-monitor"]

    def environment(self) -> dict[str, str]:
        """Variables for its processes, in addition to the inherited ones, from which FOREIGN_TO_RAY must be removed.

        Makes the certificates that all gRPC clients and servers of this Ray must have. Ray checks its token only after it has begun
        some calls: one `RaySyncer.StartSync` without a token ends a raylet.
        """
        from vitline.infra.local.mutual_tls import make_certificates  # takes 0.1 s to import

        authority, certificate, key = map(str, make_certificates(self.folder.with_name("ray-tls")))
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_CA_CERT": authority,
            "RAY_TLS_SERVER_CERT": certificate,
            "RAY_TLS_SERVER_KEY": key,
            # Its name is older than its use: with 0, the address of the node is 127.0.0.1, and Ray listens there only.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1" if self.more_nodes else "0",
            "DASHBOARD_METRIC_PORT": str(free_ports(1)[0]),  # by default a fixed port, which the first stack occupies
            # The defaults are 30 to 100 s, which are too short on a busy machine.
            "RAY_gcs_server_port_wait_time_s": _NO_LIMIT_S,
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": _NO_LIMIT_S,
            "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": _NO_LIMIT_S,
            "RAY_agent_register_timeout_ms": f"{_NO_LIMIT_S}000",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # otherwise every driver copies the working directory under `uv run`
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_OVERRIDE_DASHBOARD_URL": f"127.0.0.1:{self.page_port}",  # what drivers print
            "VITLINE_ONE_NODE_RAY": "1",  # tells jobs not to wait for GPUs of further nodes
            # Workers that Ray starts for a first driver lack the environment of its job: it never uses them.
            "RAY_prestart_worker_first_driver": "0",
            # Seldom instead of every 5 s: the dashboard's load of this node, and metrics that nobody collects.
            "REPORTER_UPDATE_INTERVAL_MS": "30000",
            "METRICS_RECORD_INTERVAL_S": "30",
            "RAY_metrics_report_interval_ms": "60000",
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process of each training that watches other nodes
            **short_temporary(self.folder.parent),  # its dashboard has sockets there
        }

    def client_environment(self) -> dict[str, str]:
        """The variables with which a process can use it."""
        return {
            "RAY_ADDRESS": f"http://127.0.0.1:{self.page_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
        }

    def problem(self, timeout_s: float = 5.0) -> str:
        """Empty if the job server shows a living node, else what is wrong."""
        address = self.client_environment()["RAY_ADDRESS"]
        request = urllib.request.Request(f"{address}/api/v0/nodes")
        request.add_header("Authorization", f"Bearer {self.token.read_text()}")
        # The job server answers seconds before there is a node, and even if there will never be one.
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                nodes = json.load(reply)["data"]["result"]["result"]
        except (OSError, ValueError, KeyError) as error:
            return f"its job server {address} does not answer ({error})"
        return "" if any(n["state"] == "ALIVE" for n in nodes) else f"its job server {address} shows no living node"

    def keep_logs(self, log_dir: Path) -> None:
        """Copies the logs of Ray's processes and of drivers to `log_dir`."""
        for logs in self.folder.glob("session_2*/logs"):
            shutil.copytree(logs, log_dir / logs.parent.name, symlinks=True, dirs_exist_ok=True)


def make_token(path: Path) -> None:
    """Writes a new secret token for Ray, readable by its owner only."""
    write_private(path, secrets.token_hex(32))


def _wait_until_ready(process: subprocess.Popen[bytes], head: RayHead, over: Callable[[], bool]) -> str:
    """Waits until the job server shows a living node. Returns what went wrong, or an empty text. Waits while its
    processes make progress."""
    began, stillness = time.monotonic(), Stillness()
    said = began
    while True:
        if over():
            return "it was stopped before it was ready"
        if process.poll() is not None:
            return f"`ray start` ended with code {process.returncode}"
        if not (problem := head.problem()):
            return ""
        now = time.monotonic()
        if stillness.seconds(process.pid) > STILL_S:
            return f"{problem} after {now - began:.0f} s, and its processes have done nothing for {STILL_S:.0f} s"
        if now - said > _SAY_EVERY_S:
            said = now
            _answer({"waiting": f"Ray is starting: {problem} yet, after {now - began:.0f} s ({load()})"})
        time.sleep(0.1)


def node_command(options: Mapping[str, object], agent_ports: Sequence[int]) -> list[str]:
    """The command that runs a node in the foreground, with AGENT_PORTS free ports for its agents: the raylet ends if one has not chosen
    its own within a fixed 15 s, as on a busy machine."""
    agents = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")
    ports = {"min-worker-port": 0, "max-worker-port": 0} | {
        f"{of}-port": port for of, port in zip(agents, agent_ports, strict=True)
    }
    program = "from vitline.infra.local.ray_node import ray_start; ray_start()"
    command = [sys.executable, "-P", "-c", program, "start", "--block", "--disable-usage-stats", "--log-color=false"]
    return command + [f"--{name}={value}" for name, value in {**ports, **options}.items()]


def ray_start() -> None:
    """The command `ray` of this process's arguments, whose `start` waits for its node while it makes progress: Ray itself gives up
    after a fixed 30 s, which a busy machine may need for more than its start. The raylet gives up if the agent has not written
    within 15 s which port it listens on, also if it was given that port: it is written here."""
    from ray import _raylet
    from ray._private import services
    from ray.scripts.scripts import main as ray

    get_node: Callable[..., Any] = services.get_node
    start_raylet: Callable[..., Any] = services.start_raylet
    compiled: Any = _raylet  # without types
    stillness = Stillness()

    def patient(*arguments: Any, **named: Any) -> Any:
        while True:
            try:
                return get_node(*arguments, **named)
            except RuntimeError:
                ended = any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())
                if ended or stillness.seconds(os.getpid()) > STILL_S:
                    raise
            time.sleep(0.2)

    def told_the_port(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(start_raylet).bind(*arguments, **named).arguments
        if port := given.get("dashboard_agent_listen_port"):
            compiled.persist_port(given["session_dir"], given["node_id"], "dashboard_agent_listen_port", port)
        return start_raylet(*arguments, **named)

    services.get_node, services.start_raylet = patient, told_the_port
    ray()


if __name__ == "__main__":
    main()
