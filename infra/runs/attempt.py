"""What every Ray job driver does around its work: `python -m MODULE --run URI --attempt N`.

A driver holds the lease of its run, works until it is done or stopped, writes `state.json`, and exits with the exit code of
that state. An attempt that has lost its lease writes nothing and exits with LEASE_LOST_EXIT_CODE.
"""

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, NoReturn

from vitline.infra.provenance import compared_versions, differing_versions
from vitline.infra.redact import cleaned, log_to_stderr
from vitline.infra.runs.handle import Run
from vitline.infra.runs.in_background import in_background
from vitline.infra.runs.lease import LeaseLost
from vitline.infra.runs.run_state import LEASE_LOST_EXIT_CODE, OUTCOMES, RunState, request_stop, state_of, write_state
from vitline.infra.runs.stopping import stop_on_signals
from vitline.infra.settings import Settings
from vitline.infra.storage import Store, open_store

log = logging.getLogger(__name__)
DEADLINE_PASSED = "the deadline of the flow run that started this job has passed"
_WATCH_S, _MARGIN_S = 0.5, 5.0
_MOST_CHARACTERS = 2000

Ending = tuple[RunState, dict[str, Any]]
"""The state that an attempt ends in, and the detail for `state.json`."""


def driver_main(description: str | None, drive: Callable[[Store, int], int]) -> NoReturn:
    """Parses the command line, calls `drive(run, attempt)`, and ends the process with the exit code that it returns."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run", required=True, help="URI of the run: <root>/runs/<run key>")
    parser.add_argument("--attempt", required=True, type=int)
    options = parser.parse_args()
    log_to_stderr()
    log.info("python=%s versions=%s", sys.executable, compared_versions())
    _leave(drive(open_store(options.run), options.attempt))


def run_attempt(
    run: Store,
    attempt: int,
    work: Callable[[Run], Ending],
    *,
    grace_s: float = 5.0,
    saves_on_cancel: bool = False,
    ends_when_stopped: bool = True,
    workers_write_state: bool = False,
    workers_wait: Callable[[], bool] = lambda: False,
    expected: tuple[type[Exception], ...] = (),
) -> int:
    """Runs one attempt to its end and returns the exit code. If `work` raises, the attempt has failed.

    `grace_s`, `saves_on_cancel`: see `stop_on_signals`. A deadline of the flow run ends the attempt as out of time.
    `ends_when_stopped`: a stop request ends this process at once; otherwise `work` must follow the request.
    `workers_write_state`: other processes write the states of this attempt, and then follow stop requests themselves. What
    `work` returns counts only if they wrote no end state.
    `workers_wait`: whether those processes have to be started again, so that none of them follows a stop request now.
    `expected`: errors whose message says enough, so that the log needs no traceback.
    """

    def may_leave() -> bool:
        return ends_when_stopped and (not (workers_write_state and state_of(run, attempt)) or workers_wait())

    try:
        with Run(run, attempt, beats=True) as held:
            if not workers_write_state:
                write_state(run, "running", attempt)
            stop_on_signals(run.uri, attempt, grace_s, saves_on_cancel=saves_on_cancel)
            left_s = Settings().time_left_s
            with guarded(held, may_leave, left_s=left_s, grace_s=grace_s):
                state, detail = _ending(work, held, expected)
            held.check()
            written = state_of(run, attempt) if workers_write_state else None
            state = written if written and written != "running" else write_state(run, state, attempt, **detail)
    except LeaseLost as lost:
        log.warning("run=%s attempt=%d: %s", run.uri, attempt, lost)
        return LEASE_LOST_EXIT_CODE
    log.info("run=%s attempt=%d state=%s", run.uri, attempt, state)
    return OUTCOMES[state].exit_code


def _ending(work: Callable[[Run], Ending], held: Run, expected: tuple[type[Exception], ...]) -> Ending:
    if differ := differing_versions():
        return "failed", {"reason": differ}
    try:
        return work(held)
    except LeaseLost:
        raise
    except Exception as error:
        # The text of an error of Ray may be a worker's traceback; its cause is the original exception.
        cause = getattr(error, "cause", None) or error
        reason = cleaned(" ".join(f"{type(cause).__name__}: {cause}".split()))[:_MOST_CHARACTERS]
        log.error("%s", reason, exc_info=not isinstance(error, expected))
        return "failed", {"reason": reason}


@contextlib.contextmanager
def guarded(
    held: Run,
    may_leave: Callable[[], bool],
    *,
    left_s: float | None,
    grace_s: float,
    leave: Callable[[int], object] | None = None,
) -> Iterator[None]:
    """Until the context is closed, ends this process once the lease is lost, in the state of a stop request if `may_leave()`, or past
    its deadline.

    The deadline is in `left_s` seconds; None stands for none. It becomes a stop request. An attempt that hangs, and so has not
    followed it after `grace_s` and a margin, ends as out of time, and without a state where the store does not answer. `leave(exit
    code)` has to end the process.
    """
    run, attempt, leave = held.store, held.attempt, leave or _leave
    deadline = inf if left_s is None else time.monotonic() + left_s

    def guard(over: threading.Event) -> None:
        hangs_at = inf
        while not held.is_lost:
            if time.monotonic() >= deadline and hangs_at == inf:
                log.warning("run=%s attempt=%d: %s", run.uri, attempt, DEADLINE_PASSED)
                with contextlib.suppress(OSError, RuntimeError):
                    request_stop(run, "out_of_time", by=DEADLINE_PASSED, attempt=attempt)
                hangs_at = time.monotonic() + grace_s + _MARGIN_S
            if time.monotonic() >= hangs_at:
                leave(_end_hung(held, grace_s))
                return
            with contextlib.suppress(OSError, RuntimeError):  # the store did not answer, or the lease was lost just now
                if (reason := held.stopped()) and may_leave():
                    state = held.end(reason, {"reason": held.stopped_by})
                    log.info("run=%s attempt=%d state=%s: %s", run.uri, attempt, state, held.stopped_by)
                    leave(OUTCOMES[state].exit_code)
            if over.wait(min(_WATCH_S, max(deadline - time.monotonic(), 0.0) or _WATCH_S)):
                return
        log.warning("run=%s attempt=%d: another attempt holds the lease; this one stops", run.uri, attempt)
        leave(LEASE_LOST_EXIT_CODE)

    with in_background(guard, name="attempt-guard"):
        yield


def _end_hung(held: Run, grace_s: float) -> int:
    """The exit code of an attempt that did not follow the stop request of its deadline, whose state is written here if it has none."""
    state: RunState = "out_of_time"
    try:
        held.check()
        written = state_of(held.store, held.attempt)
        reason = f"{DEADLINE_PASSED}, and the job did not follow the stop request within {grace_s:g} s"
        state = written if written and written != "running" else held.end(state, {"reason": reason})
    except LeaseLost as lost:
        log.warning("run=%s attempt=%d: %s", held.store.uri, held.attempt, lost)
        return LEASE_LOST_EXIT_CODE
    except (OSError, RuntimeError):
        log.warning("run=%s attempt=%d: ends without writing its state", held.store.uri, held.attempt, exc_info=True)
    return OUTCOMES[state].exit_code


def _leave(code: int) -> NoReturn:
    """Ends this process at once, so that no handler of Ray changes the exit code and no thread is waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
