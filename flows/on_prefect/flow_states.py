"""How flows end: run states as Prefect states, by the table in `infra/runs/run_state.py`; and what must not end a flow."""

import logging
import os
import sys

from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import CancelledRun, CrashedRun, FailedRun
from pydantic import ValidationError
from rich.console import Console

from vitline.flows.forms.refusals import problem_text
from vitline.flows.runs.engines import StopRequested
from vitline.flows.runs.stage import Skipped, StageFailed
from vitline.infra.redact import cleaned
from vitline.infra.runs.run_state import OUTCOMES, RunState

# Errors of input or environment, for which a sentence is enough. Any other error keeps its traceback.
EXPECTED = (ValueError, RuntimeError, OSError)


def prefect_state(state: RunState, message: str) -> State:
    """The Prefect state of a run state."""
    outcome = OUTCOMES[state]
    return State(type=StateType(outcome.prefect_type), name=outcome.prefect_name, message=cleaned(message))


def state_of(error: BaseException) -> State | None:
    """The state in which an error ends a flow; None if Prefect should handle the error with its traceback."""
    if isinstance(error, Skipped):
        return State(type=StateType.COMPLETED, name="Skipped", message=cleaned(str(error)))
    if isinstance(error, StopRequested):
        return prefect_state(error.reason, str(error))
    if isinstance(error, StageFailed):
        return prefect_state(error.state, str(error))
    if isinstance(error, ValidationError):
        return prefect_state("failed", "; ".join(problem_text(problem) for problem in error.errors()))
    if isinstance(error, EXPECTED):
        return prefect_state("failed", str(error))
    return None


def word_of(error: BaseException) -> str:
    """How a part of a flow ends that raises an error, in one word."""
    if isinstance(error, Skipped):
        return "skipped"
    if isinstance(error, StopRequested):
        return error.reason
    return error.state if isinstance(error, StageFailed) else "failed"


def filter_engine_log() -> None:
    """Keeps Prefect's engine from logging, after the final message of a flow, a traceback of its own code or an outdated
    state."""
    for name in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_is_news)


def outlive_the_worker() -> None:
    """Keeps this process running when its output pipe breaks, as when the worker that started it was killed.

    Prefect prints log lines with rich, which ends the process when the pipe is broken. Prefect's API has the lines anyway.
    """

    def discard_output(console: Console) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        for number in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(null, number)

    Console.on_broken_pipe = discard_output  # type: ignore[assignment]


def _is_news(record: logging.LogRecord) -> bool:
    # If the worker ends a run, the engine logs its state before that.
    if record.getMessage().startswith("Finished in state Running("):
        return False
    # A flow that returns a failed state has logged the reason. The engine then raises that state and logs the traceback.
    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun | CrashedRun | CancelledRun))
