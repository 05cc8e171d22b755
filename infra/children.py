"""Child processes: a fresh interpreter, its end with that of its parent, and the end of all descendants.

psutil is imported inside functions, because the sandboxed decoder imports this module and should load as little as possible.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitline.infra.settings import inherited_environment

if TYPE_CHECKING:
    import psutil

TERMINATED_S = 2.0
"""Between SIGTERM and SIGKILL, for processes that an orderly end has left, such as drivers and flow runs."""
KILLED_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Makes this process the new parent of descendants whose parent ends, so that it can end all of them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int | None = None, number: int = signal.SIGTERM) -> bool:
    """From now on the kernel sends this process a signal when its parent ends. Returns False if `parent` has ended before.

    To the kernel the parent is the thread that forked, so start such children from a thread that lives as long as the process. Also a
    `preexec_fn`. Linux only; elsewhere the process tree still shows descendants that have not detached themselves.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    return parent is None or os.getppid() == parent


def start_python(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, **popen: Any
) -> subprocess.Popen[bytes]:
    """`python -m module` in a fresh interpreter that finds what this one finds, also in folders that were added after its start.

    `env` is its environment but for PYTHONPATH; by default that of this process. `popen`: as for `subprocess.Popen`.
    """
    environment = {
        **(inherited_environment(()) if env is None else env),
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
    }
    return subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], env=environment, **popen)


def how_it_ended(code: int) -> str:
    """`ended by SIGKILL`, or `ended with exit code 3`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def child_environment(
    changes: Mapping[str, str] | None = None, without: Collection[str] = (), prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """The environment of a child process, in which `python` is this Python and can import this project.

    Variables named in `without`, and those that start with one of `prefixes`, are removed; then `changes` are set.
    """
    environment = {k: v for k, v in inherited_environment(without).items() if not k.startswith(prefixes or "\0")}
    commands = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    root = Path(__file__).parents[2]
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
    children: Mapping[int, subprocess.Popen[bytes]],
    find: Callable[[], "Collection[psutil.Process]"] | None = None,
) -> None:
    """Ends all descendants of this process, or those that `find` names and theirs, by SIGTERM and then SIGKILL. Leaves no zombie.

    `find` is called until it finds no running process: a process whose parent ends in between has a new place in the tree.
    """
    import psutil

    group = set[psutil.Process]()

    def living() -> set[psutil.Process]:
        found = set(psutil.Process().children(recursive=True))
        if find is None:
            return found
        group.update(with_descendants({*group, *find()}))
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


def end_strangers(processes: "Collection[psutil.Process]") -> None:
    """Ends processes that are not children of this process, and their descendants, by SIGTERM and then SIGKILL.

    Raises RuntimeError naming processes that SIGKILL did not end.
    """
    left = with_descendants(processes)
    for number, patience_s in ((signal.SIGTERM, TERMINATED_S), (signal.SIGKILL, KILLED_S)):
        _signal(left, number)
        deadline = time.monotonic() + patience_s
        while (left := {p for p in left if is_running(p)}) and time.monotonic() < deadline:
            time.sleep(0.05)
    if left:
        raise RuntimeError(
            f"still running after SIGKILL: processes {sorted(p.pid for p in left)}. Check what they wait for."
        )


def is_running(process: "psutil.Process") -> bool:
    """True if the process runs; False for a zombie."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def birth_of(pid: int) -> str:
    """A text that distinguishes a process from a later one with the same pid; empty if there is no such process."""
    import psutil

    # psutil computes the time of creation from the clock, and it changes when the clock is adjusted, as after a suspend.
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    if not Path("/proc/self").exists():
        with contextlib.suppress(psutil.Error):
            return f"{psutil.Process(pid).create_time():.0f}"
    return ""


def find_process(pid: int, birth: str) -> "psutil.Process | None":
    """The process with this pid and birth, if it still runs."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if birth and birth_of(pid) == birth and is_running(process):
            return process
    return None


def processes_with(name: str, value: str) -> "set[psutil.Process]":
    """All processes of this user whose environment variable `name` starts with `value`, except this one and its ancestors."""
    import psutil

    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name, "").startswith(value):
                found.add(process)
    return found - {psutil.Process(), *psutil.Process().parents()}


def with_descendants(processes: "Collection[psutil.Process]") -> "set[psutil.Process]":
    """The processes, and all below them."""
    import psutil

    found = set(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return found


def _signal(processes: "Collection[psutil.Process]", number: int) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def sendable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its text if it cannot be pickled for another process. Pickling drops its causes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
