"""Forms of evaluations resolved to plans: the model must exist, overrides are of the protocol."""

import pytest

from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest
from vitline.vit.evaluation.protocols import protocol_named


def test_the_model_must_exist(digits_root):
    with pytest.raises(ValueError, match="no published model at file:///nowhere"):
        resolve_evaluate(digits_root, EvaluateRequest(model="/nowhere", tasks=("digits",)))


def test_an_evaluation_takes_overrides_of_its_protocol_only(digits_root, tiny):
    def protocol(**fields):
        (plan,) = resolve_evaluate(digits_root, EvaluateRequest(model=tiny, **fields))
        return plan.protocol

    changed = protocol(overrides={"protocol.precision": "bfloat16"})
    assert changed.name.startswith("small-images-")
    assert changed.precision == "bfloat16"
    short = protocol(
        protocol="vit-paper-transfer", overrides={"protocol.total_steps": 200, "protocol.warmup_steps": 20}
    )
    assert {(size.total_steps, size.warmup_steps) for size in (short, *short.larger)} == {((200,), 20)}
    assert [size.learning_rates for size in short.larger] == [
        s.learning_rates for s in protocol_named("vit-paper-transfer").larger
    ]
    with pytest.raises(ValueError, match=r"'recipe\.seed' cannot be overridden in an evaluation"):
        protocol(overrides={"recipe.seed": 1})
    with pytest.raises(ValueError, match=r"'protocol\.name' cannot be overridden"):
        protocol(overrides={"protocol.name": "mine"})
    with pytest.raises(ValueError, match="knn trains no network, so there is none to train from scratch"):
        protocol(protocol="knn", from_scratch=True)
    with pytest.raises(ValueError, match="head trains no network, so there is none to keep: set keep_models to false"):
        protocol(protocol="head", keep_models=True)
    with pytest.raises(ValueError, match=r"No task of vtab is prepared below .*vitline vtab prepare"):
        protocol(tasks=("vtab",))
