"""What code that took over the decoding process can do: it runs where a decoder runs, and tries what an attacker would."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are of Linux")
SECRET = "the-secret-of-the-parent"

# Each attempt returns what it gained, or fails.
ATTACK = textwrap.dedent(
    """
    import ctypes, json, mmap, os, platform, resource, signal, socket, sys
    from vitline.data_prep.decode import ImageRejected
    from vitline.data_prep.examine import sandbox

    PARENT, FOLDER = os.getppid(), os.path.dirname(__file__)
    PLAN = json.load(open(f"{FOLDER}/plan.json"))
    LIBC = ctypes.CDLL(None, use_errno=True)
    for name in PLAN["lacking"]:  # as on a kernel without it
        setattr(sandbox, name, lambda: name)

    def call(*arguments):
        result = LIBC.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
        if result < 0:
            raise OSError(ctypes.get_errno(), "refused")
        return result

    def number(x86_64, aarch64):
        return x86_64 if platform.machine() == "x86_64" else aarch64

    class Range(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

    def memory_of_parent():
        here = ctypes.create_string_buffer(16)
        own, other = Range(ctypes.addressof(here), 16), Range(int(PLAN["address"]), 16)
        call(number(310, 270), PARENT, ctypes.byref(own), 1, ctypes.byref(other), 1, 0)
        return here.raw.decode(errors="replace")

    def open_files():
        for fd in range(3, 512):
            try:
                found = os.pread(fd, 100, 0)
            except OSError:
                continue
            return found.decode(errors="replace")
        raise OSError("none")

    def connected(family, kind, address):
        with socket.socket(family, kind) as it:
            it.connect(address)
            it.send(b"x")
        return "sent"

    def forked():
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        return "a process"

    ATTEMPTS = {
        "environment": lambda: os.environ["SECRET"],
        "arguments": lambda: [a for a in sys.argv if "secret" in a][0],
        "environment of the parent": lambda: open(f"/proc/{PARENT}/environ").read().split("SECRET=the")[1],
        "memory file of the parent": lambda: str(open(f"/proc/{PARENT}/mem", "rb")),
        "memory of the parent": memory_of_parent,
        "open files": open_files,
        "read": lambda: open(f"{FOLDER}/secret").read(),
        "list": lambda: os.listdir("/"),
        "stat": lambda: os.stat("/etc/passwd").st_size,
        "write": lambda: open(f"{FOLDER}/written", "wb", 0).write(b"x"),
        "append": lambda: open(f"{FOLDER}/secret", "ab", 0).write(b"x"),
        "remove": lambda: os.unlink(f"{FOLDER}/secret") or "removed",
        "make a folder": lambda: os.mkdir(f"{FOLDER}/made") or "made",
        "link": lambda: os.symlink("/", f"{FOLDER}/linked") or "linked",
        "permissions": lambda: os.chmod(f"{FOLDER}/secret", 0o777) or "changed",
        "program": lambda: os.execv("/bin/sh", ["sh", "-c", f"touch {FOLDER}/executed"]) if PLAN["exec"] else 1 / 0,
        "tcp": lambda: connected(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", PLAN["tcp"])),
        "udp": lambda: connected(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", PLAN["tcp"])),
        "abstract socket": lambda: connected(socket.AF_UNIX, socket.SOCK_STREAM, PLAN["abstract"]),
        "fork": forked,
        "signal": lambda: os.kill(PARENT, signal.SIGWINCH) or "sent",
        "signal a group": lambda: os.killpg(0, 0) or "sent",
        "ptrace": lambda: call(number(101, 117), 0x4206, PARENT, 0, 0),  # PTRACE_SEIZE, which does not stop the parent
        "limits of the parent": lambda: resource.prlimit(PARENT, resource.RLIMIT_CORE) or "read",
        "own limits": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)) or "set",
        "program code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) and "made",
        "namespace": lambda: LIBC.unshare(0x10000000) and 1 / 0 or "made",
        "io_uring": lambda: call(425, 8, ctypes.create_string_buffer(120)),
        "bpf": lambda: call(number(321, 280), 0, ctypes.create_string_buffer(b"\\2\\0\\0\\0\\4\\0\\0\\0\\4\\0\\0\\0\\1", 72), 72),
        "userfaultfd": lambda: call(number(323, 282), 1),
        "pidfd": lambda: os.pidfd_open(PARENT),
        "memory file": lambda: os.memfd_create("x"),
        "shared memory": lambda: call(number(29, 194), 0, 4096, 0o1600),
    }

    def examine(data, policy):
        found = {}
        for name, attempt in ATTEMPTS.items() if data == b"attack" else ():
            try:
                found[name] = str(attempt())[:60]
            except Exception:
                pass
        raise ImageRejected("corrupt", json.dumps(found))
    """
)

PARENT = """
import ctypes, json, os, sys
sys.path.insert(0, sys.argv[1])
held = ctypes.create_string_buffer(os.environ["SECRET"].encode())
os.set_inheritable(os.open(sys.argv[1] + "/secret", os.O_RDONLY), True)
plan = sys.argv[1] + "/plan.json"
json.dump(json.load(open(plan)) | {"address": ctypes.addressof(held)}, open(plan + ".new", "w"))
os.replace(plan + ".new", plan)
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder
with SandboxedDecoder(DecodePolicy(), timeout_s=60, memory_bytes=2 << 30, function="attacker.examine") as decoder:
    for _, verdict in decoder.run([(0, b"attack")]):
        print(json.dumps([verdict.reason, verdict.detail, decoder.lacking]))
"""


@pytest.fixture
def attack(tmp_path):
    """attack(lacking): what the attempts gained, and what the process says that the system lacks."""
    (tmp_path / "attacker.py").write_text(ATTACK)
    (tmp_path / "secret").write_text(SECRET)
    name = f"\0vitline-{os.getpid()}-{tmp_path.name}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()

        def run(lacking, may_exec=True):
            plan = {"lacking": lacking, "tcp": tcp.getsockname()[1], "abstract": name, "exec": may_exec}
            (tmp_path / "plan.json").write_text(json.dumps(plan))
            done = subprocess.run(
                [sys.executable, "-c", PARENT, str(tmp_path)],
                env=os.environ | {"SECRET": SECRET, "PYTHONPATH": str(Path(__file__).parents[3])},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            reason, detail, lacks = json.loads(done.stdout)
            assert reason == "corrupt", detail
            return json.loads(detail), lacks

        yield run


def test_a_taken_over_decoder_gains_nothing(attack, tmp_path):
    assert attack([]) == ({}, [])
    assert not {"written", "made", "linked", "executed"} & set(os.listdir(tmp_path))
    assert (tmp_path / "secret").read_text() == SECRET


def test_the_filter_of_system_calls_is_enough_where_there_is_no_landlock(attack):
    assert attack(["_enter_landlock"]) == ({}, ["_enter_landlock"])


def test_landlock_alone_keeps_files_network_and_the_parent(attack):
    """Where a kernel has no filter. What is left: memory and processes of its own, and changes that need only a path."""
    gained, lacks = attack(["_enter_filter"])
    assert lacks == ["_enter_filter"]
    assert gained.keys() <= {
        "stat", "permissions", "udp", "fork", "signal a group", "limits of the parent", "own limits", "program code",
        "namespace", "io_uring", "bpf", "userfaultfd", "pidfd", "memory file", "shared memory",
    }  # fmt: skip


def test_without_protection_the_attack_succeeds(attack):
    """Otherwise the tests above would prove nothing."""
    gained, _ = attack(["_enter_landlock", "_enter_filter"], may_exec=False)
    assert gained["environment of the parent"].startswith(SECRET.removeprefix("the"))
    assert gained["memory of the parent"] == SECRET[:16]
    assert gained["read"] == SECRET
    assert {
        "ptrace",
        "list",
        "make a folder",
        "tcp",
        "abstract socket",
        "fork",
        "signal",
        "program code",
    } <= gained.keys()
    assert not gained.keys() & {"environment", "arguments", "open files", "write"}  # as no kernel gives or takes these


def test_threads_work_and_a_spent_limit_of_time_ends_the_process():
    """Decoders may start threads. The limit counts what the process has used, so it cannot be caught or put off."""
    program = """
import os, signal, threading
from vitline.data_prep.examine.sandbox import enter_sandbox
enter_sandbox((0, 1, 2), 1)
thread = threading.Thread(target=os.write, args=(1, b"thread"))
thread.start()
thread.join()
while True:
    pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("thread", -24)  # SIGXCPU


def test_a_system_without_a_limit_of_open_files_is_no_error():
    """As macOS after `ulimit -n unlimited`; Linux always has a limit."""
    program = """
import os
os.sysconf = lambda name: 2**63 - 1
from vitline.data_prep.examine.sandbox import enter_sandbox
left_open = os.pipe()
enter_sandbox((0, 1, 2), 60)
try:
    os.write(left_open[1], b"x")
except OSError as error:
    os.write(1, error.strerror.encode())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("Bad file descriptor", "")


def test_a_process_that_has_used_its_time_is_replaced_before_its_limit(monkeypatch):
    from vitline.data_prep.decode import DecodePolicy
    from vitline.data_prep.examine import sandboxed_decoder

    with sandboxed_decoder.SandboxedDecoder(DecodePolicy(), timeout_s=59, memory_bytes=2 << 30) as examine:
        list(examine.run([(0, b"")]))
        first = examine._child
        list(examine.run([(0, b"")]))
        assert examine._child is first
        monkeypatch.setattr(sandboxed_decoder, "_CPU_S", 0)
        assert [tag for tag, _ in examine.run((i, b"") for i in range(3))] == [0, 1, 2]
        assert examine._child is not first
        assert first._process.poll() is not None


def test_what_the_system_lacks_is_said_and_the_rest_is_used():
    """A process with a second thread: Landlock is for single threads. The filter covers both."""
    program = """
import json, os, socket, threading
from vitline.data_prep.examine.sandbox import enter_sandbox
end = threading.Event()
def wait():
    end.wait()
    try:
        socket.socket()
    except PermissionError:
        os.write(1, b"|refused")
thread = threading.Thread(target=wait)
thread.start()
os.write(1, json.dumps(enter_sandbox((0, 1, 2), 60)).encode())
end.set()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lacking, _, thread = done.stdout.partition("|")
    assert "2 threads" in json.loads(lacking)[0]
    assert len(json.loads(lacking)) == 1
    assert thread == "refused"
