"""The Prefect flow run of this process: what started it, when it was due, and its request."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

from prefect import runtime
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType
from pydantic import ValidationError

from vitline.flows.catalog.records import Origin
from vitline.flows.catalog.registered_by import is_of_project
from vitline.flows.forms.overrides import user_functions
from vitline.flows.forms.refusals import problem_text
from vitline.flows.on_prefect.prefect_observer import client
from vitline.flows.on_prefect.prefect_private import start_dates
from vitline.flows.on_prefect.run_names import given_name
from vitline.flows.ops.server_http import flow_run_page
from vitline.infra.config import FrozenConfig
from vitline.infra.night import night_at
from vitline.infra.settings import Settings
from vitline.vit.models.user_code import check_allowed

R = TypeVar("R", bound=FrozenConfig)
MOST_MISSED = 60
"""So many missed nights are looked for at most."""


@dataclass(frozen=True)
class FlowRun:
    """What a flow needs to know about its own run."""

    id: UUID
    deployment: str | None
    """`flow/deployment`; None for a flow that was called from Python."""
    scheduled: bool
    """Whether a schedule started it, not a person."""
    due: datetime
    """When it should have started."""
    defaults: Mapping[str, Any]
    """The request with which the deployment fills the form."""
    began: datetime | None = None
    """When it first started, also if it was suspended and resumed since; None: now."""
    name: str | None = None
    """Its name, if a person chose one."""
    schedules: tuple[Any, ...] = ()
    """The active schedules of its deployment, as Prefect's client knows them."""
    begun: tuple[datetime, ...] = ()
    """When those runs of its deployment were due that have begun and not ended."""
    of_our_project: bool = True
    """Whether the project of this process has registered its deployment."""
    night_by_hand: datetime | None = None
    """The night that a person has made it."""

    @classmethod
    def current(cls) -> "FlowRun":
        """The run of this process's outermost flow."""
        with client() as api:
            run = api.read_flow_run(UUID(runtime.flow_run.id))
            deployment = api.read_deployment(run.deployment_id) if run.deployment_id else None
            begun = api.read_flow_runs(flow_run_filter=_at_work(deployment.id)) if deployment else []
        return cls(
            id=run.id,
            deployment=f"{runtime.flow_run.flow_name}/{deployment.name}" if deployment else None,
            scheduled=bool(run.auto_scheduled),
            due=run.expected_start_time or datetime.now(UTC),
            name=given_name(run.name),
            defaults=(deployment.parameters or {}).get("request", {}) if deployment else {},
            began=run.start_time,
            schedules=tuple(s.schedule for s in deployment.schedules if s.active) if deployment else (),
            of_our_project=deployment is None or is_of_project(deployment.parameter_openapi_schema, Settings().project),
            begun=tuple(each.expected_start_time for each in begun if each.expected_start_time),
        )

    @property
    def night(self) -> datetime | None:
        """The scheduled start. A run that a person starts has none, unless the request names one, so that its stages are reused."""
        return night_at(self.due) if self.scheduled else self.night_by_hand

    @property
    def origin(self) -> Origin:
        return Origin(
            trigger="schedule" if self.scheduled else "manual",
            flow_run_id=str(self.id),
            flow_run_url=flow_run_page(Settings(), self.id),
            deployment=self.deployment,
            name=self.name,
        )

    def due_between(self, after: datetime) -> list[datetime]:
        """The moments after this one and before this night at which the schedules had a run due that has not begun."""
        if self.night is None:
            return []
        nights = set[datetime]()
        for schedule in self.schedules:
            nights |= {night_at(due) for due in start_dates(schedule, after, self.due, MOST_MISSED)}
        return sorted(night for night in nights - {*map(night_at, self.begun)} if after < night < self.night)

    def late_hours(self) -> float:
        return ((self.began or datetime.now(UTC)) - self.due).total_seconds() / 3600


def _at_work(deployment: UUID) -> FlowRunFilter:
    """The runs of a deployment that have begun and not ended; suspended ones are among them."""
    types = [StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]
    wanted = {"deployment_id": {"any_": [deployment]}, "state": {"type": {"any_": types}}}
    return FlowRunFilter.model_validate(wanted)


def read_request(model: type[R], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> R:
    """The validated request. Fields that a request by the API leaves out keep the deployment's values, not the defaults of the
    model. Raises ValueError that names every violated rule."""
    try:
        return model.model_validate({**defaults, **given})
    except ValidationError as error:
        raise ValueError("; ".join(problem_text(problem, model.model_fields) for problem in error.errors())) from error


def check_project(this: FlowRun) -> None:
    """Raises ValueError for a run of another project: its runs, models and pages would bear the name of this one."""
    if not this.of_our_project:
        raise ValueError(
            f"Another project has registered the deployment {this.deployment}, and VITLINE_PROJECT names {Settings().project!r} in this "
            "process. Set it for the worker of this work pool, or move the deployment to a pool of its project."
        )


def check_user_functions(request: FrozenConfig) -> None:
    """Raises ValueError where a form names a Python function as its recipe or protocol that this process may not import."""
    for what, function in user_functions(request):
        check_allowed(function, what)
