"""A one-node Ray for this machine, in processes of its own, gone when its owner is gone.

`LocalRay` starts a supervisor (this module as a program), and the supervisor starts Ray. It is the subreaper of all
that Ray starts, so nothing escapes it, and it watches its parent: it ends everything at the exit of the context,
after Ctrl-C, and also when the parent was killed. It never looks at, or stops, another Ray on the machine.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from infra.local.processes import (
    KILLED_S,
    TERMINATED_S,
    adopt_orphans,
    child_environment,
    end_children,
    end_descendants,
    end_with_parent,
    free_ports,
    reap,
    tail,
    temporary_folder,
)

OBJECT_STORE_BYTES = 512 * 1024 * 1024
ORDERLY_S = 5.0  # Ray needs about 1 s. A job that is to write a checkpoint must be stopped before
_START_TIMEOUT_S = 90.0
_LOG, _SUPERVISOR_LOG = "local-ray.log", "local-ray-supervisor.log"  # the stack may keep its logs in the same folder
# What would attach our Ray, or its drivers, to something else.
FOREIGN_TO_RAY = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_NAMESPACE",
    "RAY_RUNTIME_ENV_HOOK",
    "RAY_TMPDIR",
)


class LocalRay:
    """Context: a Ray cluster of one node, with all CPUs (or `num_cpus`) and the GPUs that Ray finds.

    `env` is what clients set to use it: RAY_ADDRESS (the http URL of the job server, also `.address`) and the token.
    The dashboard listens on 127.0.0.1 and wants the token, as do Ray's own ports, which Ray opens on the address of
    the host; only its counters for Prometheus are open to all. At exit every process is ended, running jobs included
    (stop those that are to write a checkpoint before), and Ray's logs are in `log_dir`. Raises RuntimeError, with the
    last lines of the log, if Ray does not start.
    """

    def __init__(
        self, log_dir: Path, num_cpus: int | None = None, object_store_bytes: int = OBJECT_STORE_BYTES
    ) -> None:
        self._log_dir, self._num_cpus, self._object_store_bytes = log_dir.absolute(), num_cpus, object_store_bytes
        self.address = ""
        self.env: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        arguments = ["--log-dir", str(self._log_dir), "--object-store-bytes", str(self._object_store_bytes)]
        arguments += ["--parent", str(os.getpid())]
        arguments += ["--num-cpus", str(self._num_cpus)] if self._num_cpus else []
        with open(self._log_dir / _SUPERVISOR_LOG, "wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "infra.local.ray_node", *arguments],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends the supervisor in order
            )
        try:
            self._read_answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _read_answer(self) -> None:
        assert self._supervisor.stdout
        line = self._supervisor.stdout.readline()
        answer: dict[str, Any] = (
            json.loads(line) if line else {"error": f"the supervisor died:\n{tail(self._log_dir / _SUPERVISOR_LOG)}"}
        )
        if "error" in answer:
            raise RuntimeError(f"Ray did not start: {answer['error']}\nMore in {self._log_dir}.")
        self.env = answer["env"]
        self.address = self.env["RAY_ADDRESS"]

    def _end(self) -> None:
        self._supervisor.terminate()
        try:
            self._supervisor.wait(ORDERLY_S + TERMINATED_S + KILLED_S + 10)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"the supervisor of Ray, process {self._supervisor.pid}, has not ended; see {self._log_dir}."
            ) from error
        finally:
            assert self._supervisor.stdout
            self._supervisor.stdout.close()


def main() -> None:
    """The supervisor: start Ray, answer with one line of JSON, wait for the end, leave nothing behind."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--object-store-bytes", type=int, required=True)
    parser.add_argument("--num-cpus", type=int)
    arguments = parser.parse_args()
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked_to_end.append(number))
    adopt_orphans()

    def over() -> bool:
        return bool(asked_to_end) or os.getppid() != arguments.parent

    with temporary_folder() as folder:
        token = folder / "token"
        make_token(token)
        head = RayHead(folder / "ray", token, free_ports(1)[0], arguments.num_cpus, arguments.object_store_bytes)
        with open(arguments.log_dir / _LOG, "wb") as log:
            process = subprocess.Popen(
                head.command(),
                env=child_environment(head.environment(), FOREIGN_TO_RAY),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Should the supervisor itself be killed, Ray's head still ends in order.
                preexec_fn=end_with_parent,
            )
        children = {process.pid: process}
        try:
            answer: dict[str, Any] = {"env": head.client_environment()}
            problem = _wait_until_ready(process, head, over)
            if problem:
                answer = {"error": f"{problem}\n{tail(arguments.log_dir / _LOG)}"}
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(answer), flush=True)
            while not problem and not over() and process.returncode is None:
                reap(children)
                time.sleep(0.2)
        finally:
            end_children([process], ORDERLY_S)
            end_descendants(children)
            head.keep_logs(arguments.log_dir)


