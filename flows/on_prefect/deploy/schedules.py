"""Schedules of deployments: what a file says against what Prefect has, and both in words.

A schedule of ours is found again by its name, Prefect's slug. All others belong to the page of the deployment.
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule

from vitline.flows.on_prefect.deployments import Deployment, Schedule
from vitline.infra.html.text import short_json

UNNAMED: str = Schedule.model_fields["name"].default


@dataclass(frozen=True)
class ScheduleChange:
    """What is sent of a registered schedule."""

    id: UUID
    fields: dict[str, Any]
    before: str
    after: str


def cron_of(schedule: Schedule) -> CronSchedule:
    """As Prefect's client has it. Raises ValueError for times or a time zone that Prefect does not know."""
    return CronSchedule(cron=schedule.cron, timezone=schedule.timezone)


def new_schedule(schedule: Schedule) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(schedule=cron_of(schedule), active=schedule.active is not False, slug=schedule.name)


def schedules_to_add(deployment: Deployment, known: DeploymentResponse) -> list[DeploymentScheduleCreate]:
    """Those of a deployments file that Prefect does not have."""
    slugs = {schedule.slug for schedule in known.schedules}
    return [new_schedule(each) for each in deployment.schedules if deployment.place and each.name not in slugs]


def schedules_to_change(deployment: Deployment, known: DeploymentResponse) -> list[ScheduleChange]:
    """Those of a deployments file that Prefect has with other times, or switched otherwise than the file says."""
    named = {schedule.name: schedule for schedule in deployment.schedules if deployment.place}
    found = []
    for schedule in known.schedules:
        if (ours := named.get(schedule.slug or "")) is None:
            continue
        fields = dict[str, Any]()
        if (times := cron_of(ours)) != schedule.schedule:
            fields["schedule"] = times
        if ours.active not in (None, schedule.active):
            fields["active"] = ours.active
        if fields:
            after = schedule_text(schedule.model_copy(update=fields))
            found.append(ScheduleChange(schedule.id, fields, schedule_text(schedule), after))
    return found


def kept_schedules(deployment: Deployment, known: DeploymentResponse) -> list[str]:
    """What the page of a deployment has otherwise than a new registration would, and keeps."""
    ours = {schedule.name: schedule for schedule in deployment.schedules}
    changed = {change.id for change in schedules_to_change(deployment, known)}
    kept = []
    for schedule in known.schedules:
        named = ours.get(schedule.slug or "")
        is_new = named is not None and (
            (cron_of(named), named.active is not False, {}) == (schedule.schedule, schedule.active, schedule.parameters)
        )
        if not is_new and schedule.id not in changed:
            kept.append(schedule_text(schedule))
    return kept


def schedule_text(schedule: DeploymentSchedule | DeploymentScheduleCreate) -> str:
    """`schedule 0 2 * * * Europe/Berlin, active, weekend`"""
    times: dict[str, Any] = schedule.schedule.model_dump(mode="json")
    when = times.get("cron") or times.get("rrule") or f"every {times.get('interval')} s"
    extra = [schedule.slug] if schedule.slug and schedule.slug != UNNAMED else []
    extra += [f"{name} {short_json(value)}" for name, value in schedule.parameters.items()]
    return f"schedule {when} {times.get('timezone') or 'UTC'}, {', '.join(['active' if schedule.active else 'paused', *extra])}"
