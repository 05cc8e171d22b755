"""Old flow runs of vitline's deployments, for `collect-garbage`: a year of `reconcile` alone would leave 35,040.

Prefect can delete old flow runs itself (PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED), but not those of vitline alone, nor those
that had nothing to do sooner than others.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort

from vitline.flows.on_prefect.deploy.registered import deployments_of
from vitline.flows.on_prefect.prefect_observer import client
from vitline.flows.ops.reconcile import Finding
from vitline.infra.html.text import utc

NOTHING_TO_DO = {"reconcile": "no inconsistencies", "collect-garbage": "no garbage"}
"""The message of a flow run that had nothing to do, by flow."""
MOST = 5_000
"""Flow runs of one deployment that one collection deletes: a first one after years must end, too."""
Wanted = Callable[[FlowRun], bool]
_PAGE = 100
_BULK = 50
"""As many as the server deletes in one request."""


def delete_old_flow_runs(project: str, ended_before: float, idle_before: float, dry_run: bool) -> Iterator[Finding]:
    """Deletes flow runs of vitline's deployments of a project, at the server of PREFECT_API_URL, with their subflows, logs and
    artifacts: those that ended before `ended_before`, or before `idle_before` where they had nothing to do. Yields one finding
    per deployment and reason. Times are Unix seconds."""
    with client() as api:
        for name, deployment in deployments_of(api, project):
            rules: list[tuple[float, str, Wanted]] = [(ended_before, "ended", lambda run: True)]
            if nothing := NOTHING_TO_DO.get(name.split("/")[0]):
                rules.append((idle_before, "had nothing to do, and ended", partial(had_nothing_to_do, nothing)))
            for before, what, wanted in rules:
                subject, problem = f"deployment {name}", f"flow runs that {what} before {utc(before)}"
                try:
                    number = delete(api, deployment.id, before, wanted, dry_run)
                except httpx.HTTPError as error:  # such as a server whose database is busy
                    yield Finding(subject, problem, f"not all deleted: {error}".splitlines()[0])
                    continue
                more = "; the next collection deletes more" if number >= MOST else ""
                if number:
                    yield Finding(subject, problem, f"{'would be: ' * dry_run}deleted, {number} flow runs{more}")


def delete(api: SyncPrefectClient, deployment: UUID, before: float, wanted: Wanted, dry_run: bool) -> int:
    """Deletes the flow runs of a deployment that ended before then, in batches; how many."""
    number = kept = 0
    ended = FlowRunFilter.model_validate(
        {
            "deployment_id": {"any_": [deployment]},
            "state": {"type": {"any_": list(TERMINAL_STATES)}},
            "end_time": {"before_": datetime.fromtimestamp(before, UTC)},
        }
    )
    while number < MOST:
        page = api.read_flow_runs(flow_run_filter=ended, sort=FlowRunSort.END_TIME_DESC, limit=_PAGE, offset=kept)
        old = [run for run in page if wanted(run)]
        number += len(old)
        if not page:
            break
        if dry_run:
            kept += len(page)
            continue
        kept += len(page) - len(old)
        delete_with_parts(api, [run.id for run in old])
    return number


def delete_with_parts(api: SyncPrefectClient, ids: list[UUID]) -> None:
    """Deletes flow runs: first their subflows, each after its artifacts. The server deletes their logs."""
    parts = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": ids}})
    while ids and (subflows := api.read_flow_runs(flow_run_filter=parts, limit=_PAGE)):
        delete_each(api, [run.id for run in subflows])
    delete_each(api, ids)


def delete_each(api: SyncPrefectClient, ids: list[UUID]) -> None:
    shown = ArtifactFilter.model_validate({"flow_run_id": {"any_": ids}})
    while ids and (artifacts := api.read_artifacts(artifact_filter=shown, limit=_PAGE)):
        for artifact in artifacts:
            api.delete_artifact(artifact.id)
    for first in range(0, len(ids), _BULK):
        part = ids[first : first + _BULK]
        chosen = {"flow_runs": {"id": {"any_": [str(flow_run_id) for flow_run_id in part]}}, "limit": len(part)}
        api.request("POST", "/flow_runs/bulk_delete", json=chosen)  # type: ignore[arg-type]


def had_nothing_to_do(message: str, run: FlowRun) -> bool:
    """Whether it found nothing, or was cancelled before its start because an earlier one was still at work."""
    if run.state is None:
        return False
    if run.state.type == StateType.CANCELLED:
        return run.run_count == 0
    return run.state.type == StateType.COMPLETED and run.state.message == message
