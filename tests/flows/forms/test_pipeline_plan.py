"""Forms of pipelines resolved to plans: keys, nights, presets, and refusals."""

from datetime import UTC, datetime

import pytest

from vitline.data_prep.config import CorpusConfig
from vitline.flows.forms.forms import PipelineRequest, PretrainRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.training_config import resolve_pretrain
from vitline.infra.storage import open_store

DIGITS = {"corpus": "digits", "recipe": "digits", "tasks": ("digits-5-to-9",)}
NIGHT = datetime(2026, 11, 21, 2, tzinfo=UTC)


def key(root, night=None, **changes):
    return resolve_pipeline(root, PipelineRequest(**(DIGITS | changes)), night).key


def test_equal_pipelines_have_equal_keys_and_different_ones_different_keys(digits_root):
    same = [{}, {"num_workers": 1}, {"deadline_hours": 2}, {"overrides": {"execution.log_every_steps": 1}},
            {"overrides": {"nights.num_seeds": 1, "nights.smallest_effect": 0.02}}]  # fmt: skip
    assert len({key(digits_root, **changes) for changes in same}) == 1
    others = [
        {},
        {"seed": 1},
        {"train_images": 12800},
        {"from_scratch": False},
        {"tasks": ("digits",)},
        {"corpus": "digits-0-to-4"},
        {"overrides": {"recipe.optim.peak_lr": 0.5}},
        {"overrides": {"protocol.total_steps": 70}},
        {"overrides": {"nights.num_seeds": 3}},
    ]
    keys = [key(digits_root, **changes) for changes in others] + [key(digits_root, NIGHT)]
    assert len(set(keys)) == len(keys)


def test_the_keys_of_a_pipeline_and_its_training_depend_on_the_night(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS), NIGHT)
    assert plan.night == NIGHT
    assert plan.key == key(digits_root, NIGHT) != key(digits_root, datetime(2026, 11, 22, 2, tzinfo=UTC))
    training = resolve_pretrain(digits_root, PretrainRequest(corpus="digits", recipe="digits"))
    keys = {training.spec(night).run_key for night in (None, NIGHT, datetime(2026, 11, 22, 2, tzinfo=UTC))}
    assert len(keys) == 3


def test_settings_of_nights_are_checked_by_name_and_value(digits_root):
    with pytest.raises(ValueError, match=r"no field 'nights.num_seed'; .* Did you mean 'nights.num_seeds'\?"):
        key(digits_root, overrides={"nights.num_seed": 3})
    with pytest.raises(ValueError, match=r"nights.num_seeds: must be at least 1, not 0\."):
        key(digits_root, overrides={"nights.num_seeds": 0})


def test_a_changed_protocol_has_another_name(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS, overrides={"protocol.total_steps": 70}))
    (protocol,) = plan.protocols.values()
    assert protocol.name.startswith("small-images-")
    assert protocol.total_steps == (70,)


def test_one_protocol_is_the_same_pipeline_as_a_name_and_as_a_list_and_several_are_another(digits_root):
    assert key(digits_root, protocol=["small-images"]) == key(digits_root)
    asked = {"protocol": ["fewshot", "small-images"]}
    keys = [
        key(digits_root),
        key(digits_root, **asked),
        key(digits_root, **asked, overrides={"protocol.small-images.total_steps": 70}),
    ]
    assert len(set(keys)) == 3
    assert key(digits_root, **asked, overrides={"nights.verdict_protocol": "fewshot"}) == keys[1]


def test_the_verdict_is_by_the_last_protocol_or_the_one_that_is_named(digits_root):
    def plan(**overrides):
        request = PipelineRequest(**DIGITS, protocol=("fewshot", "small-images"), overrides=overrides)
        return resolve_pipeline(digits_root, request)

    assert plan().verdict_protocol == "small-images"
    assert plan(**{"nights.verdict_protocol": "fewshot"}).verdict_protocol == "fewshot"
    refusal = (
        r"nights\.verdict_protocol='fewshots' is not among the protocols of the request; .* Did you mean 'fewshot'"
    )
    with pytest.raises(ValueError, match=refusal):
        plan(**{"nights.verdict_protocol": "fewshots"})


def test_presets_are_prepared_and_other_corpora_must_exist(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS))
    (source,) = plan.sources
    assert isinstance(source, CorpusConfig)
    with pytest.raises(
        ValueError, match=r"no corpus 'brids' below .*; available: digits, .*icons.*`vitline data prepare`"
    ):
        resolve_pipeline(digits_root, PipelineRequest(**DIGITS | {"corpus": "brids"}))
    with pytest.raises(ValueError, match=r"no corpus at file://.*/brids"):
        resolve_pipeline(digits_root, PipelineRequest(**DIGITS | {"tasks": (f"{digits_root}/brids",)}))


MIXED = {"corpus": "birds", "mix_with": [{"corpus": "city", "weight": 0.5}], "tasks": ["city"], "recipe": "digits"}
CLASSES = "corpus,class,mixture_class\nbirds,jay,bird\nbirds,owl,bird\ncity,bus,vehicle\ncity,owl,\ncity,tram,vehicle\n"


def mixed(root, **changes):
    return resolve_pipeline(root, PipelineRequest.model_validate(MIXED | changes))


def test_weights_order_and_classes_of_a_mixture_are_in_the_key(two_corpora, tmp_path):
    table = tmp_path / "classes.csv"
    table.write_text(CLASSES)
    plan = mixed(two_corpora)
    assert [open_store(uri).uri.split("/")[-2] for uri in plan.sources] == ["birds", "city"]
    assert mixed(two_corpora, corpus_weight=2, mix_with=[{"corpus": "city"}]).key == plan.key
    others = [
        {"mix_with": []},
        {"corpus_weight": 2.0},
        {"corpus": "city", "mix_with": [{"corpus": "birds", "weight": 0.5}]},
        {"class_map": "prefixed"},
        {"class_map": str(table)},
    ]
    keys = [plan.key, *(mixed(two_corpora, **changes).key for changes in others)]
    table.write_text(CLASSES.replace("tram,vehicle", "tram,tram"))
    keys.append(mixed(two_corpora, class_map=str(table)).key)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mix_with": [], "class_map": "prefixed"}, "class_map='prefixed' has an effect in a mixture only"),
        ({"mix_with": [{"corpus": "towns"}]}, "There is no corpus 'towns' below .*; available: birds, city"),
        ({"mix_with": [{"corpus": "birds"}]}, "has birds twice. Name it once"),
        ({"mix_with": [{"corpus": "digits"}, {"corpus": "digits"}]}, "has digits twice. Name it once"),
        ({"class_map": "prefix", "mix_with": [{"corpus": "digits"}]}, "There is no class table at .*prefix. A class map is"),
        ({"corpus_weight": 1000}, "The smallest of the weights .* at least one is needed"),
        ({"overrides": {"mixture.class_map": "prefixed"}}, r"'mixture\.class_map' cannot be overridden"),
    ],
)  # fmt: skip
def test_a_mixture_that_does_not_fit_is_refused_before_anything_is_prepared(two_corpora, changes, message):
    with pytest.raises(ValueError, match=message):
        mixed(two_corpora, **changes)
