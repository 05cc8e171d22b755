"""Stop requests inside a job: turns signals into `stop.json`, and polls `stop.json` in a thread."""

import contextlib
import os
import signal
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Self

from vitline.infra.runs.lease import LeaseLost, read_lease
from vitline.infra.runs.run_state import OUTCOMES, RunState, StopReason, read_stop, request_stop, state_of, write_state
from vitline.infra.storage import Store, open_store

_POLL_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stop_on_signals(run_uri: str, attempt: int, grace_s: float, *, saves_on_cancel: bool = False) -> None:
    """Makes SIGTERM, SIGINT and SIGHUP request the attempt to stop as preempted. The process exits after `grace_s` in any case.

    If the attempt was requested to stop as cancelled, the process writes that state, unless another attempt holds the lease,
    and exits at once. With `saves_on_cancel`, an attempt whose state is running gets `grace_s` to save first.
    """

    def request(by: str) -> None:
        run = open_store(run_uri)
        request_stop(run, "preempted", by=by, attempt=attempt)
        stop = read_stop(run)
        if stop is None or (stop["attempt"], stop["reason"]) != (attempt, "cancelled"):
            return
        own_state = state_of(run, attempt)
        if own_state == "running" and saves_on_cancel:
            return
        lease = read_lease(run)
        ended: RunState = "cancelled"
        if own_state in (None, "running") and lease is not None and lease.attempt == attempt:
            with contextlib.suppress(LeaseLost):
                ended = write_state(run, "cancelled", attempt, reason=stop["by"])
        os._exit(OUTCOMES[ended].exit_code)

    def on_signal(number: int, frame: FrameType | None) -> None:
        exit_timer = threading.Timer(grace_s, lambda: os._exit(OUTCOMES["preempted"].exit_code))
        exit_timer.daemon = True
        exit_timer.start()
        signal.signal(number, signal.SIG_IGN)
        by = signal.Signals(number).name
        # The handler may interrupt a store operation of this thread. A separate thread cannot deadlock with it.
        threading.Thread(target=request, args=(by,)).start()

    for number in _SIGNALS:
        signal.signal(number, on_signal)


@contextlib.contextmanager
def joining_ray() -> Iterator[None]:
    """Around ray.init. It replaces the handlers of these signals, which are restored at the end, and lets all workers search the
    folder in which it is called first: this is that of the standard library instead of one whose files may be named like modules."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        with contextlib.chdir(sysconfig.get_path("stdlib")):
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class StopPoller:
    """Reads `stop.json` once a second in a thread, if `active`. `asked()` returns the latest request to this attempt without waiting."""

    def __init__(self, run: Store, attempt: int, *, active: bool = True) -> None:
        self._run, self._attempt, self._active = run, attempt, active
        self._answer: StopReason | None = None
        self.by = ""
        """Who requested the stop; empty without a request."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-watch", daemon=True)

    def asked(self) -> StopReason | None:
        return self._answer

    def read(self) -> None:
        """Reads the request now. Errors of the store are ignored; the next poll tries again."""
        with contextlib.suppress(OSError, RuntimeError):
            stop = read_stop(self._run)
            if stop is not None and stop["attempt"] == self._attempt:
                self.by, self._answer = stop["by"], stop["reason"]

    def __enter__(self) -> Self:
        if self._active:
            self.read()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._active:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            self.read()
