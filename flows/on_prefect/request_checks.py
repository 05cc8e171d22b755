"""The form of every flow, and what it resolves to: that everything it names exists and fits together is checked before a flow starts."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vitline.flows.forms import forms
from vitline.flows.forms.evaluation_plan import resolve_evaluate, resolve_predict
from vitline.flows.forms.finetune_config import resolve_finetune
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.prepare_config import resolve_prepare
from vitline.flows.forms.self_training_plan import resolve_self_train
from vitline.flows.forms.training_config import resolve_branch, resolve_pretrain
from vitline.infra.config import FrozenConfig

Resolve = Callable[[str, Any], Any]
"""What a request means below a root. Raises ValueError with the reason to refuse it."""


class RequestCheck(NamedTuple):
    """The form of a flow and what it resolves to."""

    form: type[FrozenConfig]
    resolve: Resolve


def as_requested(root: str, request: FrozenConfig) -> FrozenConfig:
    """The request itself: its form says all."""
    return request


REQUESTS: Mapping[str, RequestCheck] = {
    "prepare-corpus": RequestCheck(forms.PrepareRequest, resolve_prepare),
    "pretrain": RequestCheck(forms.PretrainRequest, resolve_pretrain),
    "self-train": RequestCheck(forms.SelfTrainRequest, resolve_self_train),
    "branch": RequestCheck(forms.BranchRequest, resolve_branch),
    "finetune": RequestCheck(forms.FinetuneRequest, resolve_finetune),
    "evaluate": RequestCheck(forms.EvaluateRequest, resolve_evaluate),
    "predict": RequestCheck(forms.PredictRequest, resolve_predict),
    "pretrain-then-transfer": RequestCheck(forms.PipelineRequest, resolve_pipeline),
    "reconcile": RequestCheck(forms.ReconcileRequest, as_requested),
    "collect-garbage": RequestCheck(forms.CollectGarbageRequest, as_requested),
}
"""By name of the flow; its subflows have the same names."""
