"""Child processes: they end with the process that owns them, and are never confused with other processes."""

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from vitline.infra.plain_text import plain
from vitline.infra.settings import inherited_environment

TERMINATED_S = (
    2.0  # between SIGTERM and SIGKILL, for processes that an orderly end has left, such as drivers and flow runs
)
KILLED_S = 10.0
# Ray and the stack's servers create Unix sockets below it, whose paths have at most 107 bytes.
MAX_BASE_LENGTH = 16
SHORT_FALLBACK = "/tmp"
_MAX_TMPDIR_LENGTH = 70  # Python's multiprocessing adds /pymp-xxxxxxxx/listener-xxxxxxxx
_LOOK_AT_ACTIVITY_S = 5.0
STILL_S = 120.0
"""What starts and does nothing for so long has failed."""
_STILL_SHARE = 0.2
"""Processes that start use a whole CPU or more, or wait for one; those that wait for something else use little."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Makes this process the new parent of descendants whose parent ends, so that it can end all of them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """For `preexec_fn`: the child gets SIGTERM when its parent is killed.

    To the kernel the parent is the thread that forked, so start such children from the main thread only.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def child_environment(
    changes: Mapping[str, str] | None = None, without: Collection[str] = (), prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """The environment of a child process, in which `python` is this Python and can import this project.

    Variables named in `without`, and those that start with one of `prefixes`, are removed; then `changes` are set.
    """
    environment = {k: v for k, v in inherited_environment(without).items() if not k.startswith(prefixes or "\0")}
    commands = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    root = Path(__file__).parents[3]
    # Only for a checkout: an installed package is found anyway, and site-packages in PYTHONPATH would come before the
    # standard library.
    packages = [str(root)] if (root / "pyproject.toml").exists() else []
    packages += [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    paths = {"PATH": os.pathsep.join(commands), "PYTHONPATH": os.pathsep.join(packages)}
    return environment | paths | dict(changes or {})


def reap(children: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Collects ended processes. Sets the exit codes of `children`; adopted orphans are only removed.

    Ray leaves an orphan after every job.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in children:
                children[pid].returncode = os.waitstatus_to_exitcode(status)


def end_children(children: Sequence[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Sends SIGTERM to all children and waits at most `patience_s` for them to end."""
    known = {child.pid: child for child in children}
    for child in children:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(child.returncode is None for child in children) and time.monotonic() < deadline:
        reap(known)
        time.sleep(0.05)


def end_descendants(
    children: Mapping[int, subprocess.Popen[bytes]], find: Callable[[], Collection[psutil.Process]] | None = None
) -> None:
    """Ends all descendants of this process, or those that `find` names and theirs, by SIGTERM and then SIGKILL. Leaves no zombie.

    `find` is asked until it names nobody that runs: a process whose parent ends in between has a new place in the tree.
    """

    group = set[psutil.Process]()

    def living() -> set[psutil.Process]:
        found = set(psutil.Process().children(recursive=True))
        if find is None:
            return found
        group.update(_with_descendants({*group, *find()}))
        return found & group | {process for process in group if is_running(process)}

    for number, patience_s in ((signal.SIGTERM, TERMINATED_S), (signal.SIGKILL, KILLED_S)):
        deadline = time.monotonic() + patience_s
        signalled: set[psutil.Process] = set()
        # Two looks: one alone misses a process whose parent ends while /proc is read.
        while (left := living() or living()) and time.monotonic() < deadline:
            _signal(left - signalled, number)  # includes processes forked meanwhile
            signalled |= left
            reap(children)
            time.sleep(0.05)
    if left := living():
        print(f"still running after SIGKILL: {left}", file=sys.stderr)


def end_strangers(processes: Collection[psutil.Process]) -> None:
    """Ends processes that are not children of this process, and their descendants, by SIGTERM and then SIGKILL.

    Raises RuntimeError naming processes that SIGKILL did not end.
    """
    left = _with_descendants(processes)
    for number, patience_s in ((signal.SIGTERM, TERMINATED_S), (signal.SIGKILL, KILLED_S)):
        _signal(left, number)
        deadline = time.monotonic() + patience_s
        while (left := {p for p in left if is_running(p)}) and time.monotonic() < deadline:
            time.sleep(0.05)
    if left:
        raise RuntimeError(
            f"still running after SIGKILL: processes {sorted(p.pid for p in left)}. Check what they wait for."
        )


def is_running(process: psutil.Process) -> bool:
    """True if the process runs; False for a zombie."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def birth_of(pid: int) -> str:
    """A text that distinguishes a process from a later one with the same pid; empty if there is no such process."""
    # psutil computes the time of creation from the clock, and it changes when the clock is adjusted, as after a suspend.
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    if not Path("/proc/self").exists():
        with contextlib.suppress(psutil.Error):
            return f"{psutil.Process(pid).create_time():.0f}"
    return ""


def find_process(pid: int, birth: str) -> psutil.Process | None:
    """The process with this pid and birth, if it still runs."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if birth and birth_of(pid) == birth and is_running(process):
            return process
    return None


def processes_with(name: str, value: str) -> set[psutil.Process]:
    """All processes of this user whose environment variable `name` starts with `value`, except this one and its ancestors."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name, "").startswith(value):
                found.add(process)
    return found - {psutil.Process(), *psutil.Process().parents()}


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which the process or one of its descendants listens."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for process in _with_descendants([psutil.Process(pid)]):
            with contextlib.suppress(psutil.Error):
                connections = process.net_connections("tcp")
                found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def is_free(port: int, hosts: Iterable[str] = ("", "127.0.0.1")) -> bool:
    """True if a server could listen on `port` now."""
    for host in hosts:
        with socket.socket() as probe:
            # As servers do, so that recently closed connections do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def free_ports(count: int, twin: int = 0) -> list[int]:
    """Free ports for which the port `twin` higher is free as well.

    They are below the range for outgoing connections, where another process could take them before a server starts.
    """
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
    """The parent of folders with Unix sockets, which need short paths: the temporary folder if its path is short, else /tmp."""
    base = tempfile.gettempdir()
    return base if len(base) <= MAX_BASE_LENGTH else SHORT_FALLBACK


def short_temporary(folder: Path) -> dict[str, str]:
    """TMPDIR for processes that create Unix sockets in their temporary folder: a link in `folder` where its path is too long."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) <= _MAX_TMPDIR_LENGTH:
        return {}
    link = folder / "tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(base)
    return {"TMPDIR": str(link)}


def tail(log: Path, num_lines: int = 20) -> str:
    """The last non-empty lines of a log, without colours."""
    with contextlib.suppress(OSError):
        lines = plain(log.read_text(errors="replace")).splitlines()
        return "\n".join([line for line in lines if line.strip()][-num_lines:])
    return "(no log)"


def load() -> str:
    """`load 7.3 on 2 CPUs`"""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"


class Stillness:
    """For how long processes have done nothing, so that a start waits for progress and not for a clock.

    Time in which they compute, or wait for a processor that others use, is progress: on a busy machine, or with a limit of CPU, a start
    takes as long as it takes.
    """

    def __init__(self) -> None:
        self._since, self._looked, self._active_s = time.monotonic(), 0.0, 0.0

    def seconds(self, pid: int) -> float:
        """Seconds since a process or one of its descendants was last active; they count as still while they are active for less than
        `_STILL_SHARE` of the time."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_AT_ACTIVITY_S:
            active_s = 0.0
            with contextlib.suppress(psutil.Error):
                active_s = sum(map(_active_s, _with_descendants([psutil.Process(pid)])))
            if active_s - self._active_s > _STILL_SHARE * (now - self._looked):
                self._since = now
            self._looked, self._active_s = now, active_s
        return now - self._since


def is_busy() -> bool:
    """True if the load of the last minute is clearly higher than the number of CPUs, so that a slow start is no failure."""
    return os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)


def _with_descendants(processes: Collection[psutil.Process]) -> set[psutil.Process]:
    found = set(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return found


def _active_s(process: psutil.Process) -> float:
    """Seconds for which the threads of a process have run or waited for a processor."""
    total_ns = 0
    for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):
            ran, waited, _ = file.read_text().split()
            total_ns += int(ran) + int(waited)
    if total_ns == 0:  # another system than Linux
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            return float(times.user + times.system)
    return total_ns / 1e9


def _signal(processes: Collection[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _prctl(option: int, value: int) -> None:
    # Linux only. Elsewhere the process tree still shows descendants that have not detached themselves.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
