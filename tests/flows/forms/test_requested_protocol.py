"""Protocols of a form with their overrides: what several mean, and what is refused in every form that names one."""

import pytest

from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest, PipelineRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.requested_protocol import as_for_one, requested_protocols


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


BOTH = ("fewshot", "vit-paper")


def test_each_of_several_protocols_has_the_overrides_with_its_name():
    named = {"protocol.vit-paper.total_steps": 700, "protocol.fewshot.shots": [5]}
    probe, tuned = requested_protocols(BOTH, named, from_scratch=True).values()
    assert (probe.shots, tuned.total_steps) == ((5,), (700,))
    (alone,) = requested_protocols(BOTH[1:], {"protocol.total_steps": 700}, from_scratch=True).values()
    assert alone == tuned, "its scores are the same"
    (also,) = requested_protocols(BOTH[1:], {"protocol.vit-paper.total_steps": 700}, from_scratch=True).values()
    assert also == tuned


@pytest.mark.parametrize(
    ("names", "overrides", "says"),
    [
        (BOTH, {"protocol.total_steps": 7}, r"'protocol\.total_steps' does not say which protocol it is of: begin it with "
         r"protocol\.fewshot\. or protocol\.vit-paper\."),
        (BOTH, {"protocol.linear.shots": 7}, r"'protocol\.linear\.shots' does not say which protocol"),
        (BOTH, {"recipe.seed": 7}, r"'recipe\.seed' cannot be overridden in an evaluation"),
        (BOTH, {"protocol.fewshot.total_steps": 7}, r"no field 'protocol\.total_steps'; available fields: method, shots"),
        (("knn", "fewshot"), {}, "Protocols knn and fewshot train no network, so there is none to train from scratch"),
    ],
)  # fmt: skip
def test_what_is_of_no_protocol_is_refused(names, overrides, says):
    with pytest.raises(ValueError, match=says) as refused:
        requested_protocols(names, overrides, from_scratch=True)
    assert "\n" not in str(refused.value)


def test_a_probe_beside_a_fine_tuning_has_no_control(digits_root, tiny):
    request = EvaluateRequest(model=tiny, protocol=("fewshot", "small-images"), from_scratch=True)
    assert [plan.models for plan in resolve_evaluate(digits_root, request)] == [(tiny,), (tiny, None)]


def test_a_form_takes_one_name_or_a_list_in_which_each_is_once():
    assert EvaluateRequest(model="m", protocol="linear").model_dump(mode="json")["protocol"] == "linear"
    assert EvaluateRequest(model="m", protocol=["knn", "linear"]).model_dump(mode="json")["protocol"] == [
        "knn",
        "linear",
    ]
    for wrong, says in ((["knn", "knn"], "must name knn once"), ([], "must not be left empty")):
        with pytest.raises(ValueError, match=says):
            EvaluateRequest(model="m", protocol=wrong)


def test_of_a_request_one_protocol_depends_on_what_is_not_of_the_others():
    overrides = {"recipe.seed": 1, "protocol.fewshot.shots": [5], "protocol.vit-paper.total_steps": 700}
    alone = as_for_one({"name": "birds", "protocol": [*BOTH], "overrides": overrides}, "vit-paper")
    assert alone == {
        "name": "birds",
        "protocol": "vit-paper",
        "overrides": {"recipe.seed": 1, "protocol.total_steps": 700},
    }
