"""The deployments as Prefect has them: the values that fill their forms, their schedules, and what starts next."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from pydantic_core import to_jsonable_python

from vitline.flows.on_prefect.deployments import DEPLOYMENTS
from vitline.flows.on_prefect.prefect_observer import client
from vitline.flows.on_prefect.registration import schedule_text
from vitline.infra.settings import Settings

_LOOKED_AT = 200


def registered_rows(settings: Settings) -> list[dict[str, Any]]:
    """The rows of `vitline flows ls`: deployments with the tag of the project, also those that people added, by name."""
    with client() as api:
        ours = DeploymentFilter.model_validate({"tags": {"all_": [settings.project]}})
        found = api.read_deployments(deployment_filter=ours)
        flows = {flow_id: api.read_flow(flow_id).name for flow_id in {each.flow_id for each in found}}
        due = next_runs(api, settings.project)
    rows = [_row(each, flows[each.flow_id], due.get(each.id)) for each in found]
    return sorted(rows, key=lambda row: str(row["deployment"]))


def next_runs(api: SyncPrefectClient, project: str) -> dict[UUID | None, FlowRun]:
    """The next scheduled run of each deployment of a project that has one."""
    scheduled = {"tags": {"all_": [project]}, "state": {"type": {"any_": [StateType.SCHEDULED]}}}
    runs = api.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(scheduled),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        limit=_LOOKED_AT,
    )
    return {run.deployment_id: run for run in reversed(runs)}


def _row(deployment: DeploymentResponse, flow: str, due: FlowRun | None) -> dict[str, Any]:
    schedules = [schedule_text(each) for each in deployment.schedules]
    start = due.expected_start_time if due else None
    name = f"{flow}/{deployment.name}"
    return {
        "deployment": name,
        "what": " ".join((deployment.description or "").partition("\n\n")[0].split()),
        "filled in": _chosen(name, (deployment.parameters or {}).get("request") or {}),
        "schedule": "; ".join(text.removeprefix("schedule ") for text in schedules)
        + ("; the deployment is paused" if deployment.paused else ""),
        "next start": f"{start:%Y-%m-%d %H:%M} UTC" if start else "",
    }


def _chosen(name: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a form that vitline fills in for this deployment, and those that are not the defaults of their fields."""
    same_form = [each for each in DEPLOYMENTS if each.flow == name.partition("/")[0]]
    ours = next((each.request for each in same_form if each.full_name == name), {})
    fields = same_form[0].model.model_fields if same_form else {}

    def is_default(field: str, value: Any) -> bool:
        if field not in fields or fields[field].is_required():
            return False
        return bool(value == to_jsonable_python(fields[field].get_default(call_default_factory=True)))

    return {field: value for field, value in request.items() if field in ours or not is_default(field, value)}
