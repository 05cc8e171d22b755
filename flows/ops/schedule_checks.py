"""Checks that runs start: that work pools have workers, and active schedules runs, as a server can show a schedule and never act on it.

Uses plain HTTP, like `service_checks.py`, because a status command must not import Prefect.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from vitline.flows.catalog.registered_by import REMEMBERED, is_of_project
from vitline.flows.ops.check import Check
from vitline.flows.ops.server_http import pages_url, post
from vitline.flows.ops.service_checks import is_of_stack
from vitline.infra.local.service_logs import repeated_errors
from vitline.infra.local.state import StackState
from vitline.infra.settings import Settings

GRACE = timedelta(seconds=150)
"""Prefect's scheduler checks the deployments once a minute."""
LATE = timedelta(minutes=5)
"""A worker takes a run within seconds of its due time; if every slot of its pool is taken, the run may wait."""
_PAGE = 200


Deployment = dict[str, Any]
"""A deployment as Prefect's API shows it. Times are in ISO 8601."""


def check_pools(settings: Settings) -> Check:
    """A worker has reported lately for each work pool of this project's deployments, and none is paused."""
    if settings.prefect_api_url is None:
        return Check("pools", True, "no PREFECT_API_URL: no work pool")
    ours = [each for each in _deployments(settings) if REMEMBERED in (each.get("parameter_openapi_schema") or {})]
    if not ours:
        advice = "`vitline flows deploy` registers them."
        return Check("pools", True, f"no deployment of the project {settings.project} is registered", advice)
    names = sorted({each["work_pool_name"] for each in ours if each["work_pool_name"]})
    ready, wrong = [], [f"{each['name']} has no work pool" for each in ours if not each["work_pool_name"]]
    for pool in post(settings, "work_pools/filter", {"work_pools": {"name": {"any_": names}}}):
        known = pool["base_job_template"].get("variables", {}).get("properties", {})
        given = {each["job_variables"].get("image") for each in ours if each["work_pool_name"] == pool["name"]}
        images = sorted(
            {image or known["image"].get("default") or "Prefect's own" for image in given if "image" in known}
        )
        runs = f"{pool['name']} ({', image '.join([pool['type'], *images])})"
        if pool["status"] == "READY":
            ready.append(runs)
        else:
            wrong.append(f"{runs} {'is paused' if pool['is_paused'] else 'has no worker that has reported lately'}")
    if not wrong:
        return Check("pools", True, f"ready: {', '.join(ready)}")
    start = f"`python -P -m vitline.flows.on_prefect.worker --pool {next(iter(names), 'NAME')}`"
    advice = f"Resume a paused pool on its page; start a worker for the others: {start}."
    if is_of_stack("prefect", "PREFECT_API_URL", settings.prefect_api_url):
        advice = "`vitline stack restart prefect-worker` starts the worker of the local stack again."
    return Check("pools", False, "; ".join(wrong), advice)


def check_schedules(settings: Settings, now: datetime | None = None) -> Check:
    """Every active schedule has upcoming runs, and none of its runs is overdue."""
    if settings.prefect_api_url is None:
        return Check("schedules", True, "no PREFECT_API_URL: nothing is scheduled")
    active = list(_active(settings))
    problems = schedule_problems(settings, now)
    if problems:
        advice = "Ask those who run the Prefect server for the log of its scheduler; the line above says whether workers take runs."
        if is_of_stack("prefect", "PREFECT_API_URL", settings.prefect_api_url):
            advice = "Read the log of the Prefect server (`vitline stack status` names it), then `vitline stack restart prefect`."
        return Check("schedules", False, "; ".join(problems), advice)
    return Check("schedules", True, f"{len(active)} active, each with upcoming runs" if active else "none is active")


def schedule_problems(settings: Settings, now: datetime | None = None) -> list[str]:
    """A sentence for each deployment of the Prefect server, without those of other projects, whose active schedules start nothing.

    Raises OSError if the server does not answer as Prefect does.
    """
    now = now or datetime.now(UTC)
    problems = []
    pages = f"{pages_url(settings)}/deployments/deployment"
    for deployment in _active(settings):
        page = f"{pages}/{deployment['id']}"
        if not _count(settings, deployment, after=now) and now - _since(deployment) > GRACE:
            name = _full_name(settings, deployment)
            problems.append(f"{name} has an active schedule and no upcoming run, so it never starts ({page})")
        if late := _count(settings, deployment, before=now - LATE):
            name, minutes = _full_name(settings, deployment), LATE.total_seconds() / 60
            problems.append(
                f"{name}: {late} scheduled run{'s' * (late > 1)} not started {minutes:g} minutes after the due time; "
                f"no worker takes {'them' if late > 1 else 'it'} from work pool {deployment['work_pool_name']!r} ({page})"
            )
    return problems


def check_logs(state: StackState | None) -> Check:
    """No service of the local stack repeats an error in its log, even if it answers."""
    if state is None:
        return Check("logs", True, "no local stack is running here")
    problems = [problem for service in state.services if (problem := log_problem(service.log))]
    advice = (
        "Read that log; `vitline stack restart NAME` restarts the service. If the error persists, run `make install`."
    )
    return Check("logs", not problems, "; ".join(problems) or "no repeating error", advice if problems else "")


def log_problem(log: str) -> str:
    """The most frequent repeated error of a log as a sentence; empty if there is none."""
    errors = repeated_errors(Path(log))
    if not errors:
        return ""
    worst = max(errors, key=lambda error: error.times)
    last = f", last at {worst.last:%Y-%m-%d %H:%M:%S}" if worst.last else ""
    return f"{log} holds the same error {worst.times} times{last}: {worst.text[:200]}"


def _active(settings: Settings) -> Iterator[Deployment]:
    """Deployments that are not paused, have an active schedule, and are of no other project."""
    for deployment in _deployments(settings):
        if not deployment["paused"] and any(schedule["active"] for schedule in deployment["schedules"]):
            yield deployment


def _deployments(settings: Settings) -> Iterator[Deployment]:
    """Deployments of no other project."""
    offset = 0
    while True:
        page: list[Deployment] = post(settings, "deployments/filter", {"limit": _PAGE, "offset": offset})
        yield from (each for each in page if is_of_project(each.get("parameter_openapi_schema"), settings.project))
        offset += _PAGE
        if len(page) < _PAGE:
            return


def _full_name(settings: Settings, deployment: Deployment) -> str:
    """FLOW/DEPLOYMENT, as commands take it: most deployments are called `default`."""
    flows = post(settings, "flows/filter", {"flows": {"id": {"any_": [deployment["flow_id"]]}}})
    return f"deployment '{flows[0]['name'] if flows else '?'}/{deployment['name']}'"


def _since(deployment: Deployment) -> datetime:
    """When the deployment, or one of its active schedules, was last changed."""
    times = [deployment["updated"], *(s["updated"] for s in deployment["schedules"] if s["active"])]
    return max(datetime.fromisoformat(time) for time in times)


def _count(settings: Settings, deployment: Deployment, **start: datetime) -> int:
    """Scheduled runs of a deployment with an expected start `after` or `before` a time."""
    wanted = {
        "deployment_id": {"any_": [deployment["id"]]},
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "expected_start_time": {f"{bound}_": time.isoformat() for bound, time in start.items()},
    }
    count: int = post(settings, "flow_runs/count", {"flow_runs": wanted})
    return count