@dataclass(frozen=True)
class RayHead:
    """A head node that is yet to be started: its folder (short path), token file and port of the job server."""

    folder: Path
    token: Path
    dashboard_port: int
    num_cpus: int | None = None
    object_store_bytes: int = OBJECT_STORE_BYTES

    def command(self) -> list[str]:
        """Starts it, in the foreground. Other ports than the job server's are taken from those that are free now."""
        options = {
            "port": 0,
            "min-worker-port": 0,
            "max-worker-port": 0,
            "dashboard-agent-listen-port": 0,
            "ray-client-server-port": free_ports(1)[0],  # not used, but Ray cannot be told to leave it out
            "dashboard-host": "127.0.0.1",
            "dashboard-port": self.dashboard_port,
            "temp-dir": self.folder,
            "object-store-memory": self.object_store_bytes,
        }
        if self.num_cpus:
            options["num-cpus"] = self.num_cpus
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        return [*command, "--disable-usage-stats", "--no-monitor", *(f"--{k}={v}" for k, v in options.items())]

    def environment(self) -> dict[str, str]:
        """For its own processes, on top of what they inherit; FOREIGN_TO_RAY must not be among that."""
        return {
            "DASHBOARD_METRIC_PORT": str(free_ports(1)[0]),  # a fixed number by default, taken by the first stack
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` every driver would copy the working directory
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
        }

    def client_environment(self) -> dict[str, str]:
        """What a process needs to use it."""
        return {
            "RAY_ADDRESS": f"http://127.0.0.1:{self.dashboard_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
        }

    def problem(self, timeout_s: float = 5.0) -> str:
        """Empty when the job server knows a living node."""
        address = self.client_environment()["RAY_ADDRESS"]
        request = urllib.request.Request(f"{address}/api/v0/nodes")
        request.add_header("Authorization", f"Bearer {self.token.read_text()}")
        # The job server answers seconds before there is a node, and also where there will never be one.
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                nodes = json.load(reply)["data"]["result"]["result"]
        except (OSError, ValueError, KeyError) as error:
            return f"its job server {address} does not answer ({error})"
        return "" if any(n["state"] == "ALIVE" for n in nodes) else f"its job server {address} shows no living node"

    def keep_logs(self, log_dir: Path) -> None:
        """Copy the logs of Ray's own processes, and those of drivers, out of its folder."""
        for logs in self.folder.glob("session_2*/logs"):
            shutil.copytree(logs, log_dir / logs.parent.name, symlinks=True, dirs_exist_ok=True)


def make_token(path: Path) -> None:
    """A new secret for Ray, readable by its owner only."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def _wait_until_ready(process: subprocess.Popen[bytes], head: RayHead, over: Callable[[], bool]) -> str:
    """Empty once the job server knows a living node, else what went wrong."""
    deadline, problem = time.monotonic() + _START_TIMEOUT_S, ""
    while time.monotonic() < deadline:
        if over():
            return "it was asked to end before it was ready."
        if process.poll() is not None:
            return f"`ray start` ended with code {process.returncode}:"
        if not (problem := head.problem()):
            return ""
        time.sleep(0.1)
    return f"{problem} after {_START_TIMEOUT_S:g} s:"


if __name__ == "__main__":
    main()
