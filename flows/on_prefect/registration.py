"""Registers the deployments with Prefect: updates what vitline owns and keeps what users have edited in Prefect.

vitline owns the code, the form with its help, and its own tags: these are sent whenever they have changed, and so is the
description, unless somebody has edited it. Everything else (values that fill the form, schedules, active and paused, limits, work
pool and queue, job variables, added tags) is set at the first registration and not sent again. A deployment is registered with
those values only that differ from the form's defaults, so that a new default of the form applies to it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError

from vitline.flows.catalog.registered_by import REMEMBERED
from vitline.flows.forms.overrides import override_paths
from vitline.flows.on_prefect.deployments import DEPLOYMENTS, Deployment
from vitline.flows.on_prefect.flow_run import read_request
from vitline.flows.on_prefect.prefect_observer import client
from vitline.infra.names import known_names_text
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store


@dataclass
class Registration:
    """The changes of a registration to one deployment."""

    deployment: str
    new: bool = False
    updated: list[str] = field(default_factory=list)
    """What vitline has changed."""
    kept: list[str] = field(default_factory=list)
    """What differs from a new registration and was kept."""
    problem: str | None = None
    """Why the form was not updated."""


def register(
    settings: Settings,
    *,
    nightly_active: bool = False,
    pool: str | None = None,
    job_variables: Mapping[str, Any] | None = None,
) -> list[Registration]:
    """Creates or updates every deployment at the server of `settings`, and returns the changes.

    New schedules are paused unless `nightly_active`. `pool` and `job_variables` are set for all deployments; without them,
    each keeps its own. Raises ValueError for a pool that does not exist or variables that it does not accept, and for deployments
    of another root: nothing is changed then.
    """
    with client() as api:
        found = {deployment.full_name: find(api, deployment) for deployment in DEPLOYMENTS}
        registered = [deployment for deployment in found.values() if deployment is not None]
        check_root(found, settings)
        place = pool or common_pool(registered, settings.project)
        variables = {**common_variables(registered), **(job_variables or {})}
        if pool or len(registered) < len(DEPLOYMENTS):
            check_pool(api, place, settings)
        done = []
        for deployment in DEPLOYMENTS:
            known = found[deployment.full_name]
            if known is None:
                done.append(create(api, deployment, settings, place, variables, nightly_active))
            else:
                done.append(update(api, deployment, known, pool, job_variables or {}, settings))
    return done


def check_root(found: Mapping[str, DeploymentResponse | None], settings: Settings) -> None:
    """Raises ValueError where a deployment names another root."""
    ours = open_store(settings.root).uri
    for name, known in found.items():
        if known is not None and (theirs := remembered(known).get("root", ours)) != ours:
            raise ValueError(
                f"The deployment {name} at {settings.prefect_api_url} belongs to the root {theirs}, not to {ours}, so nothing was "
                "changed. Set VITLINE_PROJECT=NAME, here and for the workers, to register deployments of that name beside them. "
                f"If {theirs} has moved to {ours}, delete its deployments in Prefect first."
            )


def remembered(known: DeploymentResponse) -> Mapping[str, Any]:
    """What the form's schema holds of the last registration: `description`, and `root` and `project`, which it belongs to."""
    found: Mapping[str, Any] = (known.parameter_openapi_schema or {}).get(REMEMBERED, {})
    return found


def registration_lines(done: Iterable[Registration]) -> list[str]:
    """The changes as lines of text: counts, then updates, kept edits and problems by deployment."""
    done, lines = list(done), []
    for count, what in (
        (sum(deployment.new for deployment in done), "registered"),
        (sum(bool(deployment.updated) for deployment in done), "updated"),
        (sum(not (deployment.new or deployment.updated) for deployment in done), "up to date"),
    ):
        if count:
            lines.append(f"{count} deployment{'s' if count > 1 else ''} {what}")
    for deployment in done:
        changes = [("updated", deployment.updated), ("kept as edited", deployment.kept)]
        lines += [f"{deployment.deployment}: {what}: {'; '.join(parts)}" for what, parts in changes if parts]
        if deployment.problem:
            lines.append(f"{deployment.deployment} {deployment.problem}")
    return lines


def find(api: SyncPrefectClient, deployment: Deployment) -> DeploymentResponse | None:
    try:
        return api.read_deployment_by_name(deployment.full_name)
    except ObjectNotFound:
        return None


def common_pool(registered: Iterable[DeploymentResponse], project: str) -> str:
    """The pool that all registered deployments share, for new ones; that of the project if they share none."""
    pools = {deployment.work_pool_name for deployment in registered}
    return pools.pop() or project if len(pools) == 1 else project


def common_variables(registered: list[DeploymentResponse]) -> dict[str, Any]:
    first = registered[0].job_variables if registered else {}
    return {k: v for k, v in first.items() if all(d.job_variables.get(k) == v for d in registered)}


