"""Recipes of other papers: the values of their tables, and each small enough to take some steps."""

import math
from types import SimpleNamespace

import pytest

from vitline.flows.cli.groups.pretrain import header_fields
from vitline.infra.config import replace
from vitline.vit.models.config import BiTConfig
from vitline.vit.models.masked_patches import MaskedPatchModel
from vitline.vit.recipes import RECIPES
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.world import World

from ...batches import train_batches
from ..input.conftest import make_corpus

CPU = World()
TRANSFORMER = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_dim": 32, "patch_size_px": 4, "image_size_px": 16}
SMALL = {
    "vit-s16-plain-imagenet": TRANSFORMER,
    "vit-b16-masked-patches-jft": TRANSFORMER,
    "bit-r152x4-jft": {"stages": (1, 1), "width_factor": 1, "image_size_px": 16},
}


def recipe(name):
    return RECIPES[name].make()[0]


@pytest.mark.parametrize("name", RECIPES)
def test_each_says_what_is_expected_of_it_and_what_it_costs(name):
    fields = header_fields(RECIPES[name].header)
    assert list(fields) == ["expected", "source", "hardware", "cost"]
    assert all(fields.values())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> SimpleNamespace:
    return make_corpus(tmp_path_factory.mktemp("recipes"))


@pytest.mark.parametrize("name", SMALL)
def test_each_takes_some_steps_as_a_small_network(corpus, name):
    changes = {f"model.{field}": value for field, value in SMALL[name].items()}
    changes |= {
        "input.augment.image_size_px": 16,
        "input.global_batch_size": 8,
        "input.num_lanes": 2,
        "precision": "float32",
    }
    small = replace(recipe(name), **changes)
    state = initial_state(small, 5, CPU.device)
    for batches in train_batches(
        corpus.store, corpus.manifest, "train", small.input, seed=0, micro_batch_size=8, num_steps=2
    ):
        result = train_step(state, state.model, batches, small, CPU)
        assert result.grad_norm.isfinite()
        assert math.isfinite(float(result.loss_sum))
    assert isinstance(state.model, MaskedPatchModel) == ("masked" in name)


def test_plain_vit_has_the_values_of_its_paper():
    """arXiv:2205.01580, Sec. 3 and big_vision's vit_s16_i1k.py: 90 epochs of 99 % of ImageNet in batches of 1024 are 111,476 steps."""
    plain = recipe("vit-s16-plain-imagenet")
    assert plain.total_steps == 111_476
    assert (plain.model.pool, plain.model.pos_embed, plain.loss) == ("gap", "sincos-2d", "softmax")
    augment = plain.input.augment
    assert (augment.randaugment_layers, augment.randaugment_magnitude, augment.mixup_alpha) == (2, 10, 0.2)


def test_bit_l_falls_after_its_epochs():
    """arXiv:1912.11370, Sec. 3.1: rate 0.03 for each 256 images; 40 epochs, falls after 10, 23, 30 and 37."""
    bit = recipe("bit-r152x4-jft")
    assert isinstance(bit.model, BiTConfig)
    assert (bit.model.width_factor, bit.model.stages, bit.optim.peak_lr) == (4, (3, 8, 36, 3), 0.48)
    assert [40 * at for at in bit.optim.milestones] == [10, 23, 30, 37]


def test_masked_patches_has_the_values_of_the_paper():
    """arXiv:2010.11929, App. B.1.2."""
    masked = recipe("vit-b16-masked-patches-jft")
    assert (masked.total_steps, masked.input.global_batch_size) == (1_000_000, 4096)
    assert (masked.optim.peak_lr, masked.optim.warmup_steps, masked.optim.schedule) == (2e-4, 10_000, "cosine")
    assert (masked.masked_patches.rate, masked.masked_patches.target) == (0.5, "mean-color-3bit")
