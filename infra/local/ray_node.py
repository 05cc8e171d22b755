"""A one-node Ray for this machine, in processes of its own, gone when its owner is gone.

`LocalRay` starts a supervisor (this module as a program), and the supervisor starts Ray. It is the subreaper of all
that Ray starts, so nothing escapes it, and it watches its parent: it ends everything at the exit of the context,
after Ctrl-C, and also when the parent was killed. It never looks at, or stops, another Ray on the machine.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Self

import psutil

from infra.settings import inherited_environment

_OBJECT_STORE_BYTES = 512 * 1024 * 1024
_START_TIMEOUT_S = 90.0
_ORDERLY_S = 5.0  # Ray needs about 1 s
_TERMINATED_S = 2.0  # for drivers of jobs: a job that is to write a checkpoint must be stopped before
_KILLED_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# What would attach our Ray, or its drivers, to something else.
_FOREIGN = (
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
        self, log_dir: Path, num_cpus: int | None = None, object_store_bytes: int = _OBJECT_STORE_BYTES
    ) -> None:
        self._log_dir, self._num_cpus, self._object_store_bytes = log_dir.absolute(), num_cpus, object_store_bytes
        self.address = ""
        self.env: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        arguments = ["--log-dir", str(self._log_dir), "--object-store-bytes", str(self._object_store_bytes)]
        arguments += ["--parent", str(os.getpid())]
        arguments += ["--num-cpus", str(self._num_cpus)] if self._num_cpus else []
        with open(self._log_dir / "supervisor.log", "wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "infra.local.ray_node", *arguments],
                env=_environment(),
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
            json.loads(line) if line else {"error": f"the supervisor died:\n{_tail(self._log_dir, 'supervisor')}"}
        )
        if "error" in answer:
            raise RuntimeError(f"Ray did not start: {answer['error']}\nMore in {self._log_dir}.")
        self.env = answer["env"]
        self.address = self.env["RAY_ADDRESS"]

    def _end(self) -> None:
        self._supervisor.terminate()
        try:
            self._supervisor.wait(_ORDERLY_S + _TERMINATED_S + _KILLED_S + 10)
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
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def over() -> bool:
        return bool(asked_to_end) or os.getppid() != arguments.parent

    with _temporary_folder() as folder:
        head, env = _start_head(folder, arguments)
        try:
            answer: dict[str, Any] = {"env": env}
            problem = _wait_until_ready(head, env, over)
            if problem:
                answer = {"error": f"{problem}\n{_tail(arguments.log_dir, 'ray')}"}
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(answer), flush=True)
            while not problem and not over() and head.poll() is None:
                _reap()
                time.sleep(0.2)
        finally:
            _end_descendants(head)
            for logs in folder.glob("ray/session_2*/logs"):
                shutil.copytree(logs, arguments.log_dir / logs.parent.name, symlinks=True, dirs_exist_ok=True)


def _start_head(folder: Path, arguments: argparse.Namespace) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """Ray's head process and the environment of its clients."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    dashboard, client_server, metrics = _free_ports(3)
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    options = {
        "port": 0,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "dashboard-agent-listen-port": 0,
        "ray-client-server-port": client_server,  # not used, but Ray cannot be told to leave it out
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard,
        "temp-dir": folder / "ray",
        "object-store-memory": arguments.object_store_bytes,
    }
    if arguments.num_cpus:
        options["num-cpus"] = arguments.num_cpus
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--disable-usage-stats", "--no-monitor", *(f"--{name}={value}" for name, value in options.items())]
    environment = _environment(
        without=_FOREIGN,
        DASHBOARD_METRIC_PORT=str(metrics),  # a fixed number by default, taken by the first stack of a machine
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",  # under `uv run` every driver would copy the working directory
        **auth,
    )
    with open(arguments.log_dir / "ray.log", "wb") as log:
        head = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Should the supervisor itself be killed, Ray's head still ends in order.
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    return head, {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}", **auth}


def _wait_until_ready(head: subprocess.Popen[bytes], env: dict[str, str], over: Callable[[], bool]) -> str:
    """Empty once the job server knows a living node, else what went wrong."""
    request = urllib.request.Request(f"{env['RAY_ADDRESS']}/api/v0/nodes")
    request.add_header("Authorization", f"Bearer {Path(env['RAY_AUTH_TOKEN_PATH']).read_text()}")
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if over():
            return "it was asked to end before it was ready."
        if head.poll() is not None:
            return f"`ray start` ended with code {head.returncode}:"
        # The job server answers seconds before there is a node, and also where there will never be one.
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=5) as reply:
            if any(node["state"] == "ALIVE" for node in json.load(reply)["data"]["result"]["result"]):
                return ""
        time.sleep(0.1)
    return f"its job server {env['RAY_ADDRESS']} showed no node within {_START_TIMEOUT_S:g} s:"


def _end_descendants(head: subprocess.Popen[bytes]) -> None:
    """End Ray in its own order, then whatever is left of it: SIGTERM, SIGKILL. No descendant and no zombie remains."""
    head.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        head.wait(_ORDERLY_S)
    for number, patience_s in ((signal.SIGTERM, _TERMINATED_S), (signal.SIGKILL, _KILLED_S)):
        deadline = time.monotonic() + patience_s
        told: set[psutil.Process] = set()
        while (living := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
            for process in set(living) - told:  # those that were forked in the meantime, too
                told.add(process)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            _reap()
            time.sleep(0.05)
    if living:
        print(f"still there after SIGKILL: {living}", file=sys.stderr)


def _reap() -> None:
    """Collect what ended among the orphans that came to us; Ray leaves a watcher behind after every job."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _environment(without: Collection[str] = (), **changes: str) -> dict[str, str]:
    """For a child process: `python` is this Python, and it imports this project, installed or not."""
    environment = inherited_environment(without, **changes)
    commands = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    root = Path(__file__).parents[2]
    # An installed package is found anyway, and site-packages in PYTHONPATH would go before the standard library.
    packages = [str(root)] if (root / "pyproject.toml").exists() else []
    packages += [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    return environment | {"PATH": os.pathsep.join(commands), "PYTHONPATH": os.pathsep.join(packages)}


def _free_ports(count: int) -> list[int]:
    """Free ports below those that the system gives to outgoing connections, which could be taken before Ray starts."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports += [port] if port not in ports else []
    return ports


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A private folder with a short path: Ray makes Unix sockets below it, and their paths have at most 107 bytes."""
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="vl-", dir=base if len(base) <= 16 else "/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prctl(option: int, value: int) -> None:
    # Linux only; elsewhere the process tree still shows all that Ray did not cut loose.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _tail(log_dir: Path, name: str, num_lines: int = 20) -> str:
    with contextlib.suppress(OSError):
        return "\n".join((log_dir / f"{name}.log").read_text(errors="replace").splitlines()[-num_lines:])
    return "(no log)"


if __name__ == "__main__":
    main()
