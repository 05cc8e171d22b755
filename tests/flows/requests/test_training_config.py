"""Forms of pre-trainings resolved to configs: steps and warmup from a budget, overrides."""

import pytest

from flows.requests.forms import PretrainRequest
from flows.requests.training_config import resolve_pretrain
from vit.recipes import recipe_named


def test_a_budget_of_images_sets_steps_and_shortens_the_warmup(digits_root):
    recipe, _ = recipe_named("digits").make()
    batch = recipe.input.global_batch_size
    config = resolve_pretrain(
        digits_root, PretrainRequest(corpus="digits", recipe="digits", train_images=30 * batch + 7)
    )
    assert config.recipe.total_steps == 30
    assert config.recipe.optim.warmup_steps == recipe.optim.warmup_steps * 30 // recipe.total_steps
    assert config.name == "digits-digits"
    assert config.val_split == "val"


def test_an_override_takes_precedence_over_a_field_and_is_validated(digits_root):
    fields = {"corpus": "digits", "recipe": "digits", "peak_lr": 0.5}
    assert resolve_pretrain(digits_root, PretrainRequest(**fields)).recipe.optim.peak_lr == 0.5
    changed = PretrainRequest(**fields, overrides={"recipe.optim.peak_lr": 0.25})
    assert resolve_pretrain(digits_root, changed).recipe.optim.peak_lr == 0.25
    with pytest.raises(ValueError, match=r"no group 'recipe\.optimm'"):
        resolve_pretrain(digits_root, PretrainRequest(**fields, overrides={"recipe.optimm.peak_lr": 1}))
    for path in ("corpus", "protocol.total_steps"):  # an override without effect is refused
        with pytest.raises(ValueError, match=path):
            resolve_pretrain(digits_root, PretrainRequest(**fields, overrides={path: 1}))
