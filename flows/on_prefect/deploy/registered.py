"""The deployments of a project as Prefect has them: the values that fill their forms, their schedules, and what starts next."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort

from vitline.flows.catalog.registered_by import is_of_project
from vitline.flows.forms.forms import FORMS
from vitline.flows.on_prefect.deploy.schedules import schedule_text
from vitline.flows.on_prefect.deployments import DEPLOYMENTS, ENTRYPOINTS, Deployment, form_defaults
from vitline.flows.on_prefect.prefect_observer import client
from vitline.infra.settings import Settings

_PAGE = 100


def registered_rows(settings: Settings) -> list[dict[str, Any]]:
    """The rows of `vitline flows ls`: deployments with the tag of the project, also those that people added, by name."""
    with client() as api:
        found = tagged(api, settings.project)
        flows = {flow_id: api.read_flow(flow_id).name for flow_id in {each.flow_id for each in found}}
        rows = [_row(each, flows[each.flow_id], next_run(api, each.id)) for each in found]
    return sorted(rows, key=lambda row: str(row["deployment"]))


def tagged(api: SyncPrefectClient, project: str) -> list[DeploymentResponse]:
    """The deployments with the tag of a project."""
    ours = DeploymentFilter.model_validate({"tags": {"all_": [project]}})
    return api.read_deployments(deployment_filter=ours)


def next_run(api: SyncPrefectClient, deployment: UUID) -> FlowRun | None:
    """The next scheduled run of a deployment, if it has one."""
    scheduled = {"deployment_id": {"any_": [deployment]}, "state": {"type": {"any_": [StateType.SCHEDULED]}}}
    wanted = FlowRunFilter.model_validate(scheduled)
    runs = api.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=1)
    return runs[0] if runs else None


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
    flow = name.partition("/")[0]
    ours = next((each.request for each in DEPLOYMENTS if each.full_name == name), {})
    defaults = form_defaults(flow) if flow in FORMS else {}
    return {
        field: value
        for field, value in request.items()
        if field in ours or field not in defaults or value != defaults[field]
    }


def deployments_of(api: SyncPrefectClient, project: str) -> Iterator[tuple[str, DeploymentResponse]]:
    """Those of vitline and this project, by flow and with their full names: flows of other teams may have the same names."""
    for flow in sorted(FORMS):
        flows = FlowFilter.model_validate({"name": {"any_": [flow]}})
        offset = 0
        while page := api.read_deployments(flow_filter=flows, limit=_PAGE, offset=offset):
            offset += len(page)
            for deployment in page:
                ours = is_of_project(deployment.parameter_openapi_schema, project)
                if ours and (deployment.entrypoint or "").startswith(ENTRYPOINTS):
                    yield f"{flow}/{deployment.name}", deployment


def beside_file(deployments: Sequence[Deployment], settings: Settings) -> dict[str, bool]:
    """The registered deployments of the project that are not among those of a file, and whether each starts by itself."""
    ours = {deployment.full_name for deployment in deployments}
    with client() as api:
        return {
            name: not known.paused and any(schedule.active for schedule in known.schedules)
            for name, known in deployments_of(api, settings.project)
            if name not in ours
        }


def beside_lines(file: str, deployments: Sequence[Deployment], beside: Mapping[str, bool]) -> list[str]:
    """What a user should know of deployments that are not in the file: they stay, and housekeeping may be missing."""
    lines = []
    if beside:
        shown = ", ".join(f"{name} (active)" if active else name for name, active in beside.items())
        lines.append(
            f"not in {file}, and left as they are: {shown}. `prefect deployment delete FLOW/NAME` deletes one."
        )
    active = {each.flow for each in deployments if starts_by_itself(each)}
    active |= {name.partition("/")[0] for name, starts in beside.items() if starts}
    for each in filter(starts_by_itself, DEPLOYMENTS):
        if each.flow not in active:
            times = [{"cron": schedule.cron} for schedule in each.schedules]
            entry: dict[str, Any] = {
                "name": each.name,
                "flow": each.flow,
                "schedules": times,
                "concurrency": each.concurrency,
            }
            entry |= {"request": each.request} if each.request else {}
            lines.append(f"no schedule starts {each.flow}; in {file} this does: `- {json.dumps(entry)}`")
    return lines


def starts_by_itself(deployment: Deployment) -> bool:
    """Whether a new registration has an active schedule."""
    return any(schedule.active is not False for schedule in deployment.schedules)
