"""Takes from a process what decoding images does not need: files, network, other processes, more time than its own.

Three protections of Linux, each of which holds without the others: limits of resources; Landlock, which refuses files, TCP, and
signals and debugging of processes outside; and a seccomp filter (syscall_filter.py), which refuses all other system calls. None of
them can be taken back. The process must have loaded its libraries before.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Collection

from vitline.data_prep.examine.syscall_filter import filter_program, seccomp_call

# Landlock has the same numbers on all processors.
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_ASK_VERSION = 1
_NETWORK_ABI, _SCOPES_ABI = 4, 6
_TCP, _SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals
_NO_NEW_PRIVILEGES = 38  # option of prctl
_SET_FILTER, _ALL_THREADS = 1, 1
_ABOVE_ALL_FILES = (
    1 << 16
)  # it was started with three; the limit of the system may be 2**63, above what closerange takes
_SPARE_CPU_S = 5  # between the signal that names the limit and the one that cannot be caught


def enter_sandbox(keep: Collection[int], cpu_s: int) -> tuple[str, ...]:
    """Lock this process in, for good. It keeps its memory and the open files `keep`, and may use `cpu_s` seconds of CPU time.

    Returns what could not be set up, in words: empty where the system has all protections. Linux sets up Landlock for the calling
    thread alone, so this is called before other threads are started.
    """
    import resource  # noqa: F401  # no file can be opened later

    _close_all_but(keep)
    lacking = (_enter_landlock(), _limit_resources(max(keep) + 1, cpu_s), _enter_filter())
    return tuple(text for text in lacking if text)


def _close_all_but(keep: Collection[int]) -> None:
    start = 0
    for number in sorted(keep):
        if number > start:  # of an empty range, os.closerange would close everything
            os.closerange(start, number)
        start = number + 1
    os.closerange(start, _ABOVE_ALL_FILES)


def _limit_resources(num_files: int, cpu_s: int) -> str:
    import resource  # POSIX only, while this module is also imported elsewhere

    limits = (
        ("CORE", 0, 0),
        ("FSIZE", 0, 0),
        ("NOFILE", num_files, num_files),
        ("CPU", cpu_s, cpu_s + _SPARE_CPU_S),
    )
    refused = []
    for name, soft, hard in limits:
        number = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(number)[1]  # only lower limits are allowed, and a machine may have set one
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        try:
            resource.setrlimit(number, (soft, hard))
        except (OSError, ValueError):
            refused.append(f"RLIMIT_{name}")
    return f"limits of resources: the system refuses {', '.join(refused)}" if refused else ""


def _enter_landlock() -> str:
    if sys.platform != "linux":
        return f"Landlock: {sys.platform} has none"
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"Landlock: the process had {num_threads} threads before it was locked in, expected 1"
    abi = _call(_CREATE_RULESET, None, 0, _ASK_VERSION)
    if abi < 1:
        return f"Landlock: {os.strerror(-abi)}. Linux has it since 5.13, if lsm= at boot names it"
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1  # all rights on files that this version knows
    network, scopes = _TCP if abi >= _NETWORK_ABI else 0, _SCOPES if abi >= _SCOPES_ABI else 0
    rules = struct.pack("=QQQ", files, network, scopes)[: 8 * (1 + bool(network) + bool(scopes))]
    ruleset = _call(_CREATE_RULESET, rules, len(rules), 0)
    if ruleset < 0:
        return f"Landlock: {os.strerror(-ruleset)}"
    _libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    error = _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    if error:
        return f"Landlock: {os.strerror(-error)}"
    if scopes:
        return ""
    return f"Landlock: version {abi} does not restrict {'' if network else 'TCP, '}signals or abstract sockets"


def _enter_filter() -> str:
    number = seccomp_call() if sys.platform == "linux" else None
    if number is None:
        return f"seccomp: no filter for {sys.platform} on this processor"
    program = filter_program(os.getpid())
    text = ctypes.create_string_buffer(program, len(program))
    about = _Program(len(program) // 8, ctypes.addressof(text))
    _libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    error = _call(number, _SET_FILTER, _ALL_THREADS, ctypes.addressof(about))
    return f"seccomp: {os.strerror(-error) if error < 0 else 'a thread cannot be locked in'}" if error else ""


class _Program(ctypes.Structure):
    """struct sock_fprog of the kernel."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """A system call: its result, or the negative errno."""
    words = [ctypes.c_long(x) if isinstance(x, int) else x for x in arguments]
    result = int(_libc().syscall(ctypes.c_long(number), *words))
    return result if result >= 0 else -ctypes.get_errno()
