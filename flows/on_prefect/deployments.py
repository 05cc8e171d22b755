"""What Prefect offers to start: names, forms filled in, schedules. `flows/on_prefect/registration.py` registers it."""

from dataclasses import dataclass
from typing import Any

from flows.requests.forms import (
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
from infra.names import there_are

NIGHTLY_CRON = "0 2 * * *"
# The start of a flow process costs about 6 s of CPU: less than a hundredth of a core at this pace.
RECONCILE_CRON = "*/15 * * * *"
WEEKLY_CRON = "0 4 * * 0"


@dataclass(frozen=True)
class Deployment:
    """One entry of Prefect's list. `request` fills the form; what it leaves out keeps the model's defaults."""

    function: str
    """Of `flows/deployed.py`; the flow has its name, with dashes."""
    name: str
    model: type[FrozenConfig]
    request: dict[str, Any]
    stage: str
    cron: str | None = None
    always_active: bool = False
    """Its new schedule is active at once; of runs that come due together, after the servers were down, one is done."""
    purpose: str = ""
    """What it is for, where a flow has several deployments."""

    @property
    def flow(self) -> str:
        return self.function.removesuffix("_flow").replace("_", "-")

    @property
    def entrypoint(self) -> str:
        """Where a flow process finds the code."""
        return f"flows.deployed.{self.function}"

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"

    @property
    def description(self) -> str:
        """What people read above the form."""
        return " ".join(f"{self.purpose} {self.model.__doc__}".split())

    @property
    def tags(self) -> list[str]:
        """Ours; people may add others."""
        return ["vitline", f"stage:{self.stage}"]

    def form(self) -> dict[str, Any]:
        """The filled-in form, every field of it, as JSON."""
        return self.model.model_validate(self.request).model_dump(mode="json")


# A night's budget: 153,600 images are the 1,200 steps of the demo, minutes on two cores and seconds on a GPU.
NIGHT = {"name": "nightly", "train_images": 153_600, "deadline_hours": 6.0, "max_late_hours": 3.0}
# Written out, though the form's own values are the same: `vitline flows ls` shows them.
DEMO = {
    "name": "emoji",
    "corpus": "noto-emoji",
    "recipe": "emoji",
    "tasks": ["twitter-emoji", "digits"],
    "from_scratch": True,
}
PIPELINE = "pretrain_then_transfer_flow"

DEPLOYMENTS = (
    Deployment("prepare_corpus", "default", PrepareRequest, {}, "prepare"),
    Deployment("pretrain_flow", "default", PretrainRequest, {"corpus": "noto-emoji", "recipe": "emoji"}, "pretrain"),
    Deployment("finetune", "default", FinetuneRequest, {"model": "emoji", "corpus": "digits"}, "finetune"),
    Deployment("evaluate", "default", EvaluateRequest, {"model": "emoji", "tasks": ["digits"]}, "evaluate"),
    Deployment(PIPELINE, "default", PipelineRequest, {}, "pipeline", purpose="For your own choice of corpus and tasks."),
    Deployment(PIPELINE, "demo", PipelineRequest, DEMO, "pipeline", purpose="What `make demo` runs: emoji and digits."),
    Deployment(
        PIPELINE, "nightly", PipelineRequest, NIGHT, "pipeline", NIGHTLY_CRON,
        purpose="Every night at 02:00 UTC once its schedule is on, with a fixed budget and a deadline.",
    ),
    Deployment("compare_runs", "default", CompareRequest, {}, "compare"),
    Deployment("reconcile_flow", "default", ReconcileRequest, {}, "ops", RECONCILE_CRON, always_active=True),
    Deployment("collect_garbage_flow", "default", CollectGarbageRequest, {}, "ops", WEEKLY_CRON),
)  # fmt: skip


def deployment_named(name: str) -> Deployment:
    """Raises ValueError that lists the deployments there are."""
    for deployment in DEPLOYMENTS:
        if deployment.full_name == name:
            return deployment
    known = there_are(name, (deployment.full_name for deployment in DEPLOYMENTS))
    raise ValueError(f"There is no deployment {name!r}; {known}")
