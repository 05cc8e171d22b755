"""`vitline ops reconcile` and `collect-garbage`: the flows' own functions, without a flow run."""

from collections.abc import Mapping
from typing import Any

from flows.ops.collect_garbage import collect_garbage
from flows.ops.reconcile import Finding, FlowRuns, NoFlowRuns, reconcile
from flows.requests.forms import CollectGarbageRequest, ReconcileRequest
from flows.stages.engines import engines
from infra.settings import Settings


def reconcile_now(settings: Settings, *, dry_run: bool, quiet_minutes: float) -> list[Finding]:
    """What disagrees, mended unless `dry_run`. Without PREFECT_API_URL there are no flow runs to ask about."""
    request = ReconcileRequest(dry_run=dry_run, quiet_minutes=quiet_minutes)
    with engines(settings) as at_hand:
        return reconcile(request, at_hand, flow_runs(settings))


def flow_runs(settings: Settings) -> FlowRuns:
    if settings.prefect_api_url is None:
        return NoFlowRuns()
    from flows.deployed import FLOW_NAMES
    from flows.on_prefect.prefect_runs import PrefectFlowRuns

    return PrefectFlowRuns(FLOW_NAMES)


def collect_garbage_now(settings: Settings, request: Mapping[str, Any]) -> list[Finding]:
    """What is garbage, deleted unless `dry_run`. Asks no engine but the store."""
    with engines(settings) as at_hand:
        return collect_garbage(CollectGarbageRequest.model_validate(request), at_hand)
