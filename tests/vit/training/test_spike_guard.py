"""Planted spikes: a guarded training equals, bit for bit, one that never saw the steps that it leaves out."""

import math

import pytest
import torch
from pydantic import ValidationError

import vitline.vit.training.loop
from vitline.infra.config import digest_of, replace
from vitline.vit.checkpoints.state_tensors import load_state_tensors, state_tensors
from vitline.vit.config import ExecutionConfig, SpikeGuardConfig
from vitline.vit.training.guard.spike_guard import SpikeGuard
from vitline.vit.training.loop import initial_state, train, train_step
from vitline.vit.training.world import World

from .planted import plant

CPU = World()


@pytest.fixture
def guarded(tiny_recipe):
    return replace(tiny_recipe, **{"total_steps": 24, "spike_guard": {"action": "skip", "window_steps": 8}})


def trained(recipe, make_batch, state=None, until=None, **hooks):
    """State, outcome and reports of a training, from `state` and up to a step."""
    state, reports = state or initial_state(recipe, 5, CPU.device), []
    outcome = train(
        state,
        ([make_batch(step)] for step in range(state.step, recipe.total_steps)),
        recipe,
        ExecutionConfig(log_every_steps=1),
        CPU,
        report=lambda step, metrics: reports.append((step, metrics)),
        stop_requested=lambda: "preempted" if state.step == until else None,
        **hooks,
    )
    return state, outcome, reports


def assert_equal(one, other):
    tensors = state_tensors(other)
    assert all(torch.equal(value, tensors[name]) for name, value in state_tensors(one).items())
    assert one.step == other.step


def test_a_spike_moves_nothing_and_is_reported_with_its_batch(guarded, make_batch, monkeypatch):
    """The reference goes past the planted step by hand. Weights, moments and average are compared, and the window."""
    seen = []
    monkeypatch.setattr(vitline.vit.training.loop, "batch_targets", plant({13}))
    found, outcome, reports = trained(guarded, make_batch, seen_spike=lambda *spike: seen.append(spike))

    reference, losses = initial_state(tiny := replace(guarded, spike_guard={}), 5, CPU.device), []
    for step in range(24):
        if step == 12:
            reference.step += 1
        else:
            losses.append(float(train_step(reference, reference.model, [make_batch(step)], tiny, CPU).loss_sum) / 8)
    assert outcome == "finished"
    assert_equal(found, reference)
    assert list(found.guard.losses) == losses[-8:]

    (at_spike, *_) = [metrics for step, metrics in reports if step == 13]
    assert at_spike["guard/loss"] > at_spike["guard/loss_limit"]
    assert at_spike["guard/spikes"] == 1
    (spike, batches, example_losses) = seen[0]
    assert (spike["step"], spike["first"], spike["last"]) == (13, 13, 13)
    assert torch.equal(batches[0].images, make_batch(12).images)
    assert float(torch.cat(example_losses).mean()) == pytest.approx(spike["loss"], rel=1e-6)


@pytest.mark.parametrize("cut", [12, 13, 15])
def test_a_resumed_training_decides_as_the_uninterrupted_one(guarded, make_batch, monkeypatch, cut):
    """A spike, and one at a step that only the restored window can tell; with a lowered learning rate afterwards."""
    recipe = replace(guarded, **{"spike_guard.lr_factor": 0.5, "spike_guard.lr_steps": 4})
    monkeypatch.setattr(vitline.vit.training.loop, "batch_targets", plant({13, 16}))
    whole, _, reports = trained(recipe, make_batch)
    assert [spike["step"] for spike in whole.guard.spikes] == [13, 16]
    plain = {step: m["optim/lr"] for step, m in trained(replace(recipe, spike_guard={}), make_batch)[2]}
    factors = {step: m["optim/lr"] / plain[step] for step, m in reports if "optim/lr" in m and plain[step]}
    assert [step for step, factor in factors.items() if factor == 0.5] == [*range(14, 21)]
    assert {*factors.values()} == {0.5, 1.0}

    first, _, _ = trained(recipe, make_batch, until=cut)
    second = initial_state(replace(recipe, seed=99), 5, CPU.device)
    load_state_tensors(second, {name: value.clone() for name, value in state_tensors(first).items()})
    second.step = cut
    second.guard.load(first.guard.record())
    trained(recipe, make_batch, second)
    assert_equal(second, whole)
    assert second.guard.record() == whole.guard.record()


def test_too_many_spikes_end_the_run_as_diverged_and_say_where_and_what_to_change(guarded, make_batch, monkeypatch):
    recipe = replace(guarded, **{"spike_guard.max_spikes": 2, "spike_guard.max_spikes_steps": 5})
    monkeypatch.setattr(vitline.vit.training.loop, "batch_targets", plant({8, 14, 16, 18}))
    state, outcome, _ = trained(recipe, make_batch)
    assert (outcome, state.step) == ("diverged", 18)
    reason = state.guard.reason(18)
    assert "3 spikes of the loss or gradient norm in 5 steps, at the steps 14, 16, 18, but" in reason
    assert "recipe.spike_guard.max_spikes=2" in reason
    assert "recipe.optim.peak_lr" in reason


def test_median_and_spread_judge_loss_and_gradient_norm_and_spikes_stay_out_of_the_window():
    """Median 3, MAD 1: the limit is 3 + 10 * 1.4826 = 17.826. A window with a spike in it would hide the second one."""
    guard = SpikeGuard(SpikeGuardConfig(action="skip", window_steps=10))
    for value in (1.0, 2.0, 3.0, 4.0):
        assert guard.judge(1, value, value * 1e9) is None
    assert guard.limits() == (math.inf, math.inf)
    assert guard.judge(5, 5.0, 5.0) is None
    assert guard.limits()[0] == pytest.approx(17.826)
    assert guard.judge(6, 17.9, 3.0)
    assert guard.judge(7, 17.9, 3.0)
    assert guard.judge(8, 3.0, 1e12)
    assert guard.judge(9, math.nan, 1.0) is None  # a step of bad examples only
    assert list(guard.losses) == [1, 2, 3, 4, 5]


def test_without_a_guard_digests_stay_and_settings_without_effect_are_refused(tiny_recipe):
    assert "spike_guard" not in tiny_recipe.model_dump()
    assert digest_of(replace(tiny_recipe, **{"spike_guard.action": "skip"})) != digest_of(tiny_recipe)
    for changes, message in (
        ({"threshold": 5.0}, r"spike_guard\.threshold=5\.0 has no effect with spike_guard\.action='off'"),
        (
            {"action": "skip", "rewind_steps": 7},
            r"spike_guard\.rewind_steps=7 has no effect with spike_guard\.action='skip'",
        ),
        ({"action": "skip", "lr_factor": 0.5}, r"lr_factor=0\.5 with spike_guard\.lr_steps=0 has no effect"),
    ):
        with pytest.raises(ValidationError, match=message):
            SpikeGuardConfig(**changes)
