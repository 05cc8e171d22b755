"""Ports, short temporary folders, and whether a start makes progress."""

import contextlib
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from vitline.infra.children import with_descendants
from vitline.infra.plain_text import plain

# Ray and the stack's servers create Unix sockets below it, whose paths have at most 107 bytes.
MAX_BASE_LENGTH = 16
SHORT_FALLBACK = "/tmp"
_MAX_TMPDIR_LENGTH = 70  # Python's multiprocessing adds /pymp-xxxxxxxx/listener-xxxxxxxx
_LOOK_AT_ACTIVITY_S = 5.0
STILL_S = 120.0
"""What starts and does nothing for so long has failed."""
_STILL_SHARE = 0.2
"""Processes that start use a whole CPU or more, or wait for one; those that wait for something else use little."""


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which the process or one of its descendants listens."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for process in with_descendants([psutil.Process(pid)]):
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
                active_s = sum(map(_active_s, with_descendants([psutil.Process(pid)])))
            if active_s - self._active_s > _STILL_SHARE * (now - self._looked):
                self._since = now
            self._looked, self._active_s = now, active_s
        return now - self._since


def is_busy() -> bool:
    """True if the load of the last minute is clearly higher than the number of CPUs, so that a slow start is no failure."""
    return os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)


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
