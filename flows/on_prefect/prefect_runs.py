"""Prefect's flow runs for `reconcile`: lists the unfinished ones and ends those whose process is gone."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter, LogFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus
from prefect.client.schemas.sorting import LogSort
from prefect.exceptions import ObjectNotFound

from vitline.flows.catalog.registered_by import is_of_project
from vitline.flows.forms.forms import FORMS
from vitline.flows.on_prefect.flow_states import prefect_state
from vitline.flows.on_prefect.prefect_observer import client
from vitline.flows.ops.flow_runs import FlowRuns, SeenFlowRun
from vitline.infra.runs.run_state import RunState

_PAGE = 200
_UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]


class PrefectFlowRuns(FlowRuns):
    """The flow runs of the flows with these names, at the server of PREFECT_API_URL, without those of other projects."""

    def __init__(self, project: str, flow_names: Iterable[str] = FORMS) -> None:
        self._flow_names, self._project = sorted(set(flow_names)), project

    def unfinished(self) -> list[SeenFlowRun]:
        """The flow runs that are PENDING, RUNNING, CANCELLING or PAUSED, subflows included."""
        flows = FlowFilter.model_validate({"name": {"any_": self._flow_names}})
        states = FlowRunFilter.model_validate({"state": {"type": {"any_": _UNFINISHED}}})
        with client() as api:
            runs: list[FlowRun] = []
            while page := api.read_flow_runs(flow_filter=flows, flow_run_filter=states, limit=_PAGE, offset=len(runs)):
                runs += page
            theirs = {id for id in {run.deployment_id for run in runs if run.deployment_id} if self._is_theirs(api, id)}
            found = [seen(api, run) for run in runs if run.deployment_id not in theirs]
            others = {str(run.id) for run in runs if run.deployment_id in theirs}
            return [run for run in found if run.parent not in others]

    def _is_theirs(self, api: SyncPrefectClient, deployment: UUID) -> bool:
        """Whether another project has registered the deployment."""
        try:
            return not is_of_project(api.read_deployment(deployment).parameter_openapi_schema, self._project)
        except ObjectNotFound:
            return False

    def find(self, ids: Sequence[str]) -> dict[str, SeenFlowRun]:
        """Flow runs by id, without those that Prefect does not know."""
        with client() as api:
            runs: list[FlowRun] = []
            for first in range(0, len(ids), _PAGE):
                page = [UUID(flow_run_id) for flow_run_id in ids[first : first + _PAGE]]
                runs += api.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": page}}))
            return {str(run.id): seen(api, run) for run in runs}

    def last_line(self, flow_run_id: str) -> float | None:
        """Unix seconds of the last line that a flow run has logged; None if it has logged none."""
        logs = LogFilter.model_validate({"flow_run_id": {"any_": [UUID(flow_run_id)]}})
        with client() as api:
            lines = api.read_logs(logs, limit=1, sort=LogSort.TIMESTAMP_DESC)
        return lines[0].timestamp.timestamp() if lines else None

    def end(self, flow_run_id: str, state: RunState, message: str) -> None:
        """Sets the final state of a flow run, unless it has one. Raises RuntimeError if Prefect refuses it."""
        with client() as api:
            try:
                run = api.read_flow_run(UUID(flow_run_id))
            except ObjectNotFound:
                return
            if run.state is not None and run.state.is_final():
                return
            accepted(api.set_flow_run_state(run.id, prefect_state(state, message)), f"end flow run {run.name}")

    def resume(self, flow_run_id: str) -> None:
        """Resumes a suspended flow run, as the button of its page does. Raises RuntimeError if Prefect refuses it."""
        with client() as api:
            accepted(api.resume_flow_run(UUID(flow_run_id)), f"resume flow run {flow_run_id}")


def accepted(answer: OrchestrationResult[Any], what: str) -> None:
    """Raises RuntimeError if Prefect has refused a new state."""
    if answer.status != SetStateStatus.ACCEPT:
        raise RuntimeError(f"Prefect refused to {what}: {answer.details}")


def seen(api: SyncPrefectClient, run: FlowRun) -> SeenFlowRun:
    assert run.state is not None
    parent = api.read_task_run(run.parent_task_run_id).flow_run_id if run.parent_task_run_id else None
    since = run.state.timestamp
    assert isinstance(since, datetime)
    limit = run.state.state_details.scheduled_time
    pool = run.work_pool_name
    # A process starts within seconds; a pod or a machine may take any time.
    slow = run.state.is_pending() and pool is not None and api.read_work_pool(pool).type != "process"
    return SeenFlowRun(
        id=str(run.id),
        name=run.name,
        state=run.state.type.value,
        since=since.timestamp(),
        parent=str(parent) if parent else None,
        awaits_infrastructure=slow,
        resume_at=limit.timestamp() if limit is not None and run.state.is_paused() else None,
    )
