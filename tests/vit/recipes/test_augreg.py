"""AugReg's levels: the values of the paper, whole recipes, and some steps of training with each."""

import math

import pytest

from vitline.vit.models.config import BiTConfig
from vitline.vit.recipes import RECIPES, augreg
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.world import World

from ...batches import train_batches
from ..input.conftest import make_corpus

CPU = World()
# Layers and magnitude of RandAugment and MixUp's alpha: arXiv:2106.10270, Sec. 3.3, and big_vision's vit_i21k.py.
TABLE = """
light1   2  0 None
light2   2 10 0.2
medium1  2 15 0.2
medium2  2 15 0.5
strong1  2 20 0.5
strong2  2 20 0.8
"""
LEVELS = [line.split() for line in TABLE.split("\n") if line]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("augreg"))


@pytest.mark.parametrize(("level", "layers", "magnitude", "alpha"), LEVELS)
def test_a_level_has_the_values_of_the_paper_and_trains(corpus, tiny_recipe, level, layers, magnitude, alpha):
    recipe, _ = RECIPES[f"vit-b16-i21k-{level}"].make()
    for each in (recipe, augreg.at_level(tiny_recipe, level)):
        augment = each.input.augment
        assert (augment.randaugment_layers, augment.randaugment_magnitude) == (int(layers), float(magnitude))
        assert str(augment.mixup_alpha) == alpha
        assert augment.cutmix_alpha is None
    assert (recipe.loss, recipe.model.head_bias_init, recipe.model.is_stochastic) == ("sigmoid", -10.0, False)
    small = augreg.regularised(augreg.at_level(tiny_recipe, level))
    state = initial_state(small, 5, CPU.device)
    given = {"seed": 0, "micro_batch_size": 8, "num_steps": 2}
    for batches in train_batches(corpus.store, corpus.manifest, "train", small.input, **given):
        result = train_step(state, state.model, batches, small, CPU)
        assert result.grad_norm.isfinite()
        assert math.isfinite(float(result.loss_sum))


def test_levels_change_augmentation_only_and_none_undoes_them(tiny_recipe):
    strong = augreg.at_level(tiny_recipe, "strong2")
    assert augreg.at_level(strong, "none") == tiny_recipe
    assert strong.model_dump(exclude={"input"}) == tiny_recipe.model_dump(exclude={"input"})
    assert augreg.regularised(tiny_recipe).model.stochastic_depth_rate == 0.1


def test_what_a_network_or_level_lacks_is_refused(tiny_recipe):
    with pytest.raises(ValueError, match="There is no level 'medium' of AugReg"):
        augreg.at_level(tiny_recipe, "medium")
    resnet = type(tiny_recipe).model_validate(tiny_recipe.model_dump() | {"model": BiTConfig(image_size_px=8)})
    with pytest.raises(ValueError, match=r"dropout and stochastic depth, which .* does not have"):
        augreg.regularised(resnet)
