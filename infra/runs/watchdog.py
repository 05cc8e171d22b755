"""Inside a job: ends a process in which nothing makes progress any more, with the stacks of all its threads.

The watch is kept by a child process (`watchdog_process.py`), because a thread here could not run where the hung thread holds
Python's interpreter lock, could not write to a store whose client is what hangs, and stops with a stopped process.
"""

import contextlib
import faulthandler
import json
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Self, TypeVar

from vitline.infra.children import start_python
from vitline.infra.runs.watchdog_process import STACKS_SIGNAL

log = logging.getLogger(__name__)
T = TypeVar("T")


class Watchdog:
    """As a context: kills this process once `progress()` has not been called for `timeout_s`; None stands for no limit.

    Before that, the stacks of all threads go to stderr and to `stacks/a<attempt>-<milliseconds>-<who>.txt` of the run, and
    an error that names them to `errors/`, with `fields`. The error says where the thread is that opened the context. Nothing
    is written to the run where another attempt holds its lease. Time in which this machine is suspended does not count.

    It can be pickled until it is opened.
    """

    def __init__(
        self,
        run_uri: str,
        attempt: int,
        timeout_s: float | None,
        *,
        who: str,
        fields: Mapping[str, object] = MappingProxyType({}),
        notes_end: bool = False,
    ) -> None:
        """`notes_end`: an error goes to `errors/` also where the process ends otherwise before the context is closed."""
        self._run_uri, self._attempt, self._timeout_s = run_uri, attempt, timeout_s
        self._who, self._fields, self._notes_end = who, dict(fields), notes_end
        self._child: subprocess.Popen[bytes] | None = None
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._timeout_s is None:
            return self
        with contextlib.ExitStack() as stack:
            stacks = stack.enter_context(tempfile.NamedTemporaryFile(prefix="vitline-stacks-"))
            faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
            stack.callback(faulthandler.unregister, STACKS_SIGNAL)
            self._child = self._start(stacks.name, self._timeout_s)
            stack.callback(self._end, self._child)
            _OPEN.append(self)
            stack.callback(_OPEN.remove, self)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def progress(self) -> None:
        """Something was done: a batch, a step, some bytes of a checkpoint. Never waits; any thread may call it."""
        child = self._child
        if child is not None and child.stdin is not None:
            # The child is slow to read, and has enough to read; or this context was closed meanwhile.
            with contextlib.suppress(BlockingIOError, ValueError):
                try:
                    os.write(child.stdin.fileno(), b".")
                except BrokenPipeError:
                    self._child = None
                    log.warning("the watchdog of %s is gone; a hang of this process would not be noticed", self._who)

    def _start(self, stacks: str, timeout_s: float) -> subprocess.Popen[bytes]:
        job = {
            "pid": os.getpid(),
            "thread": threading.get_ident(),
            "stacks": stacks,
            "run": self._run_uri,
            "attempt": self._attempt,
            "timeout_s": timeout_s,
            "who": self._who,
            "fields": self._fields,
            "notes_end": self._notes_end,
        }
        child = start_python(
            "vitline.infra.runs.watchdog_process",
            json.dumps(job),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # who ends the group of this process must not end its witness
        )
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """Before the signal gets its old meaning, which would end this process."""
        self._child = None
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()


def note_progress() -> None:
    """Something was done: the watchdogs that are open in this process learn it. For code that is called by those who watch and by
    others. Never waits; any thread may call it."""
    for watchdog in tuple(_OPEN):
        watchdog.progress()


def watched(items: Iterable[T]) -> Iterator[T]:
    """`items`; each that arrives, and each request for the next one, counts as progress."""
    for item in items:
        note_progress()
        yield item
        note_progress()


_OPEN: Final = list[Watchdog]()
