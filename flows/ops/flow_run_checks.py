"""Checks that flow runs start: work pools by a small flow run in each, active schedules by their upcoming and overdue runs, as a server can
show a schedule and never act on it; and the logs of the local stack.

The small flow run takes code, image and environment of the deployments of the pool, which the doctor borrows for a deployment of its own.
Uses plain HTTP, like `service_checks.py`, because a status command must not import Prefect.
"""

import json
import platform
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from vitline.flows.catalog.registered_by import REMEMBERED, is_of_project
from vitline.flows.ops.check import Check, patience, side_by_side
from vitline.flows.ops.server_http import delete, flow_run_page, get, pages_url, post
from vitline.flows.ops.service_checks import (
    check_certificates,
    check_job_server,
    check_mlflow,
    check_store_of_all,
    is_of_stack,
    object_of_doctor,
)
from vitline.infra.local.service_logs import repeated_errors
from vitline.infra.local.state import StackState
from vitline.infra.provenance import compared_versions
from vitline.infra.settings import Settings

GRACE = timedelta(seconds=150)
"""Prefect's scheduler checks the deployments once a minute."""
LATE = timedelta(minutes=5)
"""A worker takes a run within seconds of its due time; if every slot of its pool is taken, the run may wait."""
_PAGE = 200
RUN_S = 120.0
"""How long the doctor waits for a flow run. A worker asks for work every few seconds; the image of a pod may have to be pulled."""
FLOW = "doctor"
ENTRYPOINT = "vitline.flows.on_prefect.flows.doctor_flow"
_BORROWED = ("path", "pull_steps", "job_variables", "work_pool_name")
_POLL_S = 0.5
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

Deployment = Mapping[str, Any]
"""A deployment as Prefect's API shows it. Times are in ISO 8601."""
Pool = Mapping[str, Any]
"""A work pool as Prefect's API shows it."""


def check_pools(settings: Settings) -> Check | list[Check]:
    """A worker has reported lately for each work pool of this project's deployments, none is paused, and each runs a small flow."""
    if settings.prefect_api_url is None:
        return Check("pools", True, "no PREFECT_API_URL: no work pool")
    ours = [each for each in _deployments(settings) if REMEMBERED in (each.get("parameter_openapi_schema") or {})]
    if not ours:
        advice = "`vitline flows deploy` registers them."
        return Check("pools", True, f"no deployment of the project {settings.project} is registered", advice)
    wrong = [
        Check("pools", False, f"{each['name']} has no work pool", "Choose one on its page.")
        for each in ours
        if not each["work_pool_name"]
    ]
    names = sorted({each["work_pool_name"] for each in ours if each["work_pool_name"]})
    pools = post(settings, "work_pools/filter", {"work_pools": {"name": {"any_": names}}})
    with object_of_doctor(settings) as written, ThreadPoolExecutor(len(names) or 1) as threads:
        found = threads.map(lambda pool: _check_pool(settings, pool, ours, written), pools)
        return [*wrong, *(check for checks in found for check in checks)]


def _check_pool(settings: Settings, pool: Pool, deployments: Sequence[Deployment], written: str) -> list[Check]:
    """One result for each environment that deployments give their runs in this pool."""
    if pool["status"] != "READY":
        state = "is paused" if pool["is_paused"] else "has no worker that has reported lately"
        ours = "python -P -m vitline.flows.on_prefect.worker" if pool["type"] == "process" else "prefect worker start"
        advice = "Resume it on its page." if pool["is_paused"] else f"Start a worker: `{ours} --pool {pool['name']}`."
        if is_of_stack("prefect", "PREFECT_API_URL", settings.prefect_api_url):
            advice = "`vitline stack restart prefect-worker` starts the worker of the local stack again."
        return [Check("pools", False, f"{pool['name']} ({pool['type']}) {state}", advice)]
    in_pool = [each for each in deployments if each["work_pool_name"] == pool["name"]]
    kinds = [next(kind) for _, kind in groupby(sorted(in_pool, key=_environment), _environment)]
    with ThreadPoolExecutor(len(kinds)) as threads:
        return list(threads.map(lambda kind: _check_by_run(settings, pool, kind, written), kinds))


