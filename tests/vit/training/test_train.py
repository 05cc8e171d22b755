"""The update, compared with an explicit reference; padding, guards, and resume."""

import dataclasses
import math
import time

import pytest
import torch
from torch.nn import functional as F

from vitline.infra.config import replace
from vitline.vit.checkpoints.state_tensors import load_state_tensors, state_tensors
from vitline.vit.config import ExecutionConfig
from vitline.vit.input.prefetch import WaitTimes
from vitline.vit.models.network import normalised
from vitline.vit.training.loop import Hook, forward, initial_state, train, train_step
from vitline.vit.training.world import World

from ...other_rounding import other_rounding

NUM_CLASSES = 5
CPU = World()


def weights(state):
    return {name: p.detach().clone() for name, p in state.model.named_parameters()}


def test_an_update_is_adamw_on_the_clipped_mean_gradient(tiny_recipe, make_batch):
    recipe = replace(tiny_recipe, **{"model.dropout_rate": 0.0, "optim.clip_norm": 0.05})
    state, batch = initial_state(recipe, NUM_CLASSES, CPU.device), make_batch(0)
    before = weights(state)
    images = batch.images.permute(0, 3, 1, 2).double() / 127.5 - 1
    reference = initial_state(recipe, NUM_CLASSES, CPU.device).model.double()
    F.cross_entropy(reference(images), batch.labels).backward()
    grads = {name: p.grad for name, p in reference.named_parameters()}
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))

    result = train_step(state, state.model, [batch], recipe, CPU)

    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-5)
    lr = 1e-2 / 2  # step 1 of 2 warmup steps
    for name, p in state.model.named_parameters():
        g = grads[name] * 0.05 / norm
        decay = 0.1 if p.ndim >= 2 and name not in ("pos_embed", "cls_token") else 0.0
        expected = before[name] * (1 - lr * decay) - lr * g / (g.abs() + 1e-8)
        moved = g.abs() > 1e-6  # where the gradient is rounding noise, Adam's first step is the sign of noise
        torch.testing.assert_close(p[moved], expected[moved].float(), rtol=1e-4, atol=1e-6)
    average = 0.9 * before["head.weight"] + 0.1 * state.model.head.weight
    torch.testing.assert_close(state.average["head.weight"], average)


def test_micro_batches_and_padding_change_an_update_by_rounding_only(tiny_recipe, make_batch):
    recipe = replace(tiny_recipe, **{"model.dropout_rate": 0.0})
    whole, split = (initial_state(recipe, NUM_CLASSES, CPU.device) for _ in range(2))
    for step in range(10):
        one = train_step(whole, whole.model, [make_batch(step)], recipe, CPU)
        parts = [make_batch(step, 3), make_batch(step, 3, start=3), make_batch(step, 2, start=6, padding=1)]
        several = train_step(split, split.model, parts, recipe, CPU)
        # vit/README.md, "What is equal, and how nearly": within 1e-5 at the first step, 1e-3 after fifty.
        assert float(several.loss_sum) == pytest.approx(float(one.loss_sum), rel=1e-5 if step == 0 else 2e-4)
        assert int(several.correct) == int(one.correct)


