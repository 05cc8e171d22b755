"""Checks that flow runs start: work pools by a small flow run in each, active schedules by their upcoming and overdue runs, as a server can
show a schedule and never act on it.

The small flow run takes code, image and environment of the deployments of the pool, which the doctor borrows for a deployment of its own.
Uses plain HTTP, like `service_checks.py`, because a status command must not import Prefect.
"""

import json
import platform
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from vitline.flows.catalog.registered_by import REMEMBERED, is_of_project
from vitline.flows.ops.check import DEADLINE_S, Check, patience, side_by_side
from vitline.flows.ops.server_http import delete, flow_run_page, get, pages_url, post
from vitline.flows.ops.service_checks import (
    check_certificates,
    check_job_server,
    check_mlflow,
    check_store_of_all,
    is_of_stack,
    object_of_doctor,
)
from vitline.infra.provenance import compared_versions, differing
from vitline.infra.redact import cleaned
from vitline.infra.settings import Settings

GRACE = timedelta(seconds=150)
"""Prefect's scheduler checks the deployments once a minute."""
LATE = timedelta(minutes=5)
"""A worker takes a run within seconds of its due time; if every slot of its pool is taken, the run may wait."""
_PAGE = 200
RUN_S = 120.0
"""How long the doctor waits for a flow run. A worker asks for work every few seconds; the image of a pod may have to be pulled."""
FLOW = "vitline-doctor"
ENTRYPOINT = "vitline.flows.on_prefect.flows.doctor_flow"
_BORROWED = ("path", "pull_steps", "job_variables", "work_pool_name", "work_queue_name")
_ADDRESSES = ("ray_address", "mlflow_tracking_uri")
_KEPT = timedelta(days=1)
"""How long what a doctor has left stays."""
_POLL_S = 0.5
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

Deployment = Mapping[str, Any]
"""A deployment as Prefect's API shows it. Times are in ISO 8601."""
Pool = Mapping[str, Any]
"""A work pool as Prefect's API shows it."""


def check_pools(settings: Settings) -> Check | list[Check]:
    """A worker has reported lately for each work pool of this project's deployments, none is paused, and each runs a small flow: one for
    each code, image and environment that deployments give their runs there."""
    if settings.prefect_api_url is None:
        return Check("pools", True, "no PREFECT_API_URL: no work pool")
    ours = [each for each in _deployments(settings) if REMEMBERED in (each.get("parameter_openapi_schema") or {})]
    if not ours:
        advice = "`vitline flows deploy` registers them."
        return Check("pools", True, f"no deployment of the project {settings.project} is registered", advice)
    names = sorted({each["work_pool_name"] for each in ours if each["work_pool_name"]})
    pools = {
        pool["name"]: pool for pool in post(settings, "work_pools/filter", {"work_pools": {"name": {"any_": names}}})
    }
    checks = [
        Check("pools", False, f"{each['name']} has no work pool", "Choose one on its page.")
        for each in ours
        if each["work_pool_name"] not in pools
    ]
    checks += [_without_worker(settings, pool) for pool in pools.values() if pool["status"] != "READY"]
    kinds = {
        _environment(each): each for each in ours if pools.get(each["work_pool_name"], {}).get("status") == "READY"
    }
    whats = {str(number): _what(pools[kind["work_pool_name"]], kind) for number, kind in enumerate(kinds.values())}
    if not kinds:
        return checks
    with object_of_doctor(settings) as written:
        with suppress(OSError):
            _delete_old(settings)
        runs = [
            (number, partial(_check_by_run, settings, what, kind, written))
            for (number, what), kind in zip(whats.items(), kinds.values(), strict=True)
        ]
        for check in side_by_side(runs, longer=dict.fromkeys(whats, RUN_S + DEADLINE_S)):
            failed = check.name in whats  # by an error
            found = f"{whats[check.name]}: {check.found}" if failed else check.found
            checks.append(check._replace(name="pools", found=found))
    return checks


def _without_worker(settings: Settings, pool: Pool) -> Check:
    if pool["is_paused"]:
        return Check("pools", False, f"{pool['name']} ({pool['type']}) is paused", "Resume it on its page.")
    command = "prefect worker start"
    if pool["type"] == "process":
        command = "python -P -m vitline.flows.on_prefect.worker --name NAME"
    advice = f"Start a worker: `{command} --pool {pool['name']}`."
    if is_of_stack("prefect", "PREFECT_API_URL", settings.prefect_api_url):
        advice = "`vitline stack restart prefect-worker` starts the worker of the local stack again."
    return Check("pools", False, f"{pool['name']} ({pool['type']}) has no worker that has reported lately", advice)


def _what(pool: Pool, kind: Deployment) -> str:
    """Name and type of a pool, and the image where it starts containers."""
    variables = pool["base_job_template"].get("variables", {}).get("properties", {})
    image = (kind["job_variables"] or {}).get("image") or variables.get("image", {}).get("default")
    return f"{pool['name']} ({pool['type']}{f', image {image}' if image else ''})"


