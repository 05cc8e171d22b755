"""What a filled-in form becomes: steps and warmup from a budget, and keys that find the same work again."""

from datetime import date

import pytest

from data_prep.config import CorpusConfig
from flows.requests import EvaluateRequest, FinetuneRequest, PipelineRequest, PretrainRequest
from flows.resolve import resolve_evaluate, resolve_finetune, resolve_pipeline, resolve_pretrain
from vit.recipes import recipe_named
from vit.run_spec import make_spec

DIGITS = {"corpus": "digits", "recipe": "digits", "tasks": ("digits-5-to-9",)}
NIGHT = date(2026, 11, 21)


def test_a_budget_of_images_becomes_steps_and_shrinks_the_warmup(digits_root):
    recipe, _ = recipe_named("digits").make()
    batch = recipe.input.global_batch_size
    config = resolve_pretrain(
        digits_root, PretrainRequest(corpus="digits", recipe="digits", train_images=30 * batch + 7)
    )
    assert config.recipe.total_steps == 30
    assert config.recipe.optim.warmup_steps == recipe.optim.warmup_steps * 30 // recipe.total_steps
    assert config.name == "digits-digits"
    assert config.val_split == "val"


def test_an_override_wins_over_the_field_and_keeps_its_rules(digits_root):
    ask = {"corpus": "digits", "recipe": "digits", "peak_lr": 0.5}
    assert resolve_pretrain(digits_root, PretrainRequest(**ask)).recipe.optim.peak_lr == 0.5
    changed = PretrainRequest(**ask, overrides={"recipe.optim.peak_lr": 0.25})
    assert resolve_pretrain(digits_root, changed).recipe.optim.peak_lr == 0.25
    with pytest.raises(ValueError, match=r"no group 'recipe\.optimm'"):
        resolve_pretrain(digits_root, PretrainRequest(**ask, overrides={"recipe.optimm.peak_lr": 1}))
    for path in ("corpus", "protocol.total_steps"):  # what would be without effect is refused
        with pytest.raises(ValueError, match=path):
            resolve_pretrain(digits_root, PretrainRequest(**ask, overrides={path: 1}))


def key(root, night=None, **changes):
    return resolve_pipeline(root, PipelineRequest(**(DIGITS | changes)), night).key


def test_the_same_pipeline_has_the_same_key_and_another_another(digits_root):
    same = [{}, {"num_workers": 1}, {"deadline_hours": 2}, {"overrides": {"execution.log_every_steps": 1}}]
    assert len({key(digits_root, **changes) for changes in same}) == 1
    others = [
        {},
        {"seed": 1},
        {"train_images": 12800},
        {"from_scratch": False},
        {"tasks": ("digits",)},
        {"corpus": "digits-0-to-4"},
        {"overrides": {"recipe.optim.peak_lr": 0.5}},
        {"overrides": {"protocol.total_steps": 7}},
    ]
    keys = [key(digits_root, **changes) for changes in others] + [key(digits_root, NIGHT)]
    assert len(set(keys)) == len(keys)


def test_a_night_is_in_the_keys_of_the_pipeline_and_of_its_training(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS), NIGHT)
    assert plan.night == NIGHT
    assert plan.key == key(digits_root, NIGHT) != key(digits_root, date(2026, 11, 22))
    config = resolve_pretrain(digits_root, PretrainRequest(corpus="digits", recipe="digits"))
    keys = {make_spec(config, digits_root, night).run_key for night in (None, NIGHT, date(2026, 11, 22))}
    assert len(keys) == 3


def test_a_changed_protocol_does_not_go_by_the_name_of_the_one_it_was(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS, overrides={"protocol.total_steps": 7}))
    assert plan.protocol.name.startswith("small-images-")
    assert plan.protocol.total_steps == 7


def test_presets_are_prepared_and_other_corpora_must_be_there(digits_root):
    plan = resolve_pipeline(digits_root, PipelineRequest(**DIGITS))
    assert isinstance(plan.source, CorpusConfig)
    with pytest.raises(
        ValueError, match=r"no corpus 'brids' below .*; there are: digits, .*noto-emoji.*`vitline data prep`"
    ):
        resolve_pipeline(digits_root, PipelineRequest(**DIGITS | {"corpus": "brids"}))
    with pytest.raises(ValueError, match=r"no corpus at file://.*/brids"):
        resolve_pipeline(digits_root, PipelineRequest(**DIGITS | {"tasks": (f"{digits_root}/brids",)}))


def test_models_must_be_there(digits_root):
    with pytest.raises(ValueError, match=r"'emoji' is no published model .*none yet"):
        resolve_finetune(digits_root, FinetuneRequest(model="emoji", corpus="digits"))
    with pytest.raises(ValueError, match="no published model at file:///nowhere"):
        resolve_evaluate(digits_root, EvaluateRequest(model="/nowhere", tasks=("digits",)))