def check_pool(api: SyncPrefectClient, pool: str, settings: Settings) -> None:
    try:
        api.read_work_pool(pool)
    except ObjectNotFound as error:
        known = known_names_text(pool, (known.name for known in api.read_work_pools()))
        raise ValueError(
            f"{settings.prefect_api_url} has no work pool {pool!r}; {known} "
            f"`prefect work-pool create {pool} --type process` creates one for processes; `--pool NAME` chooses another."
        ) from error


def create(
    api: SyncPrefectClient,
    deployment: Deployment,
    settings: Settings,
    pool: str,
    job_variables: Mapping[str, Any],
    nightly_active: bool = False,
) -> Registration:
    """Creates a deployment that is not registered yet."""
    schedules = []
    if schedule := own_schedule(deployment):
        active = nightly_active or deployment.always_active
        schedules = [DeploymentScheduleCreate(schedule=schedule, active=active)]
    try:
        api.create_deployment(
            flow_id=api.create_flow_from_name(deployment.flow),
            name=deployment.registered_name,
            entrypoint=deployment.entrypoint,
            description=description_text(deployment),
            tags=deployment.tags,
            parameters={"request": deployment.request},
            parameter_openapi_schema=form_schema(deployment, settings),
            enforce_parameter_schema=True,
            schedules=schedules,
            concurrency_limit=1 if deployment.always_active else None,
            concurrency_options=(
                ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
                if deployment.always_active
                else None
            ),
            work_pool_name=pool,
            job_variables=dict(job_variables),
            pull_steps=[],
        )
    except (PrefectHTTPStatusError, ObjectAlreadyExists) as error:
        raise rejected(deployment, pool, error) from error
    return Registration(deployment.full_name, new=True)


def update(
    api: SyncPrefectClient,
    deployment: Deployment,
    known: DeploymentResponse,
    pool: str | None,
    job_variables: Mapping[str, Any],
    settings: Settings,
) -> Registration:
    """Updates a registered deployment: sends what vitline owns and has changed; sends nothing if nothing has changed."""
    done = Registration(deployment.full_name)
    changes = dict[str, Any]()
    filled = kept_request(deployment, known, done)
    if done.problem is None:
        if filled != (known.parameters or {}).get("request"):
            changes["parameters"] = {**(known.parameters or {}), "request": filled}
        if (schema := form_schema(deployment, settings)) != known.parameter_openapi_schema:
            changes["parameter_openapi_schema"] = schema
            done.updated.append("form")
    if deployment.entrypoint != known.entrypoint:
        changes["entrypoint"] = deployment.entrypoint
        done.updated.append("code")
    if (description := description_text(deployment)) != known.description:
        if known.description == remembered(known).get("description", known.description):
            changes["description"] = description
            done.updated.append("description")
        else:
            done.kept.append("description")
    if not set(deployment.tags) <= set(known.tags):
        changes["tags"] = [*deployment.tags, *(tag for tag in known.tags if tag not in deployment.tags)]
        done.updated.append("tags")
    changes |= pool_changes(known, pool, job_variables, done)
    if changes:
        try:
            api.update_deployment(known.id, DeploymentUpdate(**changes))
        except PrefectHTTPStatusError as error:
            raise rejected(deployment, pool or known.work_pool_name, error) from error
    report_kept_settings(deployment, known, pool, job_variables, settings.project, done)
    return done


def kept_request(deployment: Deployment, known: DeploymentResponse, done: Registration) -> dict[str, Any]:
    """The values that fill the form, without fields that it no longer has."""
    theirs: Mapping[str, Any] = (known.parameters or {}).get("request") or {}
    kept = {name: value for name, value in theirs.items() if name in deployment.model.model_fields}
    ours = deployment.form()
    done.updated += [
        f"request.{name} {short_json(theirs[name])} removed: the form no longer has this field"
        for name in theirs.keys() - kept.keys()
    ]
    done.kept += [
        f"request.{name} {short_json(value)} (default: {short_json(ours[name])})"
        for name, value in kept.items()
        if value != ours[name]
    ]
    try:
        read_request(deployment.model, kept, {})
    except ValueError as why:
        if known.enforce_parameter_schema:
            done.problem = (
                f"keeps its old form, because the new one rejects the values of this deployment ({why}). Edit its parameters "
                "on its page, then run `vitline flows deploy` again."
            )
    return kept


