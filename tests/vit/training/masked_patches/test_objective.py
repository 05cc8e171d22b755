"""Masked patches as the objective: the split of a batch changes rounding only, a resumed training repeats its draws, colours are learned,
and the published network can be fine-tuned."""

import math

import pytest
import torch

from vitline.infra.config import replace
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import read_state
from vitline.vit.checkpoints.state_tensors import load_state_tensors, state_tensors
from vitline.vit.config import ExecutionConfig, MaskedPatchConfig, TrainRecipe
from vitline.vit.models.config import PatchTarget
from vitline.vit.models.masked_patches import MaskedPatchModel
from vitline.vit.published.models import load_model
from vitline.vit.training.loop import initial_state, train, train_step
from vitline.vit.training.masked_patches.objective import batch_corruption
from vitline.vit.training.world import World

from ....trainings import finish

CPU, NUM_CLASSES = World(), 5
TARGETS = PatchTarget.__args__


@pytest.fixture
def recipe_of(tiny_recipe):
    """recipe_of(target): the tiny recipe on masked patches, without dropout."""
    return lambda target="mean-color-3bit": replace(
        tiny_recipe, **{"masked_patches": MaskedPatchConfig(target=target).model_dump(), "model.dropout_rate": 0.0}
    )


@pytest.mark.parametrize("target", TARGETS)
def test_micro_batches_and_padding_change_an_update_by_rounding_only(recipe_of, make_batch, target):
    recipe = recipe_of(target)
    whole, split = (initial_state(recipe, NUM_CLASSES, CPU.device) for _ in range(2))
    assert isinstance(whole.model, MaskedPatchModel)
    for step in range(10):
        one = train_step(whole, whole.model, [make_batch(step)], recipe, CPU)
        parts = [make_batch(step, 3), make_batch(step, 3, start=3), make_batch(step, 2, start=6, padding=1)]
        several = train_step(split, split.model, parts, recipe, CPU)
        assert several.loss_sum == pytest.approx(float(one.loss_sum), rel=1e-5 if step == 0 else 1e-3)
        assert several.num_valid == one.num_valid == 8
    head = initial_state(recipe, NUM_CLASSES, CPU.device).model.network.head
    assert torch.equal(whole.model.network.head.weight, head.weight)  # not even weight decay moves it


def test_a_corruption_is_a_function_of_seed_step_and_position(recipe_of, make_batch):
    recipe = recipe_of()
    whole, rest = (batch_corruption(batch, recipe, 7) for batch in (make_batch(0), make_batch(0, 5, start=3)))
    assert torch.equal(whole.places[3:], rest.places)
    for other in (
        batch_corruption(make_batch(0), recipe, 8),
        batch_corruption(make_batch(0), replace(recipe, seed=1), 7),
    ):
        assert not torch.equal(other.places, whole.places)


def test_a_resumed_training_equals_the_uninterrupted_one(recipe_of, make_batch):
    recipe = recipe_of()

    def run(state, steps, until):
        shown = []
        batches = iter([[make_batch(step)] for step in steps])
        short = replace(recipe, total_steps=until) if until < recipe.total_steps else recipe
        short = replace(short, **{"optim.schedule": "linear", "optim.decay_steps": 12})
        train(
            state,
            batches,
            short,
            ExecutionConfig(log_every_steps=1),
            CPU,
            report=lambda step, m: shown.append((step, m["train/loss"])),
        )
        return shown

    whole = run(initial_state(recipe, NUM_CLASSES, CPU.device), range(12), 12)
    first = initial_state(recipe, NUM_CLASSES, CPU.device)
    begun = run(first, range(6), 6)
    second = initial_state(replace(recipe, seed=9), NUM_CLASSES, CPU.device)
    load_state_tensors(second, state_tensors(first))
    second.step = first.step
    assert begun + run(second, range(6, 12), 12) == whole
    torch.testing.assert_close(dict(second.evaluation_model().state_dict()), second.average, rtol=0, atol=0)


def test_context_is_learned_and_the_published_network_is_fine_tuned(tmp_path, train_config):
    """Of the patches of the digits, 41 % have the most frequent colour; who knows the frequencies only has a loss of 1.76."""
    root = str(tmp_path)
    changes = {
        "recipe.masked_patches": {"target": "mean-color-3bit"},
        "recipe.model.patch_size_px": 4,
        "recipe.model.dropout_rate": 0.0,
        "recipe.optim.peak_lr": 3e-3,
        "execution.save_every_steps": 1000,
    }
    pretrained = finish(replace(train_config("masked", steps=200), **changes), root)
    curve = {(r.key, r.step): r.value for r in read_journal(pretrained)}
    assert curve["train/loss", 1] == pytest.approx(math.log(512), rel=1e-3)
    assert curve["val/loss", 200] < 1.65
    assert curve["val/patch_accuracy", 200] > 0.45
    assert not {key for key, _ in curve} & {"train/top1", "val/top1"}
    state = read_state(pretrained)
    assert "val_top1" not in state
    model = load_model(state["model"])
    assert "not trained" in model.provenance["head"]
    assert not model.network.head.weight.any()
    tuning = {"stage": "finetune", "init_model": state["model"], "recipe.model.patch_size_px": 4}
    tuned = read_state(finish(replace(train_config("tuned", steps=5), **tuning), root))
    assert tuned["val_examples"] == 200
    assert load_model(tuned["model"]).network.head.weight.any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": "sigmoid"}, "loss='sigmoid' has no effect with masked_patches"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 has no effect"),
        ({"model.pool": "map"}, "needs a Vision Transformer with pool=token or gap"),
        ({"model.pre_logits": True}, "without pre_logits"),
        ({"masked_patches.rate": 1.5}, "less than or equal to 1"),
    ],
)
def test_what_does_not_go_together_is_refused(recipe_of, changes, says):
    with pytest.raises(ValueError, match=says):
        replace(recipe_of(), **changes)


def test_recipes_without_it_keep_their_digests(tiny_recipe):
    assert "masked_patches" not in tiny_recipe.model_dump()
    assert TrainRecipe.model_validate(tiny_recipe.model_dump()) == tiny_recipe
