"""Registers the deployments with Prefect: updates what vitline owns and keeps what users have edited in Prefect.

vitline owns the code, the form with its help, and its own tags. They are sent whenever they have changed. Users may edit the
values that fill the form, the description and the schedule. The values of the last registration are stored in the form's
schema, so that a new default is applied only where nobody has edited the old one. All other fields (added schedules, slugs,
parameters of schedules, active and paused, limits, work pool and queue, job variables, added tags) are set at the first
registration and not sent again.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from vitline.flows.catalog.registered_by import REMEMBERED
from vitline.flows.forms.overrides import override_paths
from vitline.flows.forms.refusals import problem_text
from vitline.flows.on_prefect.deployments import DEPLOYMENTS, Deployment
from vitline.flows.on_prefect.prefect_observer import client
from vitline.infra.config import FrozenConfig
from vitline.infra.names import known_names_text
from vitline.infra.settings import DEFAULT_PROJECT, Settings
from vitline.infra.storage import open_store


@dataclass
class Registration:
    """The changes of a registration to one deployment."""

    deployment: str
    new: bool = False
    updated: list[str] = field(default_factory=list)
    """What vitline has changed."""
    kept: list[str] = field(default_factory=list)
    """What users have edited and was kept, with new defaults that were therefore not applied."""
    problem: str | None = None
    """Why the form was not updated."""

    @property
    def row(self) -> dict[str, Any]:
        return asdict(self)


class LastRegistration(TypedDict, total=False):
    """The values of the last registration, in the form's schema under REMEMBERED."""

    request: dict[str, Any]
    description: str
    schedule: dict[str, Any] | None
    root: str
    """URI of the root that registered the deployment, which it belongs to."""
    project: str


class Changes(TypedDict, total=False):
    """Fields of Prefect's `DeploymentUpdate`. Fields that are absent stay as they are."""

    parameters: dict[str, Any]
    parameter_openapi_schema: dict[str, Any]
    entrypoint: str
    description: str
    tags: list[str]
    work_pool_name: str
    work_queue_name: str | None
    job_variables: dict[str, Any]


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
        place = PoolSettings(
            pool or common_pool(registered, settings.project), {**common_variables(registered), **(job_variables or {})}
        )
        if pool or len(registered) < len(DEPLOYMENTS):
            check_pool(api, place.pool, settings)
        done = []
        for deployment in DEPLOYMENTS:
            known = found[deployment.full_name]
            if known is None:
                done.append(create(api, deployment, place, settings, nightly_active))
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


def remembered(known: DeploymentResponse) -> LastRegistration:
    last: LastRegistration = (known.parameter_openapi_schema or {}).get(REMEMBERED, {})
    return last


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


@dataclass(frozen=True)
class PoolSettings:
    """The work pool of a new deployment, and its variables for the pool's jobs."""

    pool: str = DEFAULT_PROJECT
    job_variables: Mapping[str, Any] = field(default_factory=dict)


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
    place: PoolSettings,
    settings: Settings,
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
            # Without empty fields: when a deployment is created, Prefect checks null against the type of a field.
            parameters={"request": {name: value for name, value in deployment.form().items() if value is not None}},
            parameter_openapi_schema=form_schema(deployment, settings),
            enforce_parameter_schema=True,
            schedules=schedules,
            concurrency_limit=1 if deployment.always_active else None,
            concurrency_options=(
                ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
                if deployment.always_active
                else None
            ),
            work_pool_name=place.pool,
            job_variables=dict(place.job_variables),
            pull_steps=[],
        )
    except (PrefectHTTPStatusError, ObjectAlreadyExists) as error:
        raise rejected(deployment, place.pool, error) from error
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
    changes: Changes = {}
    last = remembered(known)
    filled = fill_form(deployment, known, last, done)
    if done.problem is None:
        if filled != (known.parameters or {}).get("request"):
            changes["parameters"] = {**(known.parameters or {}), "request": filled}
        if (schema := form_schema(deployment, settings)) != known.parameter_openapi_schema:
            changes["parameter_openapi_schema"] = schema
            if without_remembered(schema) != without_remembered(known.parameter_openapi_schema or {}):
                done.updated.append("form")
    if deployment.entrypoint != known.entrypoint:
        changes["entrypoint"] = deployment.entrypoint
        done.updated.append("code")
    if (description := description_text(deployment)) != known.description:
        if known.description == last.get("description", known.description):
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
    update_schedule(api, deployment, known, last, done)
    report_kept_settings(known, pool, job_variables, settings.project, done)
    return done


