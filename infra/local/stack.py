"""The local stack: an S3 store, MLflow, a Prefect server with a worker, and a one-node Ray, started and stopped together.

A supervisor runs them and outlives the command that started it (supervisor.py). Their data, ports and secrets are in the
folder of the stack (stack_config.py), so that links and data stay the same after `stop_stack` and `start_stack`.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import psutil

from vitline.infra.children import child_environment, end_strangers, find_process, is_running, processes_with
from vitline.infra.local import databases, seaweed
from vitline.infra.local.paths import make_private
from vitline.infra.local.processes import tail
from vitline.infra.local.service_logs import open_private, set_aside
from vitline.infra.local.services import links, programs
from vitline.infra.local.stack_config import (
    ALL,
    NO_SERVERS,
    OWNER_VARIABLE,
    StackConfig,
    foreign_servers,
    load_stack_config,
    prepare_stack_config,
    refuse_unknown,
    same_root,
)
from vitline.infra.local.state import (
    Service,
    StackState,
    read_processes,
    read_state,
    restart_request,
    with_ended_services,
)
from vitline.infra.ray_jobs import AWAY_S

_END_TIMEOUT_S = 40.0
_NO_PORTS: Mapping[str, int] = {}


class Listener(NamedTuple):
    """A port on which a process of the stack listens."""

    service: str
    address: str
    port: int

    @property
    def loopback(self) -> bool:
        return self.reach == "loopback"

    @property
    def reach(self) -> str:
        """The addresses it listens on: `loopback` (this machine only), `all addresses`, or one address of the machine."""
        address = ip_address(self.address)
        address = getattr(address, "ipv4_mapped", None) or address
        return "loopback" if address.is_loopback else "all addresses" if address.is_unspecified else str(address)


def start_stack(
    directory: Path,
    *,
    log_dir: Path,
    services: Sequence[str] = ALL,
    ports: Mapping[str, int] = _NO_PORTS,
    root: str | None = None,
    foreign: Mapping[str, str] = NO_SERVERS,
    check: Callable[[StackConfig], object] = lambda config: None,
    num_cpus: int | None = None,
    ends_with_caller: bool = False,
    announce: Callable[[str], None],
) -> StackState:
    """Starts the stack in `directory` and checks that every service works. A running stack is returned unchanged.

    `ports` sets ports of s3, mlflow, prefect or ray; others stay as before, or are the well-known ones, or free ones.
    With `root`, the path or URI of an existing store, the stack uses that store and starts none; its credentials come
    from this environment and are not written anywhere. The same holds for `foreign`, addresses of the user's own servers in
    place of mlflow, prefect (its API) or ray. `check` is called before anything is started. Ray uses all CPUs, or `num_cpus`.
    With `ends_with_caller` the stack ends with this process, even if it is killed; else it runs until `stop_stack`. Raises
    RuntimeError with the last log lines of a service that did not start, or the reason why a database cannot be migrated or
    SeaweedFS's program is refused, and ValueError for invalid names, ports and stores; then nothing runs.
    """
    refuse_unknown(services)
    directory, log_dir = directory.absolute(), log_dir.absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_private(log_dir)
    with _one_at_a_time(directory, announce):
        running = find_stack(directory)
        if running:
            _check_same(directory, running, services, ports, root, foreign)
            announce("the stack is already up")
            return running
        if stop_stack(directory):
            announce("ended processes that an earlier stack had left")
        config, notes = prepare_stack_config(directory, ports, root, num_cpus, foreign)
        for note in notes:
            announce(note)
        check(config)
        wanted = [name for name in ALL if name in services and config.starts(name)]
        for name in ("mlflow", "prefect"):
            if name in wanted:
                databases.prepare_database(directory, name, announce)
        try:
            run_supervisor(config, log_dir, wanted, ends_with_caller, announce)
            state = find_stack(directory)
            if state is None:
                raise RuntimeError(
                    f"the stack ended at once:\n{tail(log_dir / 'stack.log')}\nSee the logs in {log_dir}."
                )
            _check_loopback(directory)
        except BaseException:
            stop_stack(directory)
            raise
    return state


def stop_stack(directory: Path) -> bool:
    """Stops the stack in `directory`, or ends the processes that a killed supervisor has left. False if there was nothing.

    Ends only processes that the stack itself has recorded or marked. Its jobs and flow runs end too. Raises RuntimeError
    if a process cannot be ended.
    """
    directory = directory.absolute()
    config, state = load_stack_config(directory), read_state(directory)
    if config is None:
        return False
    supervisor = find_process(state.supervisor_pid, state.supervisor_birth) if state else None
    if supervisor:
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor.terminate()
        _wait(lambda: not is_running(supervisor), _END_TIMEOUT_S)
    left = {p for p in read_processes(directory) | processes_with(OWNER_VARIABLE, f"{config.id}/") if is_running(p)}
    end_strangers(left)
    seaweed.remove_sockets(config)
    shutil.rmtree(config.folder, ignore_errors=True)
    for path in (*directory.glob("restart-*"), directory / "stack.json", directory / "processes.json"):
        path.unlink(missing_ok=True)
    return state is not None or bool(left)


def find_stack(directory: Path) -> StackState | None:
    """The state of the running stack in `directory`, from its supervisor and its current processes; None if none runs."""
    state = read_state(directory.absolute())
    return with_ended_services(state) if state and find_process(state.supervisor_pid, state.supervisor_birth) else None


def stack_environment(directory: Path) -> dict[str, str]:
    """The variables with which a process can use the stack in `directory`, including credentials.

    They are the same while the stack is down. Raises RuntimeError if there never was one.
    """
    return _stack_config(directory).environment()


def stack_links(directory: Path) -> dict[str, str]:
    """The web pages of the stack in `directory`, by name."""
    return links(_stack_config(directory))


def login_file(directory: Path) -> Path:
    """The file with `user:password` for the pages of Prefect and MLflow."""
    return _stack_config(directory).login


def restart_service(directory: Path, name: str) -> None:
    """Restarts one service on the same ports and waits until it works. Raises RuntimeError if it does not."""
    refuse_unknown([name])
    before = _service(directory, name)
    request = restart_request(directory.absolute(), name)
    request.touch()

    def over() -> bool:
        now = _service(directory, name)
        return not request.exists() and now.pid != before.pid and now.state in ("up", "failed", "down")

    _wait(over, AWAY_S)
    now = _service(directory, name)
    if now.state != "up" or now.pid == before.pid:
        request.unlink(missing_ok=True)
        raise RuntimeError(f"{name} did not start again: {now.problem or now.state}\nSee {now.log}.")


def check_services(directory: Path) -> dict[str, str]:
    """Checks each service of the running stack in `directory`: what is wrong, or an empty text, by service."""
    config, state = _stack_config(directory), find_stack(directory)
    every, names = programs(), [service.name for service in state.services] if state else []
    with ThreadPoolExecutor(len(ALL)) as pool:
        return dict(zip(names, pool.map(lambda name: every[name].check(config, 0.0), names), strict=True))


def listeners(directory: Path) -> list[Listener]:
    """All TCP ports on which the stack in `directory` listens, including those of Ray's jobs."""
    found = set()
    for name, processes in processes_of(directory).items():
        for process in processes:
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.add(Listener(name, connection.laddr.ip, connection.laddr.port))
    return sorted(found)


