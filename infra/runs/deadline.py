"""The deadline of a job: its flow gives it a time, and it ends in that time also where the flow process has died."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from vitline.infra.runs.beside import beside
from vitline.infra.runs.claims import ClaimLost
from vitline.infra.runs.handle import Run
from vitline.infra.runs.run_state import CLAIM_LOST_EXIT_CODE, OUTCOMES, RunState, request_stop, state_of, write_state

log = logging.getLogger(__name__)
DEADLINE_PASSED = "the deadline of the flow run that started this job has passed"
_MARGIN_S = 5.0


@contextlib.contextmanager
def deadline_kept(held: Run, *, left_s: float | None, grace_s: float, leave: Callable[[int], object]) -> Iterator[None]:
    """Until the context is closed: asks the attempt to stop as out of time after `left_s`; None stands for no deadline.

    An attempt that hangs, and so has not followed after `grace_s` and a margin, gets that state here. Then `leave(exit code)` is
    called, which has to end this process, with the exit code of the state that counts. It is called without a state, too, where
    the store does not answer or the claim was lost.
    """
    if left_s is None:
        yield
        return
    run, attempt = held.store, held.attempt

    def watch(over: threading.Event) -> None:
        if over.wait(max(left_s, 0.0)):
            return
        log.warning("run=%s attempt=%d: %s", run.uri, attempt, DEADLINE_PASSED)
        with contextlib.suppress(OSError, RuntimeError):
            request_stop(run, "out_of_time", by=DEADLINE_PASSED, attempt=attempt)
        if over.wait(grace_s + _MARGIN_S):
            return
        state: RunState = "out_of_time"
        try:
            held.check()
            if (written := state_of(run, attempt)) and written != "running":
                state = written
            else:
                reason = f"{DEADLINE_PASSED}, and the job did not follow the stop request within {grace_s:g} s"
                state = write_state(run, state, attempt, reason=reason)
        except ClaimLost as lost:
            log.warning("run=%s attempt=%d: %s", run.uri, attempt, lost)
            leave(CLAIM_LOST_EXIT_CODE)
            return
        except (OSError, RuntimeError):
            log.warning("run=%s attempt=%d: ends without writing its state", run.uri, attempt, exc_info=True)
        leave(OUTCOMES[state].exit_code)

    with beside(watch, name="deadline"):
        yield
