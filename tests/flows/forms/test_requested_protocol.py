"""Protocols of a form with their overrides: what several mean, and what is refused in every form that names one."""

import re

import pytest

from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import CollectGarbageRequest, EvaluateRequest, PipelineRequest
from vitline.flows.forms.overrides import user_functions
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.requested_protocol import as_for_one, requested_protocols
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
    (evaluation,) = resolve_evaluate(digits_root, EvaluateRequest(model=tiny, overrides=overrides))
    pipeline = resolve_pipeline(
        digits_root, PipelineRequest(corpus="digits", recipe="digits", tasks=("digits-5-to-9",), overrides=overrides)
    )
    assert [evaluation.protocol] == [*pipeline.protocols.values()]
    assert re.fullmatch("own-mine-[0-9a-f]{6}-[0-9a-f]{6}", evaluation.protocol.name)
    optim = evaluation.protocol.optim
    assert (optim.optimizer, optim.layer_decay, optim.frozen) == ("adamw", 0.75, "embeddings")
    both = {"protocol": ["fewshot", mine], "protocol.fewshot.shots": [5]}
    probe, unchanged = (
        plan.protocol for plan in resolve_evaluate(digits_root, EvaluateRequest(model=tiny, overrides=both))
    )
    assert probe.name.startswith("fewshot-")
    assert (unchanged.total_steps, unchanged.name) == ((30,), evaluation.protocol.name[:-7])
    assert pipeline.verdict_protocol == unchanged.name


@pytest.mark.parametrize("own", ["vit-papers", 5])
def test_an_override_that_is_no_user_defined_protocol_is_refused(digits_root, tiny, own):
    with pytest.raises(
        ValueError, match=r"The override protocol=.* is no user-defined protocol: .* such as protocol\.total_steps\."
    ):
        resolve_evaluate(digits_root, EvaluateRequest(model=tiny, overrides={"protocol": own}))


def test_the_functions_that_a_form_names_are_known_before_they_are_imported():
    named = {"recipe": "lab.recipes:crows", "protocol": "lab.tasks:mine"}
    assert user_functions(PipelineRequest(overrides=named)) == [*named.items()]
    several = {"protocol": ["fewshot", "mine.yaml", "lab.tasks:mine"]}
    assert user_functions(PipelineRequest(overrides=several)) == [("protocol", "lab.tasks:mine")]
    assert user_functions(EvaluateRequest(model="m", overrides={"protocol": "mine.yaml"})) == []
    assert user_functions(CollectGarbageRequest()) == []
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


@pytest.mark.parametrize("form", ["evaluation", "pipeline"])
def test_an_optimizer_that_cannot_train_the_network_is_refused_before_any_training(digits_root, tiny, form):
    overrides = {"protocol.optim.optimizer": "torch.optim:Muon"}
    request = EvaluateRequest(model=tiny, overrides=overrides)
    pipeline = PipelineRequest(corpus="digits", recipe="digits", tasks=("digits-5-to-9",), overrides=overrides)
    with pytest.raises(ValueError, match=r"Muon only supports 2D .* or set optimizer_scope=hidden-matrices for .*\.$"):
        resolve_evaluate(digits_root, request) if form == "evaluation" else resolve_pipeline(digits_root, pipeline)


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
