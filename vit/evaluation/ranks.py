"""The ranks of a trial that trains on several GPUs of one machine.

Rank 0 is the process of the trial, which is killed, repeated and watched like that of any other; the others are its children and end
with it. Where one of them ends early, so does rank 0.

    python -m vitline.vit.evaluation.ranks RANK SIZE FILE PARENT < the pickled function
"""

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from vitline.infra.children import end_with_parent, how_it_ended, start_python

log = logging.getLogger(__name__)
_LEAVE_S = 60.0
"""How long a rank may need to end after rank 0 has its result."""
_SAME_CAUSE_S = 5.0
"""How far apart two ranks notice the same cause: an error of both, or that one of them was killed."""


@contextlib.contextmanager
def ranks(size: int, of_others: Callable[[], object]) -> Iterator[None]:
    """Meanwhile this process is rank 0 of `size`, and so many less one run `of_others()`, which is pickled. Open it in a thread that lives
    as long as they do."""
    if size == 1:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="vitline-ranks-") as folder:
        meeting = str(Path(folder, "meeting"))
        killed, over = threading.Event(), threading.Event()
        others = [_start(rank, size, meeting, of_others) for rank in range(1, size)]
        for rank, child in enumerate(others, start=1):
            given = rank, child, killed, over
            threading.Thread(target=_end_with, args=given, name=f"rank-{rank}", daemon=True).start()
        try:
            with _joined(0, size, meeting):
                try:
                    yield
                except RuntimeError:  # so torch says that another rank was killed, often before its end is noticed here
                    if killed.wait(_SAME_CAUSE_S):
                        over.wait()  # for the end of this process
                    raise
            for child in others:
                child.wait(_LEAVE_S)
        finally:
            over.set()
            for child in others:
                child.kill()
                child.wait()


def _start(rank: int, size: int, meeting: str, work: Callable[[], object]) -> subprocess.Popen[bytes]:
    given = str(rank), str(size), meeting, str(os.getpid())
    child = start_python("vitline.vit.evaluation.ranks", *given, stdin=subprocess.PIPE)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:  # one that has ended is noticed by who waits for it
        child.stdin.write(pickle.dumps(work))
    return child


def _end_with(rank: int, child: subprocess.Popen[bytes], killed: threading.Event, over: threading.Event) -> None:
    """Ends this process where another rank fails: NCCL would wait for it for ever. An error of all ranks is left to rank 0 to raise."""
    code = child.wait()
    if code < 0:
        killed.set()
    if code != 0 and not over.wait(_SAME_CAUSE_S):
        log.error("rank %d of the trial %s, and its log above says why; so does rank 0", rank, how_it_ended(code))
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _joined(rank: int, size: int, meeting: str) -> Iterator[None]:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    rank, size, meeting, parent = sys.argv[1:]
    if not end_with_parent(int(parent), signal.SIGKILL):
        return
    with _joined(int(rank), int(size), meeting):
        pickle.load(sys.stdin.buffer)()


if __name__ == "__main__":
    main()