def _environment(deployment: Deployment) -> str:
    """Equal for deployments whose runs get the same code, image and environment."""
    return json.dumps([deployment.get(name) for name in _BORROWED], sort_keys=True)


def _check_by_run(settings: Settings, what: str, kind: Deployment, written: str) -> Check:
    """Runs the flow as a deployment would run. A run that succeeds is deleted; another one stays, with its log. Raises OSError."""
    borrowed = {name: kind.get(name) for name in _BORROWED}
    ours = {"name": f"{kind['work_pool_name']}-{uuid.uuid4().hex[:12]}", "entrypoint": ENTRYPOINT}
    flow = post(settings, "flows/", {"name": FLOW})["id"]
    made = post(settings, "deployments/", {**borrowed, **ours, "flow_id": flow, "tags": [settings.project]})
    deployment = f"deployments/{made['id']}"
    state: Mapping[str, Any] = {"type": "SCHEDULED"}
    try:
        uses = [name for name in _ADDRESSES if getattr(settings, name)]
        there = dict(compared_versions())
        parameters = {"written": written, "project": settings.project, "there": there, "uses": uses}
        form = {"name": f"doctor-{kind['work_pool_name']}", "parameters": parameters, "tags": [settings.project]}
        run = post(settings, f"{deployment}/create_flow_run", form)["id"]
        state, waited_s = _last_state(settings, run)
        page = flow_run_page(settings, run)
        if state["type"] == "COMPLETED":
            with suppress(OSError):
                delete(settings, f"flow_runs/{run}")
            return Check("pools", True, f"{what}: a small flow run on {state['message']}")
        if state["type"] in _ENDED:
            found = f"{what}: a small flow run has failed: {state['message']}"
            return Check("pools", False, found[:900], f"Fix what the message names, for flow runs; log: {page}")
        waits = state["type"] == "SCHEDULED"
        # The worker ends the process or pod of a run that is being cancelled.
        ended = {"state": {"type": "CANCELLED" if waits else "CANCELLING"}, "force": True}
        post(settings, f"flow_runs/{run}/set_state", ended)
        found = f"{what}: a small flow run is {state['name']} after {waited_s:.0f} s ({page})"
        if waits and (busy := _at_work(settings, kind["work_pool_name"])):
            advice = "If they take all slots of the pool or of its workers, run the doctor again when they have ended."
            return Check("pools", True, f"{found}; {busy} others are at work there", advice)
        advice = "Look at the log of the pool's worker, and at the pod or process that it starts."
        return Check("pools", False, found, advice)
    finally:
        if state["type"] in (*_ENDED, "SCHEDULED"):  # else the worker needs it, and a later doctor deletes it
            with suppress(OSError):
                delete(settings, deployment)


def _last_state(settings: Settings, run: str) -> tuple[Mapping[str, Any], float]:
    """The state of a flow run that has ended, or that is not over in time, and how long that took. Raises OSError where the server does not
    answer at the end."""
    began = time.monotonic()
    while True:
        late = (waited_s := time.monotonic() - began) > RUN_S * patience()
        try:
            state: Mapping[str, Any] = get(settings, f"flow_runs/{run}")["state"]
        except OSError:  # one of many requests
            if late:
                raise
        else:
            if late or state["type"] in _ENDED:
                return state, waited_s
        time.sleep(_POLL_S)


def _at_work(settings: Settings, pool: str) -> int:
    """How many flow runs are at work in a pool."""
    form = {"work_pools": {"name": {"any_": [pool]}}, "flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    number: int = post(settings, "flow_runs/count", form)
    return number


def _delete_old(settings: Settings) -> None:
    """Deletes what earlier doctors of this project have left: runs that failed, and deployments of those that were killed."""
    flow, tags, before = {"name": {"any_": [FLOW]}}, {"all_": [settings.project]}, datetime.now(UTC) - _KEPT
    old = {"flows": flow, "flow_runs": {"tags": tags, "end_time": {"before_": before.isoformat()}}}
    for run in post(settings, "flow_runs/filter", old):
        delete(settings, f"flow_runs/{run['id']}")
    for each in post(settings, "deployments/filter", {"flows": flow, "deployments": {"tags": tags}}):
        if datetime.fromisoformat(each["created"]) < before:
            delete(settings, f"deployments/{each['id']}")


def seen_by_flow_run(written: str, project: str, there: Mapping[str, str], uses: Sequence[str]) -> tuple[bool, str]:
    """In the process of the flow run: whether it can work, and what it found, without secrets. `project`, `there`: project and versions of
    the doctor; `uses`: the servers that it has the addresses of, by their settings."""
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
    wrong += [
        f"{name.upper()} is not set, as it is where the doctor runs." for name in uses if not getattr(settings, name)
    ]
    wrong += [
        f"{name} {here[name]}, where the doctor runs {there[name]}. Install the same." for name in differing(there)
    ]
    facts = [", ".join(" ".join(each) for each in here.items()), *(f"{check.name}: {check.found}" for check in checks)]
    return not wrong, cleaned(f"{platform.node()}: {'; '.join(wrong or facts)}")


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
