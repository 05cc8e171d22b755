"""Schedules at points worked out by hand; which parameters decay; the update, compared with the formula."""

import pytest
import torch

from vitline.infra.config import replace
from vitline.vit.config import OptimConfig
from vitline.vit.models.build import meta_network
from vitline.vit.models.config import BiTConfig, HybridConfig, ViTConfig
from vitline.vit.models.vit import VisionTransformer
from vitline.vit.training.optim import build_optimizer, is_decayed, set_lr, step_where_finite, uncompiled
from vitline.vit.training.schedule import lr_at


@pytest.mark.parametrize(
    ("schedule", "end_lr", "step", "expected"),
    [
        ("cosine", 0.0, 1, 0.1),  # warmup: 1 / 10 of the peak
        ("cosine", 0.0, 10, 1.0),
        ("cosine", 0.0, 60, 0.5),  # half way from 10 to 110
        ("cosine", 0.0, 110, 0.0),
        ("linear", 0.2, 35, 0.8),  # a quarter of the way from 1.0 to 0.2
        ("linear", 0.2, 110, 0.2),
    ],
)
def test_learning_rate_at_points_worked_out_by_hand(schedule, end_lr, step, expected):
    config = OptimConfig(peak_lr=1.0, warmup_steps=10, schedule=schedule, end_lr=end_lr)
    assert lr_at(step, config, total_steps=110) == pytest.approx(expected)


def test_staircase_schedule_divides_by_ten_after_each_milestone():
    config = OptimConfig(peak_lr=1.0, warmup_steps=100, schedule="staircase", milestones=(0.4, 0.6, 0.8))
    steps = {50: 0.5, 100: 1.0, 200: 1.0, 201: 0.1, 300: 0.1, 301: 0.01, 400: 0.01, 401: 0.001, 500: 0.001}
    assert {step: lr_at(step, config, total_steps=500) for step in steps} == pytest.approx(steps)
    with pytest.raises(ValueError, match="milestones"):
        OptimConfig(schedule="staircase")
    with pytest.raises(ValueError, match="milestones"):
        OptimConfig(milestones=(0.5,))


def test_a_cooldown_falls_to_zero_from_where_the_schedule_of_the_old_length_is():
    config = OptimConfig(peak_lr=1.0, warmup_steps=10, decay_steps=110, cooldown_steps=20)
    # Half way from 10 to 110 the cosine is at 0.5; from there to zero in 20 steps.
    steps = {10: 1.0, 60: 0.5, 65: 0.375, 70: 0.25, 80: 0.0}
    assert {step: lr_at(step, config, total_steps=80) for step in steps} == pytest.approx(steps)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"optim.cooldown_steps": 11},
            "optim.cooldown_steps=11 with optim.warmup_steps=2 are more than total_steps=12",
        ),
        ({"optim.decay_steps": 2}, "optim.decay_steps=2 must be more than optim.warmup_steps=2"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(tiny_recipe, changes, says):
    with pytest.raises(ValueError, match=says):
        replace(tiny_recipe, **changes)


def test_only_kernels_decay():
    model = VisionTransformer(
        ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=8, depth=1, num_heads=2, mlp_dim=16), 3
    )
    decayed = {name for name, p in model.named_parameters() if is_decayed(name, p)}
    assert decayed == {
        "patch_embed.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.fc1.weight",
        "blocks.0.fc2.weight",
        "head.weight",
    }


SMALL = {"image_size_px": 16, "embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_dim": 16}


@pytest.mark.parametrize(
    "config",
    [
        ViTConfig(patch_size_px=4, pool="map", pos_embed="relative", **SMALL),
        ViTConfig(patch_size_px=4, pos_embed="learned-2d", pos_embed_at="every-layer", pre_logits=True, **SMALL),
        HybridConfig(stages=(1,), **SMALL),
        BiTConfig(image_size_px=16, stages=(1,)),
    ],
)
def test_only_kernels_of_every_network_decay(config):
    named = dict(meta_network(config, 3).named_parameters())
    kernels = {name for name, p in named.items() if name.endswith(".weight") and p.ndim >= 2}
    assert {name for name, p in named.items() if is_decayed(name, p)} == kernels
    assert len(kernels) < len(named)


def test_decay_is_multiplied_by_the_learning_rate():
    """First step of Adam: p - lr * sign(g) - lr * wd * p. With g = 3, p = 2, lr = 0.1, wd = 0.5: 2 - 0.1 - 0.1."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 2.0)
    optimizer = build_optimizer(layer, OptimConfig(weight_decay=0.5))
    set_lr(optimizer, 0.1)
    layer.weight.grad = torch.full((1, 1), 3.0)
    optimizer.step()
    assert layer.weight.item() == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe"}),
    ],
)
def test_an_eager_optimizer_steps_bit_for_bit_as_that_of_torch(kind, options):
    def trained(optimizer_of):
        torch.manual_seed(0)
        model, images = torch.nn.Linear(6, 3), torch.randn(8, 6)
        optimizer = optimizer_of(model.parameters(), lr=0.1, **options)

        def closure():
            optimizer.zero_grad(set_to_none=True)
            loss = model(images).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
            optimizer.load_state_dict(optimizer.state_dict())
        assert torch.is_grad_enabled()
        return model.weight.detach(), optimizer

    (expected, _), (found, optimizer) = trained(kind), trained(uncompiled(kind))
    assert torch.equal(found, expected)
    assert isinstance(optimizer, kind)
    assert type(optimizer).__name__ == kind.__name__


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_that_are_not_finite_change_nothing_the_first_one_either(optimizer):
    """Bit for bit: weights, moments and the step count of an optimizer that never saw them."""
    gradients, results = [torch.randn(6, 5) for _ in range(2)], []
    for planted in ([], [torch.full((6, 5), torch.nan)]):
        layer = torch.nn.Linear(5, 6, bias=False)
        torch.nn.init.constant_(layer.weight, 0.5)
        chosen = build_optimizer(layer, OptimConfig(optimizer=optimizer, peak_lr=0.1, weight_decay=0.1))
        for gradient in [*planted, gradients[0], *planted, gradients[1]]:
            layer.weight.grad = gradient.clone()
            step_where_finite(chosen, gradient.sum().isfinite())
        results.append([layer.weight.detach(), *chosen.state[layer.weight].values()])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
