"""Registers deployments with Prefect: creates those that it does not have, and updates the others (`merge.py`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError

from vitline.flows.on_prefect.deploy.form_schema import description_text, form_schema
from vitline.flows.on_prefect.deploy.merge import Changes, Registration, changes, remembered
from vitline.flows.on_prefect.deploy.schedules import new_schedule
from vitline.flows.on_prefect.deployments import DEPLOYMENTS, Deployment
from vitline.flows.on_prefect.prefect_observer import client
from vitline.infra.names import known_names_text
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store


def register(
    settings: Settings,
    deployments: Sequence[Deployment] = DEPLOYMENTS,
    *,
    nightly_active: bool = False,
    pool: str | None = None,
    job_variables: Mapping[str, Any] | None = None,
) -> list[Registration]:
    """Creates or updates these deployments at the server of `settings`, and returns the changes.

    New schedules are as the deployments say, or active if `nightly_active`. `pool` and `job_variables` are set for all deployments;
    without them, each keeps its own. Raises ValueError for a pool that does not exist or variables that it does not accept, and for
    deployments of another root: nothing is changed then.
    """
    deployments = [with_options(each, nightly_active, pool, job_variables or {}) for each in deployments]
    with client() as api:
        found = {deployment.full_name: find(api, deployment) for deployment in deployments}
        check_root(found, settings)
        registered = [known for known in found.values() if known is not None]
        shared_pool, shared_variables = common_pool(registered, settings.project), common_variables(registered)
        check_jobs(api, deployments, found, shared_pool, settings)
        planned = list[tuple[Deployment, Changes | None]]()
        for deployment in deployments:
            if (known := found[deployment.full_name]) is None:
                variables = {**shared_variables, **deployment.job_variables}
                deployment = replace(deployment, pool=deployment.pool or shared_pool, job_variables=variables)
            planned.append((deployment, changes(deployment, known, settings) if known else None))
        return [
            create(api, deployment, settings) if update is None else send(api, deployment, update)
            for deployment, update in planned
        ]


def with_options(
    deployment: Deployment, nightly_active: bool, pool: str | None, job_variables: Mapping[str, Any]
) -> Deployment:
    """A deployment with the options of the command, which win over a file."""
    schedules = deployment.schedules
    if nightly_active:
        schedules = tuple(schedule.model_copy(update={"active": True}) for schedule in schedules)
    variables = {**deployment.job_variables, **job_variables}
    return replace(deployment, schedules=schedules, pool=pool or deployment.pool, job_variables=variables)


def check_registered(settings: Settings) -> None:
    """Raises ValueError where `register` would refuse vitline's deployments for their root. Changes nothing."""
    with client() as api:
        check_root({deployment.full_name: find(api, deployment) for deployment in DEPLOYMENTS}, settings)


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


def check_jobs(
    api: SyncPrefectClient,
    deployments: Sequence[Deployment],
    found: Mapping[str, DeploymentResponse | None],
    shared_pool: str,
    settings: Settings,
) -> None:
    """Raises ValueError for a work pool that does not exist, and for named job variables that it does not accept or no pool has."""
    pools = dict[str, WorkPool]()
    named = list[tuple[Deployment, str, Mapping[str, Any]]]()
    for deployment in deployments:
        known = found[deployment.full_name]
        pool = deployment.pool or (known.work_pool_name if known else shared_pool)
        if pool is None or (known and not (deployment.pool or deployment.job_variables)):
            continue
        if pool not in pools:
            pools[pool] = read_pool(api, pool, deployment, settings)
        named.append((deployment, pool, {**(known.job_variables if known else {}), **deployment.job_variables}))
    # Prefect ignores a variable that a pool does not have. One that another pool has may be meant for all: of the file's defaults.
    templates = {
        name: pool.base_job_template.get("variables", {}).get("properties", {}) for name, pool in pools.items()
    }
    available = {name for template in templates.values() for name in template}
    for deployment, pool, variables in named:
        odd = next((each for each in deployment.job_variables if each not in available), None)
        if odd and all(templates.values()):
            raise ValueError(
                f"{at(deployment)}the jobs of the work pool {pool} have no variable {odd!r}; {known_names_text(odd, available)}"
            )
        try:
            DeploymentUpdate(job_variables=dict(variables)).check_valid_configuration(pools[pool].base_job_template)
        except jsonschema.ValidationError as error:
            raise ValueError(
                f"{at(deployment)}the work pool {pool} rejects the job variables of {deployment.full_name}: {error.message}. Its page, "
                f"or `prefect work-pool inspect {pool}`, shows what it accepts."
            ) from error


def read_pool(api: SyncPrefectClient, pool: str, deployment: Deployment, settings: Settings) -> WorkPool:
    try:
        return api.read_work_pool(pool)
    except ObjectNotFound as error:
        known = known_names_text(pool, (each.name for each in api.read_work_pools()))
        raise ValueError(
            f"{at(deployment)}{settings.prefect_api_url} has no work pool {pool!r}; {known} "
            f"`prefect work-pool create {pool} --type process` creates one for processes; `--pool NAME` chooses another."
        ) from error


def at(deployment: Deployment) -> str:
    """How an error about a deployment begins: with its place in a file."""
    return f"{deployment.place}: " if deployment.place else ""


def create(api: SyncPrefectClient, deployment: Deployment, settings: Settings) -> Registration:
    """Creates a deployment, which names its work pool, and is not registered yet."""
    try:
        api.create_deployment(
            flow_id=api.create_flow_from_name(deployment.flow),
            name=deployment.registered_name,
            entrypoint=deployment.entrypoint,
            description=description_text(deployment),
            tags=deployment.tags,
            parameters={"request": dict(deployment.request)},
            parameter_openapi_schema=form_schema(deployment, settings),
            enforce_parameter_schema=True,
            schedules=[new_schedule(schedule) for schedule in deployment.schedules],
            concurrency_limit=deployment.concurrency,
            # Housekeeping that comes due while it is at work has nothing left to do; others wait.
            concurrency_options=(
                ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
                if deployment.concurrency and deployment.stage == "ops"
                else None
            ),
            work_pool_name=deployment.pool,
            job_variables=dict(deployment.job_variables),
            pull_steps=[],
        )
    except (PrefectHTTPStatusError, ObjectAlreadyExists) as error:
        raise rejected(deployment, error) from error
    return Registration(deployment.full_name, new=True)


def send(api: SyncPrefectClient, deployment: Deployment, update: Changes) -> Registration:
    """Updates a registered deployment; sends nothing if nothing has changed."""
    try:
        if update.fields:
            api.update_deployment(update.id, DeploymentUpdate(**update.fields))
        if update.added:
            api.create_deployment_schedules(update.id, update.added)
        for change in update.changed:
            api.update_deployment_schedule(update.id, change.id, **change.fields)
    except PrefectHTTPStatusError as error:
        raise rejected(deployment, error) from error
    return update.done


def rejected(deployment: Deployment, error: Exception) -> ValueError:
    """The error with which Prefect rejects a deployment, as a sentence."""
    response: Any = getattr(error, "response", None) or getattr(getattr(error, "http_exc", None), "response", None)
    try:
        answer = response.json()
        detail = answer.get("detail") or "; ".join(problem["msg"] for problem in answer["exception_detail"])
    except (AttributeError, ValueError, KeyError, TypeError):
        detail = str(error)[:300]
    return ValueError(f"Prefect rejects {deployment.full_name}: {detail}.")
