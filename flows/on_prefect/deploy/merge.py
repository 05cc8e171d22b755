"""What a registration sends of one deployment that Prefect has: what vitline owns, and what a deployments file or an option names.

vitline owns the code, the form with its help, and its own tags; the description, too, unless somebody has edited it. What a file or
an option names is sent each time. Everything else (other values of the form, other schedules, active and paused, limits, work pool
and queue, job variables, added tags) is set at the first registration and then belongs to the page of the deployment. A deployment
is registered with those values only that differ from the form's defaults, so that a new default of the form applies to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.responses import DeploymentResponse

from vitline.flows.catalog.registered_by import REMEMBERED
from vitline.flows.on_prefect.deploy.form_schema import description_text, form_schema
from vitline.flows.on_prefect.deploy.schedules import (
    ScheduleChange,
    kept_schedules,
    schedule_text,
    schedules_to_add,
    schedules_to_change,
)
from vitline.flows.on_prefect.deployments import Deployment
from vitline.flows.on_prefect.flow_run import read_request
from vitline.infra.html.text import short_json
from vitline.infra.settings import Settings


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


@dataclass(frozen=True)
class Changes:
    """What is sent of a deployment."""

    id: UUID
    done: Registration
    fields: Mapping[str, Any]
    """Fields of `DeploymentUpdate`; none if nothing has changed, as Prefect plans all runs of an updated deployment anew."""
    added: list[DeploymentScheduleCreate]
    changed: list[ScheduleChange]


def changes(deployment: Deployment, known: DeploymentResponse, settings: Settings) -> Changes:
    """What is sent of a deployment that Prefect has, and the report of it."""
    done = Registration(deployment.full_name)
    fields = dict[str, Any]()
    merged = merged_request(deployment, known, done)
    if done.problem is None:
        if merged != (known.parameters or {}).get("request"):
            fields["parameters"] = {**(known.parameters or {}), "request": merged}
        if (schema := form_schema(deployment, settings)) != known.parameter_openapi_schema:
            fields["parameter_openapi_schema"] = schema
            done.updated.append("form")
    if deployment.entrypoint != known.entrypoint:
        fields["entrypoint"] = deployment.entrypoint
        done.updated.append("code")
    if (description := description_text(deployment)) != known.description:
        named = deployment.place and deployment.purpose
        if named or known.description == remembered(known).get("description", known.description):
            fields["description"] = description
            done.updated.append("description")
        else:
            done.kept.append("description")
    if not set(deployment.tags) <= set(known.tags):
        fields["tags"] = [*deployment.tags, *(tag for tag in known.tags if tag not in deployment.tags)]
        done.updated.append("tags")
    limit = known.global_concurrency_limit and known.global_concurrency_limit.limit
    if deployment.place and deployment.concurrency not in (None, limit):
        fields["concurrency_limit"] = deployment.concurrency
        done.updated.append(f"concurrency {limit or 'unlimited'} -> {deployment.concurrency}")
    fields |= pool_changes(deployment, known, done)
    added, changed = schedules_to_add(deployment, known), schedules_to_change(deployment, known)
    done.updated += [f"{schedule_text(each)} added" for each in added]
    done.updated += [f"{each.before} -> {each.after.removeprefix('schedule ')}" for each in changed]
    report_kept_settings(deployment, known, settings.project, done)
    return Changes(known.id, done, fields, added, changed)


def remembered(known: DeploymentResponse) -> Mapping[str, Any]:
    """What the form's schema holds of the last registration: `description`, and `root` and `project`, which it belongs to."""
    found: Mapping[str, Any] = (known.parameter_openapi_schema or {}).get(REMEMBERED, {})
    return found


def merged_request(deployment: Deployment, known: DeploymentResponse, done: Registration) -> dict[str, Any]:
    """The values that fill the form: those of the page, without fields that the form no longer has, and those that a file names."""
    theirs: Mapping[str, Any] = (known.parameters or {}).get("request") or {}
    named = deployment.request if deployment.place else {}
    kept = {name: value for name, value in theirs.items() if name in deployment.model.model_fields}
    merged = {**kept, **named}
    new = deployment.form()
    done.kept += [
        f"request.{name} {short_json(value)} (default: {short_json(new.get(name))})"
        for name, value in kept.items()
        if name not in named and value != new.get(name)
    ]
    try:
        read_request(deployment.model, merged, {})
    except ValueError as why:
        if known.enforce_parameter_schema:
            done.problem = (
                f"keeps its old form, because the new one rejects the values of this deployment ({why}). Edit its parameters "
                "on its page, then run `vitline flows deploy` again."
            )
            return merged
    done.updated += [
        f"request.{name} {short_json(theirs[name])} removed: the form no longer has this field"
        for name in theirs.keys() - kept.keys()
    ]
    done.updated += [
        f"request.{name} {f'{short_json(kept[name])} -> ' if name in kept else ''}{short_json(value)}"
        for name, value in named.items()
        if name not in kept or kept[name] != value
    ]
    return merged


def pool_changes(deployment: Deployment, known: DeploymentResponse, done: Registration) -> dict[str, Any]:
    """The named changes of pool and job variables; other job variables are kept."""
    fields, pool = dict[str, Any](), deployment.pool
    if pool and pool != known.work_pool_name:
        fields["work_pool_name"] = pool
        done.updated.append(f"work pool {known.work_pool_name or 'none'} -> {pool}")
    changed = {
        name: value
        for name, value in deployment.job_variables.items()
        if name not in known.job_variables or known.job_variables[name] != value
    }
    if changed:
        fields["job_variables"] = {**known.job_variables, **changed}
        if "work_pool_name" not in fields and known.work_pool_name:
            # Prefect checks job variables only if the update names the pool, and changes the queue unless it is named, too.
            fields |= {"work_pool_name": known.work_pool_name, "work_queue_name": known.work_queue_name}
        done.updated += [f"job variable {name} = {short_json(value)}" for name, value in changed.items()]
    return fields


def report_kept_settings(deployment: Deployment, known: DeploymentResponse, project: str, done: Registration) -> None:
    """Adds the kept schedules, pool, job variables and pause to the report."""
    done.kept += kept_schedules(deployment, known)
    if deployment.schedules and not deployment.place and not known.schedules:
        done.kept.append("no schedule")
    if not deployment.pool and known.work_pool_name is None:
        done.kept.append("no work pool, so its runs never start: `vitline flows deploy --pool NAME` sets one")
    elif not deployment.pool and known.work_pool_name != project:
        done.kept.append(f"work pool {known.work_pool_name}")
    done.kept += [
        f"job variable {name} = {short_json(value)}"
        for name, value in known.job_variables.items()
        if name not in deployment.job_variables
    ]
    if known.paused:
        done.kept.append("paused")
