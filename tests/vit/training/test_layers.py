"""Layers by hand: their learning rates, what is frozen, the head first; resumed bit for bit, and refused where there are none."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitline.infra.config import digest_of, replace
from vitline.vit.checkpoints.state_tensors import load_state_tensors, state_tensors
from vitline.vit.config import OptimConfig
from vitline.vit.models.build import meta_network
from vitline.vit.models.config import BiTConfig, HybridConfig, UserNetworkConfig
from vitline.vit.models.flops import training_flops
from vitline.vit.models.network import normalised
from vitline.vit.training.layers import layer_of
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.schedule import lr_at
from vitline.vit.training.world import World

CPU = World()
SHARES = {
    "patch_embed": 0.125,
    "cls_token": 0.125,
    "pos_embed": 0.125,
    "blocks.0": 0.25,
    "blocks.1": 0.5,
    "norm": 1.0,
    "head": 1.0,
}
"""Of the tiny network, whose depth is 2, with a decay of one half."""


def trained(recipe, make_batch, steps, state=None):
    state = state or initial_state(recipe, 5, CPU.device)
    for step in range(state.step, steps):
        train_step(state, state.model, [make_batch(step)], recipe, CPU)
    return state


def weights(state):
    return {name: p.detach().clone() for name, p in state.model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_layer_decay_is_that_of_parameter_groups_by_hand(changed, make_batch, optimizer):
    # With a small epsilon Adam's step would be the sign of rounding noise, for keys' biases, which have no gradient.
    recipe = changed(layer_decay=0.5, optimizer=optimizer, clip_norm=None, eps=1e-3)
    state = trained(recipe, make_batch, 3)
    model, steps = initial_state(recipe, 5, CPU.device).model, (0.5, 1.0, lr_at(3, recipe.optim, 12) / 1e-2)
    groups = [
        {
            "params": [p],
            "share": next(share for start, share in SHARES.items() if name.startswith(start)),
            "weight_decay": 0.1 if name.endswith("weight") and p.ndim > 1 else 0.0,
        }
        for name, p in model.named_parameters()
    ]
    kind = {
        "adamw": lambda groups: torch.optim.AdamW(groups, eps=1e-3),
        "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    }[optimizer]
    reference = kind(groups)
    for step, height in enumerate(steps):
        batch = make_batch(step)
        reference.zero_grad()
        F.cross_entropy(model(normalised(batch.images)), batch.labels).backward()
        for group in reference.param_groups:
            group["lr"] = 1e-2 * height * group["share"]
        reference.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights(state)[name], p.detach(), rtol=1e-4, atol=1e-6, msg=name)


def test_layers_of_every_network():
    small = {"image_size_px": 16, "embed_dim": 8, "depth": 2, "num_heads": 2, "mlp_dim": 16}
    bit = BiTConfig(image_size_px=16, stages=(1, 2))
    hybrid = HybridConfig(stages=(1,), pool="map", pre_logits=True, **small)
    for config, expected in {
        bit: {"conv_root": 0, "stages.0.0": 1, "stages.1.0": 2, "stages.1.1": 3, "norm": 4, "head": 4},
        hybrid: {"patch_embed": 0, "pos_embed": 0, "resnet": 0, "blocks.0": 1, "blocks.1": 2, "norm": 3, "pool": 3,
                 "pre_logits": 3, "head": 3},
    }.items():  # fmt: skip
        for name, _ in meta_network(config, 3).named_parameters():
            assert layer_of(name, config) == next(layer for start, layer in expected.items() if name.startswith(start))
    assert layer_of("network.blocks.1.fc1.weight", hybrid) == 2
    assert (layer_of("mask_token", hybrid), layer_of("prediction_head.bias", hybrid)) == (0, 3)


@pytest.mark.parametrize(
    ("frozen", "trains"),
    [
        ("embeddings", ("blocks", "norm", "head")),
        (1, ("blocks.1", "norm", "head")),
        (2, ("norm", "head")),
        ("backbone", ("head",)),
    ],
)
def test_frozen_weights_stay_bit_for_bit_and_have_no_moments(changed, make_batch, frozen, trains):
    recipe = changed(frozen=frozen)
    before, state = weights(initial_state(recipe, 5, CPU.device)), trained(recipe, make_batch, 4)
    kept = {name.split("/")[1] for name in state_tensors(state) if name.startswith("optim/")}
    assert kept == {name for name in before if name.startswith(trains)}
    for name, value in weights(state).items():
        assert torch.equal(value, before[name]) != (name in kept), name
        if name not in kept:
            assert torch.equal(state.average[name], before[name])


def test_the_head_is_trained_first_as_if_the_others_were_frozen_and_then_all(changed, make_batch):
    recipe, probe = (
        changed(head_first_steps=3),
        changed(frozen="backbone", schedule="linear", end_lr=1e-2, warmup_steps=0),
    )
    before = weights(initial_state(recipe, 5, CPU.device))
    state, alone = trained(recipe, make_batch, 3), trained(probe, make_batch, 3)
    for name, value in weights(state).items():
        assert torch.equal(value, weights(alone)[name]), name
        assert torch.equal(value, before[name]) != name.startswith("head"), name
    # The first step of AdamW moves every weight by its learning rate: the half of a warmup of two steps.
    moved = weights(trained(recipe, make_batch, 4, state))["blocks.0.fc1.bias"] - before["blocks.0.fc1.bias"]
    assert moved.abs().max().item() == pytest.approx(5e-3, rel=1e-3)


def test_steps_of_the_head_alone_compute_no_other_gradients(changed, make_batch):
    recipe = changed(head_first_steps=1)
    state, batch = initial_state(recipe, 5, CPU.device), make_batch(0)
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            train_step(state, state.model, [batch], recipe, CPU)
        counts.append(counter.get_total_flops() / len(batch.images))
    head, whole = (training_flops(recipe.model, 5, frozen) for frozen in ("backbone", "none"))
    assert counts[0] == head < counts[1] <= whole


def test_the_schedule_begins_after_the_steps_of_the_head():
    config = OptimConfig(peak_lr=1.0, warmup_steps=10, head_first_steps=30)
    steps = {1: 1.0, 30: 1.0, 31: 0.1, 40: 1.0, 90: 0.5, 140: 0.0}
    assert {step: lr_at(step, config, total_steps=140) for step in steps} == pytest.approx(steps)
    cooled = replace(config, decay_steps=140, cooldown_steps=20)
    assert [lr_at(step, cooled, total_steps=110) for step in (90, 100, 110)] == pytest.approx([0.5, 0.25, 0.0])


@pytest.mark.parametrize("optim", [{"frozen": 1, "head_first_steps": 3, "layer_decay": 0.5}, {"frozen": "backbone"}])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_resumed_training_equals_the_uninterrupted_one(changed, make_batch, optim, optimizer, at):
    recipe = changed(optimizer=optimizer, **optim)
    whole, resumed = trained(recipe, make_batch, 6), initial_state(recipe, 5, CPU.device)
    stopped = state_tensors(trained(recipe, make_batch, at))
    load_state_tensors(resumed, {name: value.clone() for name, value in stopped.items()})
    resumed.step = at
    trained(recipe, make_batch, 6, resumed)
    for name, value in state_tensors(whole).items():
        assert torch.equal(state_tensors(resumed)[name], value), name


def test_defaults_change_no_digest(changed):
    recipe = changed()
    assert digest_of(changed(layer_decay=1.0, frozen="none", head_first_steps=0)) == digest_of(recipe)
    assert not {"layer_decay", "frozen", "head_first_steps"} & recipe.model_dump(mode="json")["optim"].keys()
    assert (
        len({digest_of(changed(**each)) for each in ({"layer_decay": 0.9}, {"frozen": 1}, {"head_first_steps": 1})})
        == 3
    )


OWN = UserNetworkConfig(network="lab.nets:Crow", image_size_px=8)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optim.frozen": 3}, r"optim.frozen=3 is more than the 2 blocks of the network, a Vision Transformer of width 16"),
        ({"optim.frozen": "head"}, "must be 'none', 'embeddings', 'backbone' or a number of blocks"),
        ({"optim.frozen": True}, "must be 'none', 'embeddings', 'backbone' or a number of blocks"),
        ({"optim.frozen": "backbone", "optim.layer_decay": 0.5}, "layer_decay=0.5 has no effect with frozen='backbone'"),
        ({"optim.frozen": "backbone", "optim.head_first_steps": 1}, "head_first_steps=1 has no effect with frozen='backbone'"),
        ({"optim.head_first_steps": 10}, "optim.head_first_steps=10 with optim.warmup_steps=2 must be less than total_steps=12"),
        ({"model": OWN, "optim.layer_decay": 0.5}, "layer_decay=0.5 needs a network whose layers are known, not a"),
        ({"model": OWN, "optim.frozen": "embeddings"}, "optim.frozen=embeddings needs a Vision Transformer or a hybrid"),
        ({"model": BiTConfig(image_size_px=8), "optim.frozen": 1}, "frozen=1 needs .* not a BiT ResNet: .*. Freeze the backbone"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_network_or_has_no_effect_is_refused(tiny_recipe, changes, says):
    with pytest.raises(ValueError, match=says):
        replace(tiny_recipe, **changes)


def test_a_network_of_a_user_can_be_probed(tiny_recipe):
    for optim in ({"optim.frozen": "backbone"}, {"optim.head_first_steps": 2}):
        replace(tiny_recipe, model=OWN, **optim)


def test_layers_of_bit_resnets_are_trained(tiny_recipe, make_batch):
    recipe = replace(
        tiny_recipe,
        **{"model": BiTConfig(image_size_px=8, stages=(1, 1)), "optim.head_first_steps": 1, "optim.layer_decay": 0.5},
    )
    before, state = weights(initial_state(recipe, 5, CPU.device)), trained(recipe, make_batch, 1)
    assert {name for name, value in weights(state).items() if not torch.equal(value, before[name])} == {
        "head.weight",
        "head.bias",
    }
    after = weights(trained(recipe, make_batch, 2, state))
    assert not torch.equal(after["conv_root.weight"], before["conv_root.weight"])
    assert {group["lr_share"] for group in state.optimizer.param_groups} == {0.125, 0.25, 0.5, 1.0}
