"""Forms of pipelines resolved to plans: keys, nights, presets, and refusals."""

from datetime import date

import pytest

from data_prep.config import CorpusConfig
from flows.requests.forms import PipelineRequest, PretrainRequest
from flows.requests.pipeline_plan import resolve_pipeline
from flows.requests.training_config import resolve_pretrain
from vit.run_spec import make_spec

DIGITS = {"corpus": "digits", "recipe": "digits", "tasks": ("digits-5-to-9",)}
NIGHT = date(2026, 11, 21)


def key(root, night=None, **changes):
    return resolve_pipeline(root, PipelineRequest(**(DIGITS | changes)), night).key


def test_equal_pipelines_have_equal_keys_and_different_ones_different_keys(digits_root):
    same = [{}, {"num_workers": 1}, {"deadline_hours": 2}, {"overrides": {"execution.log_every_steps": 1}},
            {"overrides": {"nights.num_seeds": 1, "nights.wanted_difference": 0.02}}]  # fmt: skip
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
    assert plan.key == key(digits_root, NIGHT) != key(digits_root, date(2026, 11, 22))
    config = resolve_pretrain(digits_root, PretrainRequest(corpus="digits", recipe="digits"))
    keys = {make_spec(config, digits_root, night).run_key for night in (None, NIGHT, date(2026, 11, 22))}
    assert len(keys) == 3


def test_settings_of_nights_are_checked_by_name_and_value(digits_root):
    with pytest.raises(ValueError, match=r"no field 'nights.num_seed'; .* Did you mean 'nights.num_seeds'\?"):
        key(digits_root, overrides={"nights.num_seed": 3})
    with pytest.raises(ValueError, match=r"nights.num_seeds: Input should be greater than or equal to 1, not 0\."):
        key(digits_root, overrides={"nights.num_seeds": 0})


def test_a_changed_protocol_has_another_name(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS, overrides={"protocol.total_steps": 70}))
    assert plan.protocol.name.startswith("small-images-")
    assert plan.protocol.total_steps == (70,)


def test_presets_are_prepared_and_other_corpora_must_exist(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS))
    assert isinstance(plan.source, CorpusConfig)
    with pytest.raises(
        ValueError, match=r"no corpus 'brids' below .*; available: digits, .*noto-emoji.*`vitline data prep`"
    ):
        resolve_pipeline(digits_root, PipelineRequest(**DIGITS | {"corpus": "brids"}))
    with pytest.raises(ValueError, match=r"no corpus at file://.*/brids"):
        resolve_pipeline(digits_root, PipelineRequest(**DIGITS | {"tasks": (f"{digits_root}/brids",)}))