def reached_ports(found: Iterable[Listener]) -> dict[tuple[str, str], list[int]]:
    """The ports of each service by reach, loopback first: {("ray", "all addresses"): [6379, ...]}."""
    ports: dict[tuple[str, str], set[int]] = {}
    for listener in sorted(found, key=lambda listener: (not listener.loopback, listener.service, listener.reach)):
        ports.setdefault((listener.service, listener.reach), set()).add(listener.port)
    return {where: sorted(numbers) for where, numbers in ports.items()}


def memory_bytes(directory: Path) -> dict[str, int]:
    """Memory of each service with all its processes, shared pages counted in parts (PSS)."""
    sums = {}
    for name, processes in processes_of(directory).items():
        sums[name] = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                info = process.memory_full_info()
                sums[name] += getattr(info, "pss", info.uss)
    return sums


def run_supervisor(
    config: StackConfig,
    log_dir: Path,
    services: Sequence[str],
    ends_with_caller: bool,
    announce: Callable[[str], None],
) -> "subprocess.Popen[bytes]":
    """Starts the supervisor, waits until all services work, and returns its process."""
    for name in ("stack", *services):
        set_aside(log_dir / f"{name}.log")
    command = [sys.executable, "-P", "-m", "vitline.infra.local.supervisor", "--directory", str(config.directory)]
    command += ["--log-dir", str(log_dir), "--parent", str(os.getpid()), "--services", ",".join(services)]
    command += ["--ends-with-parent"] if ends_with_caller else []
    with open(open_private(log_dir / "stack.log"), "ab") as log:
        supervisor = subprocess.Popen(
            command,
            env=child_environment({OWNER_VARIABLE: f"{config.id}/supervisor"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C must reach only this process, which then ends the supervisor
        )
    assert supervisor.stdout
    what = "Ray" if config.only_ray else "The stack"
    try:
        with supervisor.stdout:
            for line in supervisor.stdout:
                message = json.loads(line)
                if "up" in message:
                    announce(f"{message['up']} is up after {message['seconds']} s")
                elif "waiting" in message:
                    announce(message["waiting"])
                elif "error" in message:
                    raise RuntimeError(f"{what} did not start: {message['error']}\nSee the logs in {log_dir}.")
                else:
                    return supervisor
        raise RuntimeError(
            f"{what} did not start, its supervisor died:\n{tail(log_dir / 'stack.log')}\nSee the logs in {log_dir}."
        )
    except BaseException:
        supervisor.terminate()
        supervisor.wait()  # it ends all services that it has started
        raise


@contextlib.contextmanager
def _one_at_a_time(directory: Path, announce: Callable[[str], None]) -> Iterator[None]:
    with open(directory / "up.lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce("another `vitline stack up` is running here; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_same(
    directory: Path,
    running: StackState,
    services: Sequence[str],
    ports: Mapping[str, int],
    root: str | None,
    foreign: Mapping[str, str],
) -> None:
    config = _stack_config(directory)
    same_root(config, root)
    for name, address in foreign_servers(config, foreign, running=True).items():
        if config.foreign.get(name) != address:
            raise RuntimeError(
                f"the stack in {directory} uses {name} at {config.address(name)}, not at {address}. Run `vitline stack down` first, "
                "then up again."
            )
    there = {service.name for service in running.services}
    missing = [name for name in services if name not in there and config.starts(name)]
    if missing:
        raise RuntimeError(
            f"the stack in {directory} runs without {', '.join(missing)}. Run `vitline stack down` first, then up again."
        )
    for name, port in ports.items():
        if config.ports.get(name) != port:
            raise RuntimeError(
                f"{name} runs on port {config.ports.get(name)}, not {port}. Run `vitline stack down` first, then up again."
            )


def _check_loopback(directory: Path) -> None:
    """Raises RuntimeError for a service other than Ray that can be reached from other machines."""
    for listener in listeners(directory):
        if not listener.loopback and listener.service != "ray":
            raise RuntimeError(
                f"{listener.service} listens on {listener.address}:{listener.port}, which other machines can reach; only "
                "loopback is allowed. This is a bug of vitline or a change in a new version of that service: report it."
            )


def processes_of(directory: Path) -> dict[str, list[psutil.Process]]:
    """The processes of the running stack in `directory`, by service."""
    state, trees = find_stack(directory), {}
    if state is None:
        return {}
    with contextlib.suppress(psutil.Error):
        trees["supervisor"] = [psutil.Process(state.supervisor_pid)]
    for service in state.services:
        with contextlib.suppress(psutil.Error):
            if service.pid:
                top = psutil.Process(service.pid)
                trees[service.name] = [top, *top.children(recursive=True)]
    return trees


def _service(directory: Path, name: str) -> Service:
    state = find_stack(directory)
    if state is None:
        raise RuntimeError(f"no stack is up in {directory}. Start it with `vitline stack up`.")
    for service in state.services:
        if service.name == name:
            return service
    if address := _stack_config(directory).foreign.get(name):
        raise RuntimeError(f"{name} is yours, at {address}, so it is not restarted from here.")
    raise RuntimeError(
        f"{name} is not part of the stack in {directory}. To add it, run `vitline stack down` first, then up again."
    )


def _stack_config(directory: Path) -> StackConfig:
    config = load_stack_config(directory.absolute())
    if config is None:
        raise RuntimeError(f"there is no stack in {directory}. Create one with `vitline stack up`.")
    return config


def _wait(condition: Callable[[], bool], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
