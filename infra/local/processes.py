"""Processes of our own making: they end with their owner, and no other process is ever taken for one of them."""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from infra.plain_text import plain
from infra.settings import inherited_environment

TERMINATED_S = 2.0  # for what an orderly end has left: drivers of jobs, flow runs
KILLED_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that nothing escapes it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """For `preexec_fn`: should the parent be killed, this process still ends in order.

    The kernel means the thread that forked, not its process: start such children from the main thread only.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def child_environment(
    changes: Mapping[str, str] | None = None, without: Collection[str] = (), prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """For a child process, with `changes`: `python` is this Python, and it imports this project, installed or not.

    Variables named in `without`, and those that start with one of `prefixes`, are left out.
    """
    environment = {k: v for k, v in inherited_environment(without).items() if not k.startswith(prefixes or "\0")}
    commands = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    root = Path(__file__).parents[2]
    # An installed package is found anyway, and site-packages in PYTHONPATH would go before the standard library.
    packages = [str(root)] if (root / "pyproject.toml").exists() else []
    packages += [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    paths = {"PATH": os.pathsep.join(commands), "PYTHONPATH": os.pathsep.join(packages)}
    return environment | paths | dict(changes or {})


def reap(children: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Collect what has ended: the exit codes of `children` go to them, orphans that came to us just go.

    Ray leaves a watcher behind after every job.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in children:
                children[pid].returncode = os.waitstatus_to_exitcode(status)


def end_children(children: Sequence[subprocess.Popen[bytes]], patience_s: float) -> None:
    """SIGTERM to all of them, and at most `patience_s` to end in their own order."""
    known = {child.pid: child for child in children}
    for child in children:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(child.returncode is None for child in children) and time.monotonic() < deadline:
        reap(known)
        time.sleep(0.05)


def end_descendants(children: Mapping[int, subprocess.Popen[bytes]], only: Collection[psutil.Process] = ()) -> None:
    """End all that descends from this process, or `only` some of it: SIGTERM, SIGKILL; no zombie remains."""

    group = set(only)

    def living() -> set[psutil.Process]:
        found = set(psutil.Process().children(recursive=True))
        if not only:
            return found
        group.update(_with_descendants(group))  # those of a parent that has ended are no longer seen below it
        return found & group | {process for process in group if is_running(process)}

    for number, patience_s in ((signal.SIGTERM, TERMINATED_S), (signal.SIGKILL, KILLED_S)):
        deadline = time.monotonic() + patience_s
        told: set[psutil.Process] = set()
        while (left := living()) and time.monotonic() < deadline:
            _signal(left - told, number)  # those that were forked in the meantime, too
            told |= left
            reap(children)
            time.sleep(0.05)
    if left := living():
        print(f"still there after SIGKILL: {left}", file=sys.stderr)


def end_strangers(processes: Collection[psutil.Process]) -> None:
    """End processes that are not our children, and all that descends from them: SIGTERM, SIGKILL.

    Raises RuntimeError naming those that even SIGKILL did not end.
    """
    left = _with_descendants(processes)
    for number, patience_s in ((signal.SIGTERM, TERMINATED_S), (signal.SIGKILL, KILLED_S)):
        _signal(left, number)
        deadline = time.monotonic() + patience_s
        while (left := {p for p in left if is_running(p)}) and time.monotonic() < deadline:
            time.sleep(0.05)
    if left:
        raise RuntimeError(f"still there after SIGKILL: {sorted(p.pid for p in left)}. Look at what holds them.")


def is_running(process: psutil.Process) -> bool:
    """Whether it still does anything; a zombie that waits for its parent does not."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def birth_of(pid: int) -> str:
    """What tells a process from a later one of the same number; empty where there is none."""
    # psutil's time of creation is reckoned from the clock and moves with it, as when a laptop wakes up.
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    if not Path("/proc/self").exists():
        with contextlib.suppress(psutil.Error):
            return f"{psutil.Process(pid).create_time():.0f}"
    return ""


def find_process(pid: int, birth: str) -> psutil.Process | None:
    """The process that was recorded by number and birth, if it is still the same one and runs."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if birth and birth_of(pid) == birth and is_running(process):
            return process
    return None


def processes_with(name: str, value: str) -> set[psutil.Process]:
    """Every process of this user that started with the variable `name` beginning with `value`, but not this one
    and those that it descends from."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name, "").startswith(value):
                found.add(process)
    return found - {psutil.Process(), *psutil.Process().parents()}


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which the process, or one that descends from it, waits for connections."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for process in _with_descendants([psutil.Process(pid)]):
            with contextlib.suppress(psutil.Error):
                connections = process.net_connections("tcp")
                found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def is_free(port: int, hosts: Iterable[str] = ("", "127.0.0.1")) -> bool:
    """Whether a server could listen on `port` now."""
    for host in hosts:
        with socket.socket() as probe:
            # As servers do: what remains of closed connections does not hold a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def free_ports(count: int, twin: int = 0) -> list[int]:
    """Free ports, whose twins `twin` higher are free, too; all below those that the system gives to outgoing
    connections, which could be taken before a server starts."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(12_000 if twin else 20_000, 32_000 - twin)
        if port not in ports and is_free(port) and is_free(port + twin):
            ports.append(port)
    return ports


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A private folder with a short path (see `short_base`)."""
    folder = Path(tempfile.mkdtemp(prefix="vl-", dir=short_base()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def short_base() -> str:
    """Where folders with short paths go: servers make Unix sockets there, and their paths have at most 107 bytes."""
    base = tempfile.gettempdir()
    return base if len(base) <= 16 else "/tmp"


def tail(log: Path, num_lines: int = 20) -> str:
    """The last lines of a log that say something, without colours."""
    with contextlib.suppress(OSError):
        lines = plain(log.read_text(errors="replace")).splitlines()
        return "\n".join([line for line in lines if line.strip()][-num_lines:])
    return "(no log)"


def load() -> str:
    """`load 7.3 on 2 CPUs`"""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"


def is_busy() -> bool:
    """Whether, over the last minute, clearly more processes wanted to run than there are CPUs: what is slow then need not
    be broken."""
    return os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)


def _with_descendants(processes: Collection[psutil.Process]) -> set[psutil.Process]:
    found = set(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return found


def _signal(processes: Collection[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _prctl(option: int, value: int) -> None:
    # Linux only; elsewhere the process tree still shows all that did not cut itself loose.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
