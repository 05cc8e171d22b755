"""Starts deployments from a shell as the Prefect UI does, with the same form and the same checks before submission."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, LogFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import LogSort
from prefect.exceptions import ObjectNotFound

from vitline.flows import console
from vitline.flows.forms.forms import FORMS, PipelineRequest
from vitline.flows.forms.pipeline_plan import PipelinePlan, resolve_pipeline
from vitline.flows.on_prefect.deploy.registered import deployments_of
from vitline.flows.on_prefect.deploy.registration import check_root
from vitline.flows.on_prefect.deployments import DEPLOYMENTS, deployment_named
from vitline.flows.on_prefect.flow_run import read_request
from vitline.flows.on_prefect.prefect_observer import client
from vitline.flows.on_prefect.prefect_private import LAST_LINE, RUN_LOG
from vitline.flows.on_prefect.prefect_runs import accepted
from vitline.flows.on_prefect.request_checks import check_request
from vitline.flows.ops.server_http import flow_run_page
from vitline.infra.config import FrozenConfig
from vitline.infra.names import known_names_text
from vitline.infra.ray_jobs import AWAY_S
from vitline.infra.settings import Settings

PIPELINE = "pretrain-then-transfer"
POLL_S = 1.0
LOOK_BACK = 50
# How long to wait for the last log lines, which a flow process sends after its final state; a killed process sends none.
LAST_LINES_S = 10.0


def trigger(settings: Settings, name: str, changes: Mapping[str, Any]) -> tuple[FlowRun, str]:
    """Starts the deployment `name` (`flow/deployment`) with these changes to its form; returns the flow run and its page.

    Raises ValueError before submission for a request that the form or the flow would refuse, and RuntimeError if Prefect or
    the deployment does not exist.
    """
    with client() as api:
        found, request = _filled_in(api, settings, name, changes)
        check_request(settings.root, _flow_of(name), request)
        run = api.create_flow_run_from_deployment(
            found.id, parameters={"request": request.model_dump(mode="json")}, tags=["trigger:manual"]
        )
    return run, flow_run_page(settings, run.id)


def _flow_of(name: str) -> str:
    return name.partition("/")[0]


def _filled_in(
    api: SyncPrefectClient, settings: Settings, name: str, changes: Mapping[str, Any]
) -> tuple[DeploymentResponse, FrozenConfig]:
    """A deployment as Prefect has it, and its form with these changes. Raises ValueError for a form that is refused or an unknown name,
    RuntimeError for a built-in deployment that is not registered."""
    try:
        found = api.read_deployment_by_name(name) if _flow_of(name) in FORMS else None
    except ObjectNotFound:
        found = None
    if found is None:
        if name in (deployment.full_name for deployment in DEPLOYMENTS):
            raise RuntimeError(
                f"{settings.prefect_api_url} has no deployment {name!r}; `vitline flows deploy` registers it."
            )
        known = known_names_text(name, (each for each, _ in deployments_of(api, settings.project)))
        raise ValueError(f"{settings.prefect_api_url} has no deployment {name!r}; {known}")
    check_root({name: found}, settings)
    return found, read_request(FORMS[_flow_of(name)], changes, (found.parameters or {}).get("request", {}))


def planned(settings: Settings, name: str, changes: Mapping[str, Any]) -> PipelinePlan:
    """The plan of a deployment of `pretrain-then-transfer` with these changes to its form: as Prefect has it, or, where no server is
    configured, as it is registered first. Raises ValueError for other deployments, and as `trigger`."""
    if _flow_of(name) != PIPELINE:
        raise ValueError(
            f"--plan is for deployments of {PIPELINE}, not for {name}; `vitline pretrain run --plan` and `vitline evaluate run --plan` "
            "plan single stages."
        )
    if settings.prefect_api_url is None:
        deployment = deployment_named(name)
        request = read_request(deployment.model, changes, deployment.request)
    else:
        with client() as api:
            _, request = _filled_in(api, settings, name, changes)
    assert isinstance(request, PipelineRequest)
    return resolve_pipeline(settings.root, request)


def resume(settings: Settings, names: Sequence[str]) -> list[tuple[FlowRun, str]]:
    """Continues flow runs that were interrupted, suspended or failed, in their deployments: each is the same flow run as before, with
    its request and, if a schedule started it, its night. Returns them with their pages.

    Raises ValueError for a name that no flow run or several have, and RuntimeError for one that has nothing to continue.
    """
    with client() as api:
        runs = [_resumable(api, settings, name) for name in names]
        for run in runs:
            if run.state is not None and run.state.is_paused():
                answer = api.resume_flow_run(run.id)
            else:
                message = "continued by `vitline flows resume`"
                again = State[Any](type=StateType.SCHEDULED, name="AwaitingRetry", message=message)
                answer = api.set_flow_run_state(run.id, again)
            accepted(answer, f"continue flow run {run.name}")
    return [(run, flow_run_page(settings, run.id)) for run in runs]


def _resumable(api: SyncPrefectClient, settings: Settings, name: str) -> FlowRun:
    found = api.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate({"name": {"any_": [name]}}))
    with contextlib.suppress(ValueError):
        found += api.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [UUID(name)]}}))
    outermost = [run for run in found if run.parent_task_run_id is None]
    if len(outermost) != 1:
        ids = ", ".join(str(run.id) for run in outermost)
        which = (
            f"has several flow runs of the name {name!r}; give one of the ids {ids}"
            if ids
            else f"has no flow run {name!r}"
        )
        raise ValueError(f"{settings.prefect_api_url} {which}.")
    (run,) = outermost
    state = run.state
    if state is None or state.is_completed() or not (state.is_final() or state.is_paused()):
        how = "it has completed" if state is not None and state.is_completed() else "it is still active"
        raise RuntimeError(f"flow run {name} is {state and state.name}: {how}, so there is nothing to resume.")
    if run.deployment_id is None:
        raise RuntimeError(
            f"flow run {name} was started without a deployment, so it cannot be resumed; make the same request again."
        )
    return run


def follow(run_id: UUID) -> FlowRun:
    """Prints the log lines of a flow run and its subflows until it has ended, and returns it. Ctrl-C ends the following, not
    the run. Raises RuntimeError if the server does not answer for AWAY_S."""
    shown: set[UUID] = set()
    away_since: float | None = None
    ended_at: float | None = None
    complete = False
    with client() as api:
        while True:
            try:
                run = api.read_flow_run(run_id)
                complete |= print_new_lines(api, run, shown)
                away_since = None
                if run.state is not None and run.state.is_final():
                    ended_at = ended_at or time.monotonic()
                    if complete or time.monotonic() - ended_at > LAST_LINES_S:
                        return run
            except (OSError, httpx.HTTPError) as error:
                if away_since is None:
                    away_since = time.monotonic()
                    console.say(f"Prefect does not answer ({type(error).__name__}); waiting for it, the run continues")
                if time.monotonic() - away_since > AWAY_S:
                    raise RuntimeError(
                        f"Prefect has not answered for {AWAY_S:.0f} s; flow run {run_id} may continue without it. "
                        "Once the server is back, the same command reuses its stages."
                    ) from error
            time.sleep(POLL_S)


def print_new_lines(api: SyncPrefectClient, run: FlowRun, shown: set[UUID]) -> bool:
    """Prints the lines of the flow that are not in `shown` yet, without those of libraries. Returns whether the last line of
    the run was among them."""
    # Start a few lines back, because lines of two processes may arrive out of order.
    logs, start = LogFilter.model_validate({"flow_run_id": {"any_": [run.id]}}), max(0, len(shown) - LOOK_BACK)
    last = False
    for entry in api.read_logs(logs, offset=start, sort=LogSort.TIMESTAMP_ASC):
        if entry.id not in shown:
            shown.add(entry.id)
            if entry.name == RUN_LOG:
                console.say(f"  {entry.message}")
                last = last or entry.message.startswith(LAST_LINE)
    return last
