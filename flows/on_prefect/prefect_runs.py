"""What Prefect knows of our flow runs, for `reconcile`: which have not ended, and the end of those that never will."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import LogSort
from prefect.exceptions import ObjectNotFound

from flows.on_prefect.flow_states import prefect_state
from flows.on_prefect.prefect_observer import client
from flows.ops.reconcile import SeenFlowRun
from infra.runs.run_state import RunState

_PAGE = 200
_UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]


class PrefectFlowRuns:
    """Those of the flows with these names, at the server of PREFECT_API_URL."""

    def __init__(self, flow_names: Iterable[str]) -> None:
        self._flow_names = sorted(set(flow_names))

    def unfinished(self) -> list[SeenFlowRun]:
        """PENDING, RUNNING, CANCELLING or PAUSED, subflows included."""
        ours = FlowFilter(name=FlowFilterName(any_=self._flow_names))
        at_work = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNFINISHED)))
        with client() as api:
            runs: list[FlowRun] = []
            while page := api.read_flow_runs(flow_filter=ours, flow_run_filter=at_work, limit=_PAGE, offset=len(runs)):
                runs += page
            return [seen(api, run) for run in runs]

    def find(self, ids: Sequence[str]) -> dict[str, SeenFlowRun]:
        """By id; what Prefect does not know is left out."""
        with client() as api:
            runs: list[FlowRun] = []
            for first in range(0, len(ids), _PAGE):
                wanted = [UUID(flow_run_id) for flow_run_id in ids[first : first + _PAGE]]
                runs += api.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=wanted)))
            return {str(run.id): seen(api, run) for run in runs}

    def last_line(self, flow_run_id: str) -> float | None:
        """Unix seconds of the last line that a flow run has logged; None where it has said nothing."""
        mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[UUID(flow_run_id)]))
        with client() as api:
            lines = api.read_logs(mine, limit=1, sort=LogSort.TIMESTAMP_DESC)
        return lines[0].timestamp.timestamp() if lines else None

    def end(self, flow_run_id: str, state: RunState, message: str) -> None:
        """Gives a flow run its final state, unless it has one. Raises RuntimeError where Prefect refuses it."""
        with client() as api:
            try:
                run = api.read_flow_run(UUID(flow_run_id))
            except ObjectNotFound:
                return
            if run.state is not None and run.state.is_final():
                return
            answer = api.set_flow_run_state(run.id, prefect_state(state, message))
            if answer.status != SetStateStatus.ACCEPT:
                raise RuntimeError(f"Prefect refused to end flow run {run.name}: {answer.details}")


def seen(api: SyncPrefectClient, run: FlowRun) -> SeenFlowRun:
    assert run.state is not None
    parent = api.read_task_run(run.parent_task_run_id).flow_run_id if run.parent_task_run_id else None
    since = run.state.timestamp
    assert isinstance(since, datetime)
    pool = run.work_pool_name
    # A process starts within seconds; a pod or a machine may be waited for as long as it takes.
    slow = run.state.is_pending() and pool is not None and api.read_work_pool(pool).type != "process"
    return SeenFlowRun(
        id=str(run.id),
        name=run.name,
        state=run.state.type.value,
        since=since.timestamp(),
        parent=str(parent) if parent else None,
        awaits_infrastructure=slow,
    )