def test_mixed_batches_train_on_shares_of_both_labels_and_log_no_top1(tiny_recipe, make_batch):
    """The reference is the gradient of the loss with the mixed targets; micro-batches change it by rounding only."""
    recipe = replace(tiny_recipe, **{"model.dropout_rate": 0.0, "input.augment.mixup_alpha": 0.2, "total_steps": 3})
    partner, share = torch.tensor([1, 2, 3, 4, 0, 1, 2, 3]), torch.linspace(0.5, 1, 8)

    def part(start, size):
        mixed = {"mixed_labels": partner[start : start + size], "lam": share[start : start + size]}
        return dataclasses.replace(make_batch(0, size, start=start), **mixed)

    state, batch = initial_state(recipe, NUM_CLASSES, CPU.device), part(0, 8)
    logits = state.model(batch.images.permute(0, 3, 1, 2).float() / 127.5 - 1)
    targets = share[:, None] * F.one_hot(batch.labels, 5) + (1 - share[:, None]) * F.one_hot(partner, 5)
    expected = float(F.cross_entropy(logits.detach(), targets, reduction="sum"))
    for parts in ([part(0, 8)], [part(0, 3), part(3, 5)]):
        fresh, reports = initial_state(recipe, NUM_CLASSES, CPU.device), []
        train(
            fresh,
            iter([parts] * 3),
            recipe,
            ExecutionConfig(log_every_steps=1),
            CPU,
            report=lambda _, metrics, reports=reports: reports.append(metrics),
        )
        assert reports[0]["train/loss"] == pytest.approx(expected / 8, rel=1e-5)
        assert "train/top1" not in reports[0]


def test_rounding_of_another_processor_changes_losses_as_little_as_micro_batches(tiny_recipe, make_batch):
    recipe = replace(tiny_recipe, **{"model.dropout_rate": 0.0, "optim.peak_lr": 1e-3, "total_steps": 50})
    state, losses = initial_state(recipe, NUM_CLASSES, CPU.device), []
    elsewhere, others = initial_state(recipe, NUM_CLASSES, CPU.device), []
    for step in range(50):
        losses.append(float(train_step(state, state.model, [make_batch(step)], recipe, CPU).loss_sum))
        with other_rounding():
            others.append(float(train_step(elsewhere, elsewhere.model, [make_batch(step)], recipe, CPU).loss_sum))
    assert others != losses
    assert others[0] == pytest.approx(losses[0], rel=1e-5)
    assert others == pytest.approx(losses, rel=1e-3)


def test_initial_sigmoid_loss_follows_from_the_head_bias(tiny_recipe, make_batch):
    """K classes at bias -b: one label costs softplus(b), each absent one softplus(-b)."""
    recipe = replace(tiny_recipe, **{"model.head_bias_init": -3.0, "loss": "sigmoid"})
    state, batch = initial_state(recipe, NUM_CLASSES, CPU.device), make_batch(0)
    result = train_step(state, state.model, [batch], recipe, CPU)
    expected = 8 * (math.log1p(math.exp(3)) + 4 * math.log1p(math.exp(-3)))
    assert float(result.loss_sum) == pytest.approx(expected, rel=1e-5)


def test_non_finite_gradient_is_never_applied_and_ends_the_run_as_diverged(tiny_recipe, make_batch):
    state = initial_state(tiny_recipe, NUM_CLASSES, CPU.device)
    with torch.no_grad():
        state.model.head.bias[0] = math.nan
    before, reports = weights(state), []
    outcome = train(
        state,
        iter([[make_batch(step)] for step in range(12)]),
        tiny_recipe,
        ExecutionConfig(max_nonfinite_steps=2),
        CPU,
        report=lambda step, metrics: reports.append((step, metrics)),
        hooks=[Hook(1000, lambda _: pytest.fail("a diverged state must not be saved"), on_stop="run")],
    )
    assert outcome == "diverged"
    assert [m["guard/nonfinite_steps"] for _, m in reports] == [1, 2, 3]
    for name, value in weights(state).items():
        assert torch.equal(value, before[name]) or name == "head.bias"


