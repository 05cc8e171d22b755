"""What is checked of a request before its flow starts: that everything it names exists and fits together."""

from collections.abc import Callable, Mapping
from typing import Any

from vitline.flows.forms import forms
from vitline.flows.forms.evaluation_plan import resolve_evaluate, resolve_predict
from vitline.flows.forms.finetune_config import resolve_finetune
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.prepare_config import resolve_prepare
from vitline.flows.forms.self_training_plan import resolve_self_train
from vitline.flows.forms.training_config import resolve_branch, resolve_pretrain
from vitline.infra.config import FrozenConfig

Checks = Mapping[str, tuple[type[FrozenConfig], Callable[[str, Any], object]]]
"""By flow name: the form, and a function of root and request that raises ValueError with the reason to refuse it."""
REQUEST_CHECKS: Checks = {
    "prepare-corpus": (forms.PrepareRequest, resolve_prepare),
    "pretrain": (forms.PretrainRequest, resolve_pretrain),
    "self-train": (forms.SelfTrainRequest, resolve_self_train),
    "branch": (forms.BranchRequest, resolve_branch),
    "finetune": (forms.FinetuneRequest, resolve_finetune),
    "evaluate": (forms.EvaluateRequest, resolve_evaluate),
    "predict": (forms.PredictRequest, resolve_predict),
    "pretrain-then-transfer": (forms.PipelineRequest, resolve_pipeline),
}
