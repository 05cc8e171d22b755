"""What the form of each flow resolves to: that everything it names exists and fits together is checked before a flow starts."""

from collections.abc import Callable, Mapping
from typing import Any

from vitline.flows.forms.evaluation_plan import resolve_evaluate, resolve_predict
from vitline.flows.forms.finetune_config import resolve_finetune
from vitline.flows.forms.overrides import user_functions
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.prepare_config import resolve_prepare
from vitline.flows.forms.self_training_plan import resolve_self_train
from vitline.flows.forms.training_config import resolve_branch, resolve_pretrain
from vitline.infra.config import FrozenConfig

Resolve = Callable[[str, Any], Any]
"""What a request means below a root. Raises ValueError with the reason to refuse it."""


def as_requested(root: str, request: FrozenConfig) -> FrozenConfig:
    """The request itself: its form says all."""
    return request


RESOLVES: Mapping[str, Resolve] = {
    "prepare-corpus": resolve_prepare,
    "pretrain": resolve_pretrain,
    "self-train": resolve_self_train,
    "branch": resolve_branch,
    "finetune": resolve_finetune,
    "evaluate": resolve_evaluate,
    "predict": resolve_predict,
    "pretrain-then-transfer": resolve_pipeline,
    "reconcile": as_requested,
    "collect-garbage": as_requested,
}
"""By name of the flow, as `FORMS`."""


def check_request(root: str, flow: str, request: FrozenConfig) -> None:
    """Raises ValueError with the reason to refuse a request, as far as this process can know it: a Python function that a form names is
    imported only where flows run."""
    if not user_functions(request):
        RESOLVES[flow](root, request)