@pytest.mark.parametrize("cut", [1, 5])
def test_resumed_training_equals_an_uninterrupted_one_bit_for_bit(tiny_recipe, make_batch, cut):
    """With dropout, decay, clipping and an average: the tensors and the step are the whole state of a run."""

    def run(state, start, losses):
        batches = ([make_batch(step)] for step in range(start, 12))
        train(
            state,
            batches,
            tiny_recipe,
            ExecutionConfig(log_every_steps=1),
            CPU,
            report=lambda step, m: losses.append((step, m["train/loss"])),
            stop_requested=lambda: "preempted" if start == 0 and state.step == cut else None,
        )

    uninterrupted, expected = initial_state(tiny_recipe, NUM_CLASSES, CPU.device), []
    for step in range(12):
        result = train_step(uninterrupted, uninterrupted.model, [make_batch(step)], tiny_recipe, CPU)
        expected.append((step + 1, float(result.loss_sum) / 8))

    first, losses = initial_state(tiny_recipe, NUM_CLASSES, CPU.device), []
    run(first, 0, losses)
    assert first.step == cut
    second = initial_state(replace(tiny_recipe, seed=99), NUM_CLASSES, CPU.device)
    load_state_tensors(second, {name: value.clone() for name, value in state_tensors(first).items()})
    second.step = cut
    run(second, cut, losses)
    assert losses == expected
    for name, value in state_tensors(uninterrupted).items():
        assert torch.equal(value, state_tensors(second)[name]), name


@pytest.mark.parametrize(
    ("stop", "on_cancel", "evaluated", "saved"),
    [
        (None, "checkpoint", [5, 10, 12], [4, 8, 12]),
        ("preempted", "checkpoint", [5], [4, 6]),
        ("cancelled", "checkpoint", [5], [4, 6]),
        ("cancelled", "discard", [5], [4]),
    ],
)
def test_hooks_run_at_their_interval_at_the_last_step_and_before_a_stop(
    tiny_recipe, make_batch, stop, on_cancel, evaluated, saved
):
    state, ran = initial_state(tiny_recipe, NUM_CLASSES, CPU.device), {"evaluate": [], "save": []}
    outcome = train(
        state,
        ([make_batch(step)] for step in range(12)),
        tiny_recipe,
        ExecutionConfig(on_cancel=on_cancel),
        CPU,
        report=lambda step, metrics: None,
        hooks=[
            Hook(5, lambda state: ran["evaluate"].append(state.step)),
            Hook(4, lambda state: ran["save"].append(state.step), on_stop="run"),
        ],
        stop_requested=lambda: stop if state.step == 6 else None,
    )
    assert outcome == (stop or "finished")
    assert ran == {"evaluate": evaluated, "save": saved}


def test_images_are_normalised_to_minus_one_and_one():
    pixels = normalised(torch.tensor([0, 255, 51], dtype=torch.uint8).repeat(1, 2, 2, 1))
    assert pixels[0, :, 0, 0].tolist() == pytest.approx([-1.0, 1.0, -0.6])
    assert pixels.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_network_gives_the_same_logits_for_bytes(tiny_recipe, make_batch, precision):
    """What is compiled takes bytes, so that normalisation can be part of the first kernel."""
    network = initial_state(tiny_recipe, NUM_CLASSES, CPU.device).model.eval()
    images = make_batch(0).images
    assert torch.equal(forward(network, images, precision), forward(network, normalised(images), precision))


def test_waits_for_data_are_reported_by_what_is_waited_for(tiny_recipe, make_batch):
    """At each step the input says that it has waited 1 ms for the store and 3 ms for decoding; the loop has waited longer."""
    recipe, reports, asked = replace(tiny_recipe, total_steps=4), [], []

    def batches():
        for step in range(4):
            time.sleep(0.006)
            asked.append(step)
            yield [make_batch(step)]

    train(
        initial_state(recipe, NUM_CLASSES, CPU.device),
        batches(),
        recipe,
        ExecutionConfig(log_every_steps=2),
        CPU,
        report=lambda step, metrics: reports.append(metrics),
        input_waits=lambda: WaitTimes(store_s=0.001 * len(asked), decode_s=0.003 * len(asked)),
    )
    assert len(reports) == 2
    for metrics in reports:
        store, decode, rest = (metrics[f"time/{part}_wait_fraction"] for part in ("store", "decode", "hand_over"))
        assert decode == pytest.approx(3 * store)
        assert rest > 0
        assert store + decode + rest == pytest.approx(metrics["time/data_wait_fraction"])
