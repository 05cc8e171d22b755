"""`vitline ops reconcile` and `collect-garbage`: the functions of the flows, called without a flow run."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vitline.flows.forms.forms import CollectGarbageRequest, ReconcileRequest
from vitline.flows.ops.collect_garbage import DeleteFlowRuns, collect_garbage
from vitline.flows.ops.flow_runs import FlowRuns, NoFlowRuns
from vitline.flows.ops.reconcile import Finding, reconcile
from vitline.flows.runs.services import open_services
from vitline.infra.settings import Settings


def reconcile_now(settings: Settings, request: Mapping[str, Any]) -> list[Finding]:
    """Finds inconsistencies and repairs them unless `dry_run`. Without PREFECT_API_URL no flow runs are checked."""
    prefect: FlowRuns = NoFlowRuns()
    if settings.prefect_api_url is not None:
        from vitline.flows.on_prefect.prefect_runs import PrefectFlowRuns

        prefect = PrefectFlowRuns(settings.project)
    with open_services(settings) as services:
        return reconcile(ReconcileRequest.model_validate(request), services, prefect)


def collect_garbage_now(settings: Settings, request: Mapping[str, Any]) -> list[Finding]:
    """Finds garbage and deletes it unless `dry_run`. Without PREFECT_API_URL no flow runs are deleted."""
    delete_flow_runs: DeleteFlowRuns | None = None
    if settings.prefect_api_url is not None:
        from vitline.flows.on_prefect.old_flow_runs import delete_old_flow_runs

        delete_flow_runs = partial(delete_old_flow_runs, settings.project)
    with open_services(settings) as services:
        return collect_garbage(CollectGarbageRequest.model_validate(request), services, delete_flow_runs)
