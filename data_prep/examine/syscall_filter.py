"""The system calls that the decoding process may still make, as a seccomp filter.

An allow-list: whatever is not named here, also calls of later kernels, fails with EPERM. That suits every version of the C
library, because the calls below are those that computing, memory, threads and two open pipes need, and all else is optional for a
library that is loaded. `clone3` fails with ENOSYS, because its flags are in memory, where a filter cannot read them: the C library
then makes threads with `clone`.
"""

import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple


class _Machine(NamedTuple):
    """Numbers of one kind of processor."""

    audit_arch: int
    seccomp: int
    """Number of the call that installs a filter."""
    calls: dict[str, int]


class _Check(NamedTuple):
    """A condition on one argument: `argument & mask == value`. Argument and mask have 64 bits."""

    argument: int
    mask: int
    value: int


# Sources: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of the kernel.
_X86_64 = _Machine(
    0xC000003E,
    317,
    dict(
        read=0, write=1, close=3, fstat=5, poll=7, lseek=8, mmap=9, mprotect=10, munmap=11, brk=12, rt_sigprocmask=14,
        rt_sigreturn=15, readv=19, writev=20, sched_yield=24, mremap=25, madvise=28, nanosleep=35, getpid=39, clone=56,
        exit=60, kill=62, gettimeofday=96, getrusage=98, times=100, sigaltstack=131, gettid=186, time=201, futex=202,
        sched_getaffinity=204, restart_syscall=219, clock_gettime=228, clock_getres=229, clock_nanosleep=230,
        exit_group=231, tgkill=234, ppoll=271, set_robust_list=273, prlimit64=302, getcpu=309, getrandom=318,
        membarrier=324, rseq=334, clone3=435,
    ),
)  # fmt: skip
_AARCH64 = _Machine(
    0xC00000B7,
    277,
    dict(
        close=57, lseek=62, read=63, write=64, readv=65, writev=66, ppoll=73, fstat=80, exit=93, exit_group=94, futex=98,
        set_robust_list=99, nanosleep=101, clock_gettime=113, clock_getres=114, clock_nanosleep=115, sched_getaffinity=123,
        sched_yield=124, restart_syscall=128, kill=129, tgkill=131, sigaltstack=132, rt_sigprocmask=135, rt_sigreturn=139,
        times=153, getrusage=165, getcpu=168, gettimeofday=169, getpid=172, gettid=178, brk=214, munmap=215, mremap=216,
        clone=220, mmap=222, mprotect=226, madvise=233, prlimit64=261, getrandom=278, membarrier=283, rseq=293, clone3=435,
    ),
)  # fmt: skip
_MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}

# seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]. Both machines are little endian.
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_LOAD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38

_ALL = (1 << 64) - 1
_PROT_EXEC = 4
_THREAD = 0x10000 | 0x100 | 0x800  # CLONE_THREAD, which the kernel takes only with CLONE_VM and CLONE_SIGHAND
_NAMESPACES = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET


def seccomp_call() -> int | None:
    """Number of the system call that installs a filter; None for a processor that has no filter here."""
    machine = _MACHINES.get(platform.machine())
    return machine.seccomp if machine else None


def filter_program(pid: int) -> bytes:
    """The filter of the process `pid`, as the kernel reads it: 8 bytes per instruction."""
    machine = _MACHINES[platform.machine()]
    calls = machine.calls
    limited = {
        # Only its own process, as abort() does, and only threads, no processes.
        "kill": (_Check(0, 0xFFFFFFFF, pid),),
        "tgkill": (_Check(0, 0xFFFFFFFF, pid),),
        "clone": (_Check(0, _THREAD | _NAMESPACES, _THREAD),),
        # No new program code in memory.
        "mmap": (_Check(2, _PROT_EXEC, 0),),
        "mprotect": (_Check(2, _PROT_EXEC, 0),),
        # Limits of this process may be read, not changed.
        "prlimit64": (_Check(0, 0xFFFFFFFF, 0), _Check(2, _ALL, 0)),
    }
    parts = [
        _instruction(_LOAD, _ARCH),
        _instruction(_JUMP_EQUAL, machine.audit_arch, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
    ]
    for name, number in calls.items():
        body = _instruction(_RETURN, _ERRNO | _ENOSYS) if name == "clone3" else _allow_if(limited.get(name, ()))
        parts += [_instruction(_JUMP_EQUAL, number, 0, len(body) // 8), body]
    return b"".join([*parts, _instruction(_RETURN, _ERRNO | _EPERM)])


def _allow_if(checks: Sequence[_Check]) -> bytes:
    """Instructions that allow the call if all checks hold, and else refuse it."""
    code = list[bytes]()
    for check in checks:
        for low in (True, False):
            shift = 0 if low else 32
            if mask := check.mask >> shift & 0xFFFFFFFF:
                code.append(_instruction(_LOAD, _ARGUMENTS + 8 * check.argument + (0 if low else 4)))
                code.append(_instruction(_AND, mask))
                code.append(_instruction(_JUMP_EQUAL, check.value >> shift & 0xFFFFFFFF, 1, 0))
                code.append(_instruction(_RETURN, _ERRNO | _EPERM))
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
