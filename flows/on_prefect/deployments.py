"""The deployments: names, filled-in forms and schedules. `flows/on_prefect/deploy` registers these, or those of a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitline.flows.forms.forms import FORMS, Name
from vitline.infra.config import FrozenConfig
from vitline.infra.names import known_names_text
from vitline.infra.settings import Settings

ENTRYPOINTS = "vitline.flows.on_prefect.flows."
"""How the import paths of vitline's flows begin."""
NIGHTLY_CRON = "0 2 * * *"
# A flow process takes about 6 s of CPU to start, which at this interval is less than a hundredth of a core.
RECONCILE_CRON = "*/15 * * * *"
COLLECT_CRON = "0 4 * * *"


class Schedule(FrozenConfig):
    """When a deployment starts by itself."""

    cron: str
    """Five fields: minute, hour, day of the month, month, day of the week."""
    timezone: str = "UTC"
    """Such as Europe/Berlin."""
    name: Name = "default"
    """By which it is found again when its times change; Prefect calls it slug."""
    active: bool | None = None
    """None: active when it is new, and afterwards as its page has it."""


@dataclass(frozen=True)
class Deployment:
    """One deployment of a flow. `request` fills the form; other fields keep the defaults of the model."""

    function: str
    """Function in `flows/on_prefect/flows.py`; the flow has its name, with dashes."""
    name: str
    request: Mapping[str, Any]
    stage: str
    schedules: tuple[Schedule, ...] = ()
    concurrency: int | None = None
    """So many of its runs at once."""
    purpose: str = ""
    """Its purpose, if the flow has several deployments."""
    pool: str | None = None
    """Work pool. None: the one that it has, or that the others have."""
    job_variables: Mapping[str, Any] = field(default_factory=dict)
    more_tags: tuple[str, ...] = ()
    place: str = ""
    """Where a deployments file names it. What such a file says is sent at each registration; what is written here, only at the first."""

    @property
    def flow(self) -> str:
        return self.function.removesuffix("_flow").replace("_", "-")

    @property
    def model(self) -> type[FrozenConfig]:
        """Its form."""
        return FORMS[self.flow]

    @property
    def entrypoint(self) -> str:
        """Import path of the flow."""
        return f"{ENTRYPOINTS}{self.function}"

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.registered_name}"

    @property
    def registered_name(self) -> str:
        """Its name in Prefect, which several projects may share."""
        return Settings().named(self.name)

    @property
    def description(self) -> str:
        """The text above the form."""
        return " ".join(f"{self.purpose} {self.model.__doc__}".split())

    @property
    def tags(self) -> list[str]:
        """The tags of vitline and of the file; users may add others in Prefect."""
        return [Settings().project, f"stage:{self.stage}", *self.more_tags]

    def form(self) -> dict[str, Any]:
        """The filled-in form with every field that is named or has a default, as JSON."""
        return form_defaults(self.flow) | dict(self.request)


def form_defaults(flow: str) -> dict[str, Any]:
    """The defaults of a form, as JSON; without fields that have none."""
    return FORMS[flow].model_construct().model_dump(mode="json")


# 102,400 images are the 800 steps of the demo.
NIGHT = {"name": "nightly", "train_images": 102_400, "deadline_hours": 6.0, "max_late_hours": 3.0}
# Daily collections delete what was listed a week before.
COLLECT = {"dry_run": False, "notice_days": 6.5}
# The defaults of the form, repeated here so that `vitline flows ls` shows them, and a longer fine-tuning: letters need it.
DEMO = {
    "name": "icons",
    "corpus": "icons",
    "recipe": "icons",
    "tasks": ["new-icons", "letters"],
    "from_scratch": True,
    "overrides": {"protocol.total_steps": 160, "protocol.warmup_steps": 16, "protocol.learning_rates": [0.1, 0.3]},
}
STUDENT = {"teacher": "icons", "corpus": "icons", "unlabelled": "new-icons"}
PIPELINE = "pretrain_then_transfer_flow"

DEPLOYMENTS: tuple[Deployment, ...] = (
    Deployment("prepare_corpus", "default", {}, "prepare"),
    Deployment("pretrain_flow", "default", {"corpus": "icons", "recipe": "icons"}, "pretrain"),
    Deployment("self_train_flow", "default", STUDENT, "pretrain"),
    Deployment("branch", "default", {"parent": "icons", "step": 600}, "pretrain"),
    Deployment("finetune", "default", {"model": "icons", "corpus": "digits"}, "finetune"),
    Deployment("evaluate", "default", {"model": "icons", "tasks": ["digits"]}, "evaluate"),
    Deployment("predict", "default", {"model": "icons", "corpus": "new-icons"}, "predict"),
    Deployment(PIPELINE, "default", {}, "pipeline", purpose="With your own choice of corpus and tasks."),
    Deployment(PIPELINE, "demo", DEMO, "pipeline", purpose="What `make demo` runs: icons and letters."),
    Deployment(
        PIPELINE, "nightly", NIGHT, "pipeline", (Schedule(cron=NIGHTLY_CRON, active=False),),
        purpose="Every night at 02:00 UTC once its schedule is active, with a fixed budget and a deadline.",
    ),
    Deployment("reconcile_flow", "default", {}, "ops", (Schedule(cron=RECONCILE_CRON),), concurrency=1),
    Deployment(
        "collect_garbage_flow", "default", COLLECT, "ops", (Schedule(cron=COLLECT_CRON),), concurrency=1,
        purpose="Every day at 04:00 UTC. It lists on its page what it deletes a week later.",
    ),
)  # fmt: skip


FUNCTIONS = {each.flow: (each.function, each.stage) for each in DEPLOYMENTS}
"""Function and stage of every flow, by its name."""


def deployment_named(name: str) -> Deployment:
    """The built-in deployment with this full name. Raises ValueError that lists the deployments."""
    for deployment in DEPLOYMENTS:
        if deployment.full_name == name:
            return deployment
    known = known_names_text(name, (deployment.full_name for deployment in DEPLOYMENTS))
    raise ValueError(f"There is no deployment {name!r}; {known}")
