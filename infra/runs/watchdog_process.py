"""The child process of a `Watchdog`: waits until its parent makes no progress, takes down its stacks and kills it.

    python -m vitline.infra.runs.watchdog_process JSON < a byte for each piece of progress

Until then it imports the standard library only, which keeps it at some 15 MB.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from vitline.infra.runs.liveness import Watch

ENDED = "its process was killed, perhaps for its memory, or crashed"
STACKS_SIGNAL = signal.SIGUSR2
"""Makes the watched process write the stacks of its threads, also while one of them holds the interpreter lock."""
_LOOK_S = 1.0
_ANSWER_S = 10.0
"""For so long the parent may take to write its stacks; they are complete once they were unchanged for a twentieth of it."""
_STORE_S = 60.0
"""How long a store may take to accept the stacks. A store that is away must not keep a hung process alive."""
_PEERS_S = 5.0
"""All ranks of a training hang together. They are killed this much after the first sign, so that none dies of another's end
before its own stacks are written."""
_MOST_CHARACTERS = 64 * 1024
_SHOWN_FRAMES = 3


@dataclass(frozen=True)
class WatchedProcess:
    """The process to watch, as its `Watchdog` describes it."""

    pid: int
    thread: int
    stacks: str
    run: str
    attempt: int
    timeout_s: float
    who: str
    fields: dict[str, object]
    notes_end: bool

    def parent_alive(self) -> bool:
        """Whether the parent of this process is still the one to watch: its number may be given to another process."""
        return os.getppid() == self.pid


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to the parent, too, which has work to save
        signal.signal(number, signal.SIG_IGN)
    hung = WatchedProcess(**json.loads(sys.argv[1]))
    if wait_for_hang(hung):
        end(hung)
    elif hung.notes_end:
        record(hung, time.time(), ENDED)
    Path(hung.stacks).unlink(missing_ok=True)  # a killed process leaves it behind


def wait_for_hang(hung: WatchedProcess) -> bool:
    """Returns True once there was no progress for the time-out, False once the parent has ended."""
    watch, done = Watch(), 0
    os.set_blocking(0, False)
    while hung.parent_alive():
        with contextlib.suppress(BlockingIOError):
            progress = os.read(0, 1 << 16)
            if not progress:
                return False
            done += len(progress)
        if watch.unchanged_s(done) >= hung.timeout_s:
            return True
        time.sleep(min(_LOOK_S, hung.timeout_s / 10))
    return False


def end(hung: WatchedProcess) -> None:
    """Takes down the stacks, writes them to the log and to the run, and kills the process."""
    at = time.time()
    text = in_order(stacks_of(hung), hung.thread)[:_MOST_CHARACTERS]
    reason = f"no progress for {hung.timeout_s:g} s: {place(text)}"
    print(f"{hung.who}: {reason}. It is killed. The stacks of its threads:\n{text}", file=sys.stderr, flush=True)
    began = time.monotonic()
    writer = threading.Thread(target=record, args=(hung, at, reason, text), daemon=True)
    writer.start()
    writer.join(_STORE_S)
    time.sleep(max(0.0, began + _PEERS_S - time.monotonic()))
    if hung.parent_alive():
        os.kill(hung.pid, signal.SIGKILL)


def stacks_of(hung: WatchedProcess) -> str:
    """What the parent's fault handler writes, or where its threads are in the kernel if it is stopped or does not answer."""
    kernel = threads_in_kernel(hung.pid)
    if "(stopped)" in kernel:
        return f"The process is stopped. Its threads in the kernel:\n{kernel}"
    if hung.parent_alive():
        os.kill(hung.pid, STACKS_SIGNAL)
    file, size, since = Path(hung.stacks), 0, time.monotonic()
    began = since
    while time.monotonic() < began + _ANSWER_S and (size == 0 or time.monotonic() < since + _ANSWER_S / 20):
        time.sleep(_ANSWER_S / 200)
        with contextlib.suppress(OSError):  # the process was ended meanwhile, and with it the file
            if file.stat().st_size != size:
                size, since = file.stat().st_size, time.monotonic()
    with contextlib.suppress(OSError):
        if size:
            return file.read_text(errors="replace")
    return f"The process does not answer the signal that asks for its stacks. Its threads in the kernel:\n{kernel}"


def threads_in_kernel(pid: int) -> str:
    """The state of each thread, and the function of the kernel that it waits in."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            state = next(line for line in (task / "status").read_text().splitlines() if line.startswith("State:"))
            lines.append(f"  {task.name} {state} {(task / 'wchan').read_text()}")
    return "\n".join(lines)


def in_order(text: str, thread: int) -> str:
    """The stacks with that of the watched thread first, so that a limit of length never cuts it off."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(sorted(blocks, key=lambda block: f"{thread:#018x}" not in block.partition("\n")[0]))


def place(text: str) -> str:
    """The innermost frames of the first stack, in a few words."""
    frames = [line.strip() for line in text.partition("\n\n")[0].splitlines() if line.startswith("  File ")]
    if not frames:
        return text.partition("\n")[0]
    return "it is in " + ", called by ".join(map(shortened, frames[:_SHOWN_FRAMES]))


def shortened(frame: str) -> str:
    """`File "/a/b.py", line 3 in read` -> `read (b.py:3)`."""
    file, _, rest = frame.removeprefix('File "').partition('", line ')
    line, _, name = rest.partition(" in ")
    return f"{name} ({os.path.basename(file)}:{line})"


def record(hung: WatchedProcess, at: float, reason: str, text: str = "") -> None:
    """Writes the error, and the stacks if there are any, unless the attempt has ended or lost the lease of the run."""
    from vitline.infra.redact import cleaned
    from vitline.infra.runs.lease import read_lease
    from vitline.infra.runs.run_state import read_stop, state_of
    from vitline.infra.storage import open_store

    run, name = open_store(hung.run), f"a{hung.attempt}-{int(at * 1000)}-{hung.who}"
    stacks = f"stacks/{name}.txt"
    try:
        if (lease := read_lease(run)) is None or lease.attempt != hung.attempt:
            return
        stop = read_stop(run)
        stopped = stop is not None and stop["attempt"] == hung.attempt
        if not text and (stopped or state_of(run, hung.attempt) not in (None, "running")):
            return  # it was ended with its job
        error = {"at": at, **hung.fields, "error": cleaned(reason)}
        if text:
            run.write(stacks, cleaned(text).encode())
            where = f"; the stacks of its threads are in {run.uri_of(stacks)}"
            error |= {"error": cleaned(f"{reason}{where}"), "stacks": stacks}
        run.write_json(f"errors/{name}.json", error)
    except Exception as error:
        print(f"the end of {hung.who} could not be written to {hung.run}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