def _environment(deployment: Deployment) -> str:
    """Equal for deployments whose runs get the same code, image and environment."""
    return json.dumps([deployment.get(name) for name in _BORROWED], sort_keys=True)


def _check_by_run(settings: Settings, pool: Pool, like: Deployment, written: str) -> Check:
    """Runs the flow as a deployment would run. A run that succeeds is deleted; another one stays, with its log."""
    variables = pool["base_job_template"].get("variables", {}).get("properties", {})
    image = (like["job_variables"] or {}).get("image") or variables.get("image", {}).get("default")
    what = f"{pool['name']} ({pool['type']}{f', image {image}' if image else ''})"
    flow = post(settings, "flows/", {"name": FLOW})["id"]
    deployment = post(
        settings,
        "deployments/",
        {name: like[name] for name in _BORROWED}
        | {"name": f"{pool['name']}-{uuid.uuid4().hex[:12]}", "flow_id": flow, "entrypoint": ENTRYPOINT},
    )["id"]
    try:
        given = {"written": written, "project": settings.project, "there": dict(compared_versions())}
        run = post(
            settings,
            f"deployments/{deployment}/create_flow_run",
            {"name": f"doctor-{pool['name']}", "parameters": given},
        )["id"]
        state = _final_state(settings, run)
        if state["type"] == "COMPLETED":
            delete(settings, f"flow_runs/{run}")
            return Check("pools", True, f"{what}: a small flow run on {state['message']}")
        page = flow_run_page(settings, run)
        if state["type"] in _ENDED:
            found = f"{what}: a small flow run has failed: {state['message']}"
            return Check("pools", False, found[:900], f"Fix what the message names, for flow runs; log: {page}")
        post(settings, f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
        found = f"{what}: a small flow run is {state['name']} after {RUN_S * patience():.0f} s ({page})"
        if busy := _at_work(settings, pool):
            advice = "If they take all slots of the pool or of its workers, run the doctor again when they have ended."
            return Check("pools", True, f"{found}; {busy} others are at work there", advice)
        return Check(
            "pools", False, found, "Look at the log of the pool's worker, and at the pod or process that it starts."
        )
    finally:
        with suppress(OSError):
            delete(settings, f"deployments/{deployment}")


def _final_state(settings: Settings, run: str) -> Mapping[str, Any]:
    """The state of a flow run that has ended, or that is not over in time."""
    began = time.monotonic()
    while True:
        state: Mapping[str, Any] = get(settings, f"flow_runs/{run}")["state"]
        if state["type"] in _ENDED or time.monotonic() - began > RUN_S * patience():
            return state
        time.sleep(_POLL_S)


def _at_work(settings: Settings, pool: Pool) -> int:
    """How many flow runs are at work in a pool."""
    form = {"work_pools": {"name": {"any_": [pool["name"]]}}, "flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    number: int = post(settings, "flow_runs/count", form)
    return number


def seen_by_flow_run(written: str, project: str, there: Mapping[str, str]) -> tuple[bool, str]:
    """In the process of the flow run: whether it can work, and what it found. `project`, `there`: project and versions of the doctor."""
    settings, here = Settings(), compared_versions()
    checks = side_by_side(
        [
            ("store", lambda: check_store_of_all(settings, written)),
            ("ray", lambda: check_job_server(settings) if settings.ray_address else Check("ray", True, "none")),
            ("mlflow", lambda: check_mlflow(settings)),
            ("certificates", check_certificates),
        ]
    )
    wrong = [f"{check.name}: {check.found}. {check.advice}" for check in checks if not check.ok]
    if settings.project != project:
        wrong.append(f"VITLINE_PROJECT is {settings.project}, where the doctor runs {project}. Set it to the same.")
    for name in here.keys() & there.keys():
        if here[name] != there[name]:
            wrong.append(f"{name} {here[name]}, where the doctor runs {there[name]}. Install the same.")
    facts = [", ".join(" ".join(each) for each in here.items()), *(f"{check.name}: {check.found}" for check in checks)]
    return not wrong, f"{platform.node()}: {'; '.join(wrong or facts)}"


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
    """Those of no other project."""
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
