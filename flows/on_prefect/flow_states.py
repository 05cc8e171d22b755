"""How flows end: run states as Prefect states, by the table in `infra/runs/run_state.py`."""

from prefect.client.schemas.objects import State, StateType
from pydantic import ValidationError

from vitline.flows.forms.refusals import problem_text
from vitline.flows.runs.services import StopRequested
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
