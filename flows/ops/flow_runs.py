"""Flow runs as reconcile sees them: what it reads from Prefect and sets there. Imports no Prefect."""

from collections.abc import Sequence
from typing import NamedTuple

from vitline.infra.runs.run_state import RunState


class SeenFlowRun(NamedTuple):
    """A flow run as Prefect shows it."""

    id: str
    name: str
    state: str
    """Prefect's type of the state: PENDING, RUNNING, CANCELLING, PAUSED, COMPLETED, FAILED, CANCELLED, CRASHED, ..."""
    since: float
    """When it entered the state, in Unix seconds."""
    parent: str | None = None
    """The parent flow run of a subflow."""
    awaits_infrastructure: bool = False
    """Whether it is PENDING in a pool where a start may take long without any sign of life."""
    resume_at: float | None = None
    """Of a suspended flow run: when it resumes by itself, in Unix seconds; None if only a person resumes it."""


class FlowRuns:
    """What reconcile reads from Prefect and sets there."""

    def unfinished(self) -> list[SeenFlowRun]:
        return []

    def find(self, ids: Sequence[str]) -> dict[str, SeenFlowRun]:
        return {}

    def last_line(self, flow_run_id: str) -> float | None:
        return None

    def end(self, flow_run_id: str, state: RunState, message: str) -> None:
        """Sets the final state of a flow run, unless it has one."""

    def resume(self, flow_run_id: str) -> None:
        """Resumes a suspended flow run."""


class NoFlowRuns(FlowRuns):
    """Stands in if there is no Prefect server: runs of commands are still reconciled."""