def fill_form(
    deployment: Deployment, known: DeploymentResponse, last: LastRegistration, done: Registration
) -> dict[str, Any]:
    """The values that fill the form: values that nobody has edited since the last registration are updated to ours."""
    theirs = dict((known.parameters or {}).get("request") or {})
    before, filled = last.get("request"), dict(theirs)
    for name, ours in deployment.form().items():
        new = name not in theirs and (before is None or name not in before)
        now = ours if new else theirs.get(name, default_of(deployment.model, name))
        if now != ours and before is not None and name in before and now == before[name]:
            done.updated.append(f"request.{name} {short_json(now)} -> {short_json(ours)}")
            now = filled[name] = ours
        if now != ours:
            changed = before is not None and name in before and before[name] != ours
            default = "the new default" if changed else "default"
            done.kept.append(f"request.{name} {short_json(now)} ({default}: {short_json(ours)})")
    for name in theirs.keys() - deployment.model.model_fields.keys():
        done.updated.append(f"request.{name} {short_json(filled.pop(name))} removed: the form no longer has this field")
    try:
        deployment.model.model_validate(filled)
    except ValidationError as error:
        if known.enforce_parameter_schema:
            why = "; ".join(problem_text(problem, deployment.model.model_fields) for problem in error.errors())
            done.problem = (
                f"keeps its old form, because the new one rejects the values of this deployment ({why}). Edit its parameters "
                "on its page, then run `vitline flows deploy` again."
            )
    return filled


def default_of(model: type[FrozenConfig], name: str) -> Any:
    """The default of a field as JSON; None for a required one."""
    default = model.model_fields[name]
    if default.is_required():
        return None
    return to_jsonable_python(default.get_default(call_default_factory=True))


def pool_changes(
    known: DeploymentResponse, pool: str | None, job_variables: Mapping[str, Any], done: Registration
) -> Changes:
    """The requested changes of pool and job variables; other job variables are kept."""
    changes: Changes = {}
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


def update_schedule(
    api: SyncPrefectClient,
    deployment: Deployment,
    known: DeploymentResponse,
    last: LastRegistration,
    done: Registration,
) -> None:
    """Updates vitline's own schedule unless somebody has edited it since the last registration. Keeps all others."""
    ours = own_schedule(deployment)
    before, now = last.get("schedule"), ours.model_dump(mode="json") if ours else None
    edited = []
    for schedule in known.schedules:
        times: dict[str, Any] = schedule.schedule.model_dump(mode="json")
        if ours and now and before and before != now and times == before:
            api.update_deployment_schedule(known.id, schedule.id, schedule=ours)
            done.updated.append(f"schedule {before['cron']} -> {ours.cron}")
            times = now
        own = times == now and not schedule.slug and not schedule.parameters
        if not (own and schedule.active == deployment.always_active):
            edited.append(schedule_text(schedule, times))
    if edited:
        done.kept += edited
    elif ours is not None and not known.schedules:
        done.kept.append("no schedule")


def schedule_text(schedule: Any, times: Mapping[str, Any]) -> str:
    when = times.get("cron") or times.get("rrule") or f"every {times.get('interval')} s"
    extra = [schedule.slug] if schedule.slug else []
    extra += [f"{name} {short_json(value)}" for name, value in schedule.parameters.items()]
    return f"schedule {when} {times.get('timezone') or 'UTC'}, {', '.join(['active' if schedule.active else 'paused', *extra])}"


def report_kept_settings(
    known: DeploymentResponse, pool: str | None, job_variables: Mapping[str, Any], project: str, done: Registration
) -> None:
    """Adds the kept pool, job variables and pause to the report."""
    if not pool and known.work_pool_name is None:
        done.kept.append("no work pool, so its runs never start: `vitline flows deploy --pool NAME` sets one")
    elif not pool and known.work_pool_name != project:
        done.kept.append(f"work pool {known.work_pool_name}")
    kept = [f"{name} = {short_json(v)}" for name, v in known.job_variables.items() if name not in job_variables]
    done.kept += [f"job variable {variable}" for variable in kept]
    if known.paused:
        done.kept.append("paused")


def own_schedule(deployment: Deployment) -> CronSchedule | None:
    return CronSchedule(cron=deployment.cron, timezone="UTC") if deployment.cron else None


def form_schema(deployment: Deployment, settings: Settings) -> dict[str, Any]:
    """The form as a JSON schema for Prefect, with the values of this registration under REMEMBERED."""

    def flow(request: Any) -> None:
        """Stands in for the deployment's flow: has its parameters."""

    flow.__annotations__ = {"request": deployment.model}
    schema = Flow(flow).parameters.model_dump(exclude_unset=True)
    for definition in schema.get("definitions", {}).values():
        if "properties" in definition:
            definition["properties"] = {name: without_null(field) for name, field in definition["properties"].items()}
    # Prefect allows additional properties at the outermost level: a misspelt "request" would start a run with the defaults.
    schema["additionalProperties"] = False
    schedule = own_schedule(deployment)
    schema[REMEMBERED] = LastRegistration(
        request=deployment.form(),
        description=description_text(deployment),
        schedule=schedule.model_dump(mode="json") if schedule else None,
        root=open_store(settings.root).uri,
        project=settings.project,
    )
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


def without_remembered(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != REMEMBERED}


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
