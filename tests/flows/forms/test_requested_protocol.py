"""A protocol with impossible overrides is refused in every form that names one."""

import re

import pytest

from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import CollectGarbageRequest, EvaluateRequest, PipelineRequest
from vitline.flows.forms.overrides import user_functions
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.on_prefect.flow_run import check_user_functions


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


@pytest.fixture
def mine(tmp_path):
    """A protocol of a user, of as many steps as the fewest images fill."""
    path = tmp_path / "mine.yaml"
    path.write_text("base: small-images\nprotocol: {total_steps: 30, optim: {optimizer: adamw, layer_decay: 0.75}}\n")
    return str(path)


def test_every_form_takes_a_protocol_of_a_user_and_overrides_change_it(digits_root, tiny, mine):
    overrides = {"protocol": mine, "protocol.optim.frozen": "embeddings"}
    evaluation = resolve_evaluate(digits_root, EvaluateRequest(model=tiny, overrides=overrides))
    pipeline = resolve_pipeline(
        digits_root, PipelineRequest(corpus="digits", recipe="digits", tasks=("digits-5-to-9",), overrides=overrides)
    )
    assert evaluation.protocol == pipeline.protocol
    assert re.fullmatch("own-mine-[0-9a-f]{6}-[0-9a-f]{6}", evaluation.protocol.name)
    optim = evaluation.protocol.optim
    assert (optim.optimizer, optim.layer_decay, optim.frozen) == ("adamw", 0.75, "embeddings")
    unchanged = resolve_evaluate(digits_root, EvaluateRequest(model=tiny, overrides={"protocol": mine})).protocol
    assert (unchanged.total_steps, unchanged.name) == ((30,), evaluation.protocol.name[:-7])


@pytest.mark.parametrize("own", ["vit-papers", 5])
def test_an_override_that_is_no_user_defined_protocol_is_refused(digits_root, tiny, own):
    with pytest.raises(
        ValueError, match=r"The override protocol=.* is no user-defined protocol: .* such as protocol\.total_steps\."
    ):
        resolve_evaluate(digits_root, EvaluateRequest(model=tiny, overrides={"protocol": own}))


def test_the_functions_that_a_form_names_are_known_before_they_are_imported():
    named = {"recipe": "lab.recipes:crows", "protocol": "lab.tasks:mine"}
    assert user_functions(PipelineRequest(overrides=named)) == named
    assert user_functions(EvaluateRequest(model="m", overrides={"protocol": "mine.yaml"})) == {}
    assert user_functions(CollectGarbageRequest()) == {}
    with pytest.raises(
        ValueError, match=r"The protocol 'os:abort' is Python code of 'os', which forms may not import\."
    ):
        check_user_functions(EvaluateRequest(model="m", overrides={"protocol": "os:abort"}))


def test_layers_that_the_network_of_a_pipeline_lacks_are_refused_before_its_pre_training(digits_root):
    request = PipelineRequest(
        corpus="digits", recipe="digits", tasks=("digits-5-to-9",), overrides={"protocol.optim.frozen": 99}
    )
    with pytest.raises(ValueError, match="frozen=99 is more than the 4 blocks of the network, a Vision Transformer"):
        resolve_pipeline(digits_root, request)