def pool_changes(
    known: DeploymentResponse, pool: str | None, job_variables: Mapping[str, Any], done: Registration
) -> dict[str, Any]:
    """The requested changes of pool and job variables; other job variables are kept."""
    changes = dict[str, Any]()
    if pool and pool != known.work_pool_name:
        changes["work_pool_name"] = pool
        done.updated.append(f"work pool {known.work_pool_name or 'none'} -> {pool}")
    if any(name not in known.job_variables or known.job_variables[name] != v for name, v in job_variables.items()):
        changes["job_variables"] = {**known.job_variables, **job_variables}
        done.updated += [f"job variable {name} = {short_json(value)}" for name, value in job_variables.items()]
        if "work_pool_name" not in changes and known.work_pool_name:
            # Prefect checks job variables only if the update names the pool, and changes the queue unless it is named, too.
            changes["work_pool_name"], changes["work_queue_name"] = known.work_pool_name, known.work_queue_name
    return changes


def schedule_text(schedule: DeploymentSchedule) -> str:
    times: dict[str, Any] = schedule.schedule.model_dump(mode="json")
    when = times.get("cron") or times.get("rrule") or f"every {times.get('interval')} s"
    extra = [schedule.slug] if schedule.slug else []
    extra += [f"{name} {short_json(value)}" for name, value in schedule.parameters.items()]
    return f"schedule {when} {times.get('timezone') or 'UTC'}, {', '.join(['active' if schedule.active else 'paused', *extra])}"


def report_kept_settings(
    deployment: Deployment,
    known: DeploymentResponse,
    pool: str | None,
    job_variables: Mapping[str, Any],
    project: str,
    done: Registration,
) -> None:
    """Adds the kept schedules, pool, job variables and pause to the report."""
    ours = own_schedule(deployment)
    for schedule in known.schedules:
        own = schedule.schedule == ours and not schedule.slug and not schedule.parameters
        if not own or schedule.active != deployment.always_active:
            done.kept.append(schedule_text(schedule))
    if ours is not None and not known.schedules:
        done.kept.append("no schedule")
    if not pool and known.work_pool_name is None:
        done.kept.append("no work pool, so its runs never start: `vitline flows deploy --pool NAME` sets one")
    elif not pool and known.work_pool_name != project:
        done.kept.append(f"work pool {known.work_pool_name}")
    done.kept += [
        f"job variable {name} = {short_json(value)}"
        for name, value in known.job_variables.items()
        if name not in job_variables
    ]
    if known.paused:
        done.kept.append("paused")


def own_schedule(deployment: Deployment) -> CronSchedule | None:
    return CronSchedule(cron=deployment.cron, timezone="UTC") if deployment.cron else None


def form_schema(deployment: Deployment, settings: Settings) -> dict[str, Any]:
    """The form as a JSON schema for Prefect, with what later registrations compare under REMEMBERED."""

    def flow(request: Any) -> None:
        """Stands in for the deployment's flow: has its parameters."""

    flow.__annotations__ = {"request": deployment.model}
    schema = Flow(flow).parameters.model_dump(exclude_unset=True)
    for definition in schema.get("definitions", {}).values():
        if "properties" in definition:
            definition["properties"] = {name: without_null(field) for name, field in definition["properties"].items()}
    # Prefect allows additional properties at the outermost level: a misspelt "request" would start a run with the defaults.
    schema["additionalProperties"] = False
    root = open_store(settings.root).uri
    schema[REMEMBERED] = {"description": description_text(deployment), "root": root, "project": settings.project}
    return schema


def without_null(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of an optional field without pydantic's alternative `null`. Prefect's page would show the alternatives as a
    choice, and reject -5 as "not valid under any of the given schemas". Prefect accepts null for every field without a default.
    """
    *kinds, null = field.get("anyOf", [{}])
    if len(kinds) != 1 or null != {"type": "null"} or "enum" in kinds[0] or field.get("default") is not None:
        return field
    kind: dict[str, Any] = kinds[0]
    return {name: value for name, value in field.items() if name not in ("anyOf", "default")} | kind


def description_text(deployment: Deployment) -> str:
    """The text above the form: what the flow does, and which fields `overrides` takes."""
    paths = override_paths(deployment.flow)
    if not paths:
        return deployment.description
    listed = ", ".join(f"`{path}`" for path in paths)
    return (
        f"{deployment.description}\n\nFields for `overrides`: {listed}.\n\nPaths and URIs must not contain a user, password "
        "or query. If Prefect shows a regular expression, the help of the field describes the same rule in words."
    )


def rejected(deployment: Deployment, pool: str | None, error: Exception) -> ValueError:
    """The error with which Prefect rejects a deployment, as a sentence."""
    response: Any = getattr(error, "response", None) or getattr(getattr(error, "http_exc", None), "response", None)
    try:
        answer = response.json()
        detail = answer.get("detail") or "; ".join(problem["msg"] for problem in answer["exception_detail"])
    except (AttributeError, ValueError, KeyError, TypeError):
        detail = str(error)[:300]
    return ValueError(
        f"Prefect rejects {deployment.full_name} in the work pool {pool}: {detail}. The pool's page, or `prefect work-pool "
        f"inspect {pool}`, shows which job variables it accepts."
    )


def short_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
