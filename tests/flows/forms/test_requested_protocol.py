"""A protocol with impossible overrides is refused in every form that names one."""

import pytest

from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest, PipelineRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"total_steps": 10}, "warmup_steps=10 must be less than total_steps=10; .*Set a smaller warmup_steps as well"),
        ({"total_steps": [200, 7]}, "warmup_steps=10 must be less than total_steps=7"),
        ({"larger": [{"at_least": 9, "learning_rates": [0.1], "total_steps": 5, "warmup_steps": 6}]},
         r"protocol\.larger\.0: warmup_steps=6 must be less than total_steps=5"),
        ({"global_batch_size": 0}, r"protocol\.global_batch_size: must be more than 0, not 0"),
    ],
)  # fmt: skip
def test_an_impossible_protocol_is_refused_before_any_training(digits_root, tiny, overrides, says):
    changes = {f"protocol.{field}": value for field, value in overrides.items()}
    for resolve, request in [
        (resolve_evaluate, EvaluateRequest(model=tiny, overrides=changes)),
        (
            resolve_pipeline,
            PipelineRequest(corpus="digits", recipe="digits", tasks=("digits-5-to-9",), overrides=changes),
        ),
    ]:
        with pytest.raises(ValueError, match=says) as refused:
            resolve(digits_root, request)
        assert "\n" not in str(refused.value)
