"""How a flow ends: our outcomes as Prefect states, by the one table of `infra/runs/run_state.py`; and how it does not end."""

import logging
import os
import sys

from prefect.client.schemas.objects import StateType
from prefect.exceptions import CancelledRun, CrashedRun, FailedRun
from prefect.states import State
from pydantic import ValidationError
from rich.console import Console

from flows.requests.refusals import told
from flows.stages.engines import StopRequested
from flows.stages.stage import Skipped, StageFailed
from infra.redact import cleaned
from infra.runs.run_state import OUTCOMES, RunState

# What people made wrong or the world refused: a sentence is enough. Anything else keeps its traceback.
EXPECTED = (ValueError, RuntimeError, OSError)


def prefect_state(state: RunState, message: str) -> State:
    """The Prefect state of a run state."""
    outcome = OUTCOMES[state]
    return State(type=StateType(outcome.prefect_type), name=outcome.prefect_name, message=cleaned(message))


def state_of(error: BaseException) -> State | None:
    """The state in which an error ends a flow; None for one that Prefect is to handle with its traceback."""
    if isinstance(error, Skipped):
        return State(type=StateType.COMPLETED, name="Skipped", message=cleaned(str(error)))
    if isinstance(error, StopRequested):
        return prefect_state(error.reason, str(error))
    if isinstance(error, StageFailed):
        return prefect_state(error.state, str(error))
    if isinstance(error, ValidationError):
        return prefect_state("failed", "; ".join(told(problem) for problem in error.errors()))
    if isinstance(error, EXPECTED):
        return prefect_state("failed", str(error))
    return None


def told_once() -> None:
    """Keeps Prefect's engine from writing, below the sentence with which a flow has ended, a traceback of its own code or
    a state that the run has left."""
    for name in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_is_news)


def outlive_the_worker() -> None:
    """Keeps this process at work once nobody reads what it prints, as when the worker that started it was killed.

    Prefect prints log lines by rich, which ends the process where the pipe is broken; Prefect's API has them anyway.
    """

    def forget(console: Console) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(nowhere, number)

    Console.on_broken_pipe = forget  # type: ignore[assignment]


def _is_news(record: logging.LogRecord) -> bool:
    # The engine of a run that Prefect's worker ends knows no other state than the one before.
    if record.getMessage().startswith("Finished in state Running("):
        return False
    # A flow that returns a bad state has said why; the engine then raises that state and logs what it raised.
    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun | CrashedRun | CancelledRun))
