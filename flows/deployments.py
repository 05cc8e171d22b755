"""What Prefect offers to start: names, forms filled in, schedules. Registered from code, as often as one likes."""

from dataclasses import dataclass
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import ParameterSchema

from flows import deployed
from flows.prefect_watch import client
from flows.requests import (
    CollectGarbageRequest,
    CompareRequest,
    EvaluateRequest,
    FinetuneRequest,
    PipelineRequest,
    PrepareRequest,
    PretrainRequest,
    ReconcileRequest,
)
from infra.config import FrozenConfig
from infra.settings import Settings

WORK_POOL = "vitline"
NIGHTLY_CRON = "0 2 * * *"
# The start of a flow process costs about 6 s of CPU: less than a hundredth of a core at this pace.
RECONCILE_CRON = "*/15 * * * *"
WEEKLY_CRON = "0 4 * * 0"
ONE_OF_MANY = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)


class ClosedSchema(ParameterSchema):
    """The schema of a flow's parameters that takes no others."""

    additionalProperties: bool


@dataclass(frozen=True)
class Deployment:
    """One entry of Prefect's list. `request` fills the form; what it leaves out keeps the model's defaults."""

    flow: Flow[..., Any]
    name: str
    model: type[FrozenConfig]
    request: dict[str, Any]
    stage: str
    cron: str | None = None
    always_active: bool = False
    """Its new schedule is active at once; of runs that come due together, after the servers were down, one is done."""

    @property
    def full_name(self) -> str:
        return f"{self.flow.name}/{self.name}"


# A night's budget: 153,600 images are the 1,200 steps of the demo, minutes on two cores and seconds on a GPU.
NIGHT = {"name": "nightly", "train_images": 153_600, "deadline_hours": 6.0, "max_late_hours": 3.0}

DEPLOYMENTS = (
    Deployment(deployed.prepare_corpus, "default", PrepareRequest, {}, "prepare"),
    Deployment(
        deployed.pretrain_flow, "default", PretrainRequest, {"corpus": "noto-emoji", "recipe": "emoji"}, "pretrain"
    ),
    Deployment(deployed.finetune, "default", FinetuneRequest, {"model": "emoji", "corpus": "digits"}, "finetune"),
    Deployment(deployed.evaluate, "default", EvaluateRequest, {"model": "emoji", "tasks": ["digits"]}, "evaluate"),
    Deployment(deployed.pretrain_then_transfer_flow, "default", PipelineRequest, {}, "pipeline"),
    Deployment(deployed.pretrain_then_transfer_flow, "demo", PipelineRequest, {}, "pipeline"),
    Deployment(deployed.pretrain_then_transfer_flow, "nightly", PipelineRequest, NIGHT, "pipeline", NIGHTLY_CRON),
    Deployment(deployed.compare_runs, "default", CompareRequest, {}, "compare"),
    Deployment(deployed.reconcile_flow, "default", ReconcileRequest, {}, "ops", RECONCILE_CRON, always_active=True),
    Deployment(deployed.collect_garbage_flow, "default", CollectGarbageRequest, {}, "ops", WEEKLY_CRON),
)


def register(settings: Settings, *, nightly_active: bool = False) -> list[str]:
    """Creates or updates every deployment at the server of `settings`; their names. Schedules that are there stay as
    people have set them; new ones are made paused unless `nightly_active`."""
    with client() as api:
        for deployment in DEPLOYMENTS:
            known = existing_schedules(api, deployment)
            runner(deployment, nightly_active, known).apply()
    return [deployment.full_name for deployment in DEPLOYMENTS]


def runner(
    deployment: Deployment, nightly_active: bool, known: list[DeploymentScheduleCreate] | None
) -> RunnerDeployment:
    """What Prefect stores of a deployment."""
    form = deployment.model.model_validate(deployment.request)
    schedules = known
    if schedules is None and deployment.cron is not None:
        schedule = CronSchedule(cron=deployment.cron, timezone="UTC")
        active = nightly_active or deployment.always_active
        schedules = [DeploymentScheduleCreate(schedule=schedule, active=active)]
    made: Any = deployment.flow.to_deployment(  # its async twin shares the name
        name=deployment.name,
        parameters={"request": form.model_dump(mode="json")},
        work_pool_name=WORK_POOL,
        entrypoint_type=EntrypointType.MODULE_PATH,
        description=deployment.model.__doc__,
        tags=["vitline", f"stage:{deployment.stage}"],
        schedules=schedules,
        concurrency_limit=ONE_OF_MANY if deployment.always_active else None,
    )
    # Prefect itself leaves the outermost level open: a misspelt "request" would start a run with the form's own values.
    schema = made._parameter_openapi_schema.model_dump(exclude_unset=True)
    made._parameter_openapi_schema = ClosedSchema(**schema, additionalProperties=False)
    return made


def existing_schedules(api: SyncPrefectClient, deployment: Deployment) -> list[DeploymentScheduleCreate] | None:
    """The schedules of a deployment that is registered already; None for a new one."""
    try:
        found = api.read_deployment_by_name(deployment.full_name)
    except ObjectNotFound:
        return None
    return [DeploymentScheduleCreate(schedule=s.schedule, active=s.active) for s in found.schedules]
