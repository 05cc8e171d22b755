"""How a flow ends: our outcomes as Prefect states, by the one table of `infra/run_state.py`."""

from prefect.client.schemas.objects import StateType
from prefect.states import State

from flows.engines import StopRequested
from flows.stage import Skipped, StageFailed
from infra.run_state import OUTCOMES, RunState

# What people made wrong or the world refused: a sentence is enough. Anything else keeps its traceback.
EXPECTED = (ValueError, RuntimeError, OSError)


def prefect_state(state: RunState, message: str) -> State:
    """The Prefect state of a run state."""
    outcome = OUTCOMES[state]
    return State(type=StateType(outcome.prefect_type), name=outcome.prefect_name, message=message)


def state_of(error: BaseException) -> State | None:
    """The state in which an error ends a flow; None for one that Prefect is to handle with its traceback."""
    if isinstance(error, Skipped):
        return State(type=StateType.COMPLETED, name="Skipped", message=str(error))
    if isinstance(error, StopRequested):
        return prefect_state(error.reason, str(error))
    if isinstance(error, StageFailed):
        return prefect_state(error.state, str(error))
    if isinstance(error, EXPECTED):
        return prefect_state("failed", str(error))
    return None
