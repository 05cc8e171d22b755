"""Starting deployments as the Prefect UI does, from a shell: the same form, the same checks, before it is submitted."""

import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import LogSort
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_UI_URL

from flows import console
from flows.on_prefect.deployments import Deployment, deployment_named
from flows.on_prefect.flow_run import read_request
from flows.on_prefect.prefect_observer import AWAY_PATIENCE_S, client
from flows.requests.resolve import (
    resolve_evaluate,
    resolve_finetune,
    resolve_pipeline,
    resolve_prepare,
    resolve_pretrain,
)
from infra.config import FrozenConfig
from infra.settings import Settings

POLL_S = 1.0
LOOK_BACK = 50
# A flow process sends its last lines after its last state, in its own time; one that was killed sends none.
LAST_LINES_S = 10.0
CHECKS: dict[str, Callable[[str, Any], object]] = {
    "prepare-corpus": resolve_prepare,
    "pretrain": resolve_pretrain,
    "finetune": resolve_finetune,
    "evaluate": resolve_evaluate,
    "pretrain-then-transfer": resolve_pipeline,
}


def trigger(settings: Settings, name: str, changes: Mapping[str, Any]) -> tuple[FlowRun, str]:
    """Starts deployment `name` (`flow/deployment`) with its own form and these changes; the run and its page.

    Raises ValueError for what the form or the flow's first statement would refuse, before anything is submitted, and
    RuntimeError where Prefect or the deployment is not there.
    """
    deployment = deployment_named(name)
    with client() as api:
        try:
            found = api.read_deployment_by_name(name)
        except ObjectNotFound as error:
            raise RuntimeError(
                f"{settings.prefect_api_url} has no deployment {name!r}; `vitline flows deploy` registers it."
            ) from error
        request = read_request(deployment.model, changes, (found.parameters or {}).get("request", {}))
        check(settings.root, deployment, request)
        run = api.create_flow_run_from_deployment(
            found.id, parameters={"request": request.model_dump(mode="json")}, tags=["trigger:manual"]
        )
    return run, f"{PREFECT_UI_URL.value()}/runs/flow-run/{run.id}"


def check(root: str, deployment: Deployment, request: FrozenConfig) -> None:
    """What the flow's first statement will check."""
    resolve = CHECKS.get(deployment.flow)
    if resolve is not None:
        resolve(root, request)


def follow(run_id: UUID) -> FlowRun:
    """Prints the lines of a flow run, which has those of its subflows, as they come; the run once it has ended. Ctrl-C ends the following,
    not the run. A server that is away is waited for, at most AWAY_PATIENCE_S; then RuntimeError."""
    shown: set[UUID] = set()
    away_since: float | None = None
    ended_at: float | None = None
    complete = False
    while True:
        try:
            with client() as api:
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
                console.say(f"Prefect does not answer ({type(error).__name__}); waiting, the run goes on")
            if time.monotonic() - away_since > AWAY_PATIENCE_S:
                raise RuntimeError(
                    f"Prefect has not answered for {AWAY_PATIENCE_S:.0f} s; flow run {run_id} may go on without it. "
                    "The same command finds its stages again once the server is back."
                ) from error
        time.sleep(POLL_S)


def print_new_lines(api: SyncPrefectClient, run: FlowRun, shown: set[UUID]) -> bool:
    """What has been logged since the last look, below warnings of libraries; whether it was the last line of the run."""
    # A page from a little before the last line: lines of two processes may arrive out of order.
    wanted, start = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), max(0, len(shown) - LOOK_BACK)
    last = False
    for entry in api.read_logs(wanted, offset=start, sort=LogSort.TIMESTAMP_ASC):
        if entry.id not in shown:
            shown.add(entry.id)
            if entry.name == "prefect.flow_runs":
                console.say(f"  {entry.message}")
                last = last or entry.message.startswith("Finished in state")
    return last
