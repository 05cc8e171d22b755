"""Hosts on this machine: network namespaces joined by a bridge, each with an address, a host name and folders of its own.

The bridge is in a namespace as well. So nothing is added to the network of this machine, and two runs may use the same addresses.
"""

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from vitline.infra.children import child_environment, end_with_parent

from ..infra.container_process import FOREIGN
from .delay import delayed

NETWORK = "10.79.0"
PROGRAMS = ("ip", "nsenter", "unshare", "hostname", "mount")
SPACES = Path("/run/netns")
_OURS = re.compile(r"vlc-(\d+)-[\w-]+")
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_PERIOD_S, _ENDED_S = 1.0, 60.0


def why_not_here(programs: Sequence[str] = PROGRAMS, packages: str = "iproute2, mount, util-linux and hostname") -> str:
    """Why no hosts with these programs can be made here; empty if they can."""
    if missing := [program for program in programs if shutil.which(program, path=_path()) is None]:
        return f"needs {', '.join(missing)}: the packages {packages} of Debian"
    return "" if os.geteuid() == 0 else "makes network namespaces, for which it needs root"


class Hosts:
    """Context manager: hosts with these names, by which they know each other, without servers. `folder` holds a folder for each."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, list(names)
        self._prefix = f"vlc-{os.getpid()}-{secrets.token_hex(2)}"
        self._open, self._children = contextlib.ExitStack(), list["subprocess.Popen[bytes]"]()

    def __enter__(self) -> "Hosts":
        remove_leftovers()
        known = [("127.0.0.1", "localhost"), *((self.address(host), host) for host in self.names)]
        (self.folder / "names").write_text("".join(f"{address} {name}\n" for address, name in known))
        with contextlib.ExitStack() as stack:
            switch = self._add_space(stack, "switch")
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for host in self.names:
                (self.folder / host).mkdir()
                space = self._add_space(stack, host)
                _ip("link", "add", host, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("-n", switch, "link", "set", host, "master", "br0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
                _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        for child in self._children:
            child.wait()

    def address(self, host: str) -> str:
        return f"{NETWORK}.{self.names.index(host) + 1}"

    def environment(self, host: str, variables: Mapping[str, str]) -> dict[str, str]:
        """Of a process on a host: this one's without what would connect it to other servers, with the folders of the host."""
        home = str(self.folder / host)
        return child_environment({"HOME": home, "TMPDIR": home, "VITLINE_HOME": home, **variables}, (), FOREIGN)

    def entered(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host."""
        enter = ["nsenter", f"--net={SPACES / self._space(host)}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", _ENTER, "enter", host, str(self.folder / "names"), *command]

    def start(
        self, host: str, command: Sequence[str], log: Path, variables: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Starts a process on a host. It ends with this process, and at the latest with the hosts."""
        with open(log, "wb") as output:
            process = subprocess.Popen(
                self.entered(host, command),
                env=self.environment(host, variables),
                cwd=self.folder / host,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=end_with_parent,
            )
        self._children.append(process)
        return process

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Meanwhile the sockets that this thread makes, and its children, are on a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as before, open(SPACES / self._space(host)) as there:
            assert libc.setns(there.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(before.fileno(), 0) == 0, os.strerror(ctypes.get_errno())

    def processes(self, host: str) -> list[psutil.Process]:
        return _processes(self._space(host))

    def cut(self, host: str) -> None:
        """Drops all packets to and from the host without closing its connections, as when a machine loses power."""
        _ip("-n", self._space("switch"), "link", "set", host, "down")

    def limit(self, host: str, bytes_per_s: float) -> None:
        """From now on the host sends no more than that."""
        rate = ("rate", f"{bytes_per_s * 8:.0f}bit", "burst", "64kb", "latency", "400ms")
        _run("tc", "-n", self._space(host), "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)

    @contextlib.contextmanager
    def distant(self, host: str, delay_s: float) -> Iterator[None]:
        """Meanwhile each packet to and from the host arrives so much later. New connections of all hosts are Reno's: Cubic and BBR take
        the delay for a full link, and then send bursts at a fraction of its rate."""
        for each in self.names:
            with self.inside(each):
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
        switch, near, far = self._space("switch"), f"{host}-near", f"{host}-far"
        _ip("-n", switch, "link", "add", near, "type", "veth", "peer", "name", far)
        for interface in (near, far):
            _ip("-n", switch, "link", "set", interface, "up")
        _ip("-n", switch, "link", "set", host, "nomaster")
        _ip("-n", switch, "link", "set", far, "master", "br0")
        link = contextlib.ExitStack()
        with self.inside("switch"):
            link.enter_context(delayed(host, near, delay_s))
        try:
            yield
        finally:
            link.close()
            _ip("-n", switch, "link", "del", near)
            _ip("-n", switch, "link", "set", host, "master", "br0")

    def kill(self, host: str) -> None:
        """SIGKILL to every process of the host. Unless it is cut off, the other ends of its connections see them close."""
        _kill_all(self._space(host))

    @contextlib.contextmanager
    def slow(self, host: str, share: float) -> Iterator[None]:
        """Meanwhile all processes of a host run for only this share of the time."""
        space, over = self._space(host), threading.Event()

        def stop_and_go() -> None:
            while not over.is_set():
                _signal(space, signal.SIGSTOP)
                over.wait((1 - share) * _PERIOD_S)
                _signal(space, signal.SIGCONT)
                over.wait(share * _PERIOD_S)

        thread = threading.Thread(target=stop_and_go)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _add_space(self, stack: contextlib.ExitStack, name: str) -> str:
        space = self._space(name)
        _ip("netns", "add", space)
        stack.callback(remove_space, space)
        return space


def remove_leftovers() -> None:
    """Removes the hosts of runs that were killed, with all that still runs on them."""
    for path in SPACES.glob("vlc-*"):
        if (made := _OURS.fullmatch(path.name)) and not psutil.pid_exists(int(made[1])):
            remove_space(path.name)


def remove_space(space: str) -> None:
    """Removes a network namespace and all that still runs in it."""
    _kill_all(space)
    _ip("netns", "del", space)


def _kill_all(space: str) -> None:
    """The processes stand still first, so that none starts another one meanwhile."""
    deadline = time.monotonic() + _ENDED_S
    while _processes(space):
        assert time.monotonic() < deadline, f"still running after SIGKILL: {_processes(space)}"
        _signal(space, signal.SIGSTOP)
        _signal(space, signal.SIGKILL)
        time.sleep(0.05)


def _signal(space: str, number: int) -> None:
    for process in _processes(space):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _processes(space: str) -> list[psutil.Process]:
    """All in a network namespace, but this process; `ip netns pids` would be a process itself each time."""
    wanted, found = (SPACES / space).stat(), list[psutil.Process]()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if pid != os.getpid() and os.path.samestat(wanted, os.stat(f"/proc/{pid}/ns/net")):
                found.append(psutil.Process(pid))
    return found


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, env={"PATH": _path()}, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
