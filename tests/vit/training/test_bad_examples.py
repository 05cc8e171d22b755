"""Bad examples have no part in an update or a metric; they are named once and counted, and too many end the training."""

import logging
import math
from dataclasses import replace as changed

import pytest
import torch
from torch.nn import functional as F

from vitline.infra.config import replace
from vitline.vit.config import ExecutionConfig
from vitline.vit.training.bad_examples import BadExamples
from vitline.vit.training.loop import Hook, initial_state, train, train_step
from vitline.vit.training.optim import set_lr
from vitline.vit.training.schedule import lr_at
from vitline.vit.training.world import World

NUM_CLASSES = 5
CPU = World()


@pytest.fixture
def recipe(tiny_recipe):
    return replace(tiny_recipe, **{"model.dropout_rate": 0.0, "total_steps": 12})


def masked(batch, *rows):
    """The batch as `source_batches` returns it if these rows cannot be decoded."""
    images, valid = batch.images.clone(), batch.valid.clone()
    images[list(rows)], valid[list(rows)] = 0, False
    return changed(batch, images=images, valid=valid, bad=[(i, f"shard, row {i}: corrupt") for i in reversed(rows)])


def test_an_update_is_that_of_the_other_examples_each_with_its_weight_of_one_in_b(recipe, make_batch):
    """The reference never sees the bad example and knows nothing of masks."""
    state = initial_state(recipe, NUM_CLASSES, CPU.device)
    reference = initial_state(recipe, NUM_CLASSES, CPU.device)
    reports, batches = [], [masked(make_batch(0), 3), make_batch(1), masked(make_batch(2), 0, 7), make_batch(3)]
    execution = ExecutionConfig(log_every_steps=1)
    train(
        state,
        iter([[b] for b in batches] * 3),
        recipe,
        execution,
        CPU,
        report=lambda _, m: reports.append(m),
        bad=BadExamples(1e-4),
    )
    for step in range(12):
        batch = batches[step % 4]
        images = batch.images[batch.valid].permute(0, 3, 1, 2).float() / 127.5 - 1
        logits = reference.model(images)
        hits = logits.argmax(dim=1) == batch.labels[batch.valid]
        loss = F.cross_entropy(logits, batch.labels[batch.valid], reduction="sum")
        mean = float(loss.detach()) / batch.num_valid
        assert reports[step]["train/loss"] == pytest.approx(mean, rel=1e-5 if step == 0 else 1e-3)
        assert reports[step]["train/top1"] == float(hits.sum()) / batch.num_valid
        (loss / 8).backward()
        with torch.no_grad():
            apply_gradients(reference, recipe, step + 1)
    assert [m["input/bad_examples"] for m in reports] == [1, 1, 3, 3, 4, 4, 6, 6, 7, 7, 9, 9]


def apply_gradients(state, recipe, step):
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), recipe.optim.clip_norm)
    set_lr(state.optimizer, lr_at(step, recipe.optim, recipe.total_steps))
    state.optimizer.step()
    state.optimizer.zero_grad()


def test_the_split_of_a_batch_with_bad_examples_changes_an_update_by_rounding_only(recipe, make_batch):
    whole, split = (initial_state(recipe, NUM_CLASSES, CPU.device) for _ in range(2))
    one = train_step(whole, whole.model, [masked(make_batch(0), 2, 4)], recipe, CPU)
    parts = [masked(make_batch(0, 3), 2), masked(make_batch(0, 3, start=3), 1), make_batch(0, 2, start=6, padding=1)]
    several = train_step(split, split.model, parts, recipe, CPU)
    assert float(several.loss_sum) == pytest.approx(float(one.loss_sum), rel=1e-5)
    assert float(several.grad_norm) == pytest.approx(float(one.grad_norm), rel=1e-5)
    assert (several.num_valid, int(several.correct)) == (one.num_valid, int(one.correct)) == (6, int(one.correct))


def test_a_step_of_bad_examples_only_has_no_loss_and_no_gradient(recipe, make_batch):
    state, reports = initial_state(recipe, NUM_CLASSES, CPU.device), []
    batches = iter([[masked(make_batch(step), *range(8))] for step in range(12)])
    execution, report = ExecutionConfig(log_every_steps=1), lambda step, metrics: reports.append(metrics)
    assert train(state, batches, recipe, execution, CPU, report=report, bad=BadExamples(1.0)) == "finished"
    assert all(math.isnan(m["train/loss"]) and m["optim/grad_norm"] == 0 for m in reports)


def test_each_is_named_once_in_the_log(recipe, make_batch, caplog):
    state, batches = initial_state(recipe, NUM_CLASSES, CPU.device), [[masked(make_batch(0), 1, 6)]] * 4
    bad = BadExamples(1e-4)
    with caplog.at_level(logging.WARNING):
        train(state, iter(batches), replace(recipe, total_steps=4), ExecutionConfig(), CPU, report=print, bad=bad)
    assert [r.getMessage().rsplit(": shard, ")[1] for r in caplog.records] == ["row 1: corrupt", "row 6: corrupt"]
    assert bad.count == 8


@pytest.mark.parametrize(("max_fraction", "fails_at"), [(0.0, 1), (1e-4, 6), (1 / 4, None)])
def test_too_many_end_the_training_before_a_hook_saves_it(recipe, make_batch, max_fraction, fails_at):
    """Two of the 8 examples of each step are bad; ten are allowed in an epoch."""
    state, saved = initial_state(recipe, NUM_CLASSES, CPU.device), []
    bad = BadExamples(max_fraction, num_rows=1000)
    outcome = train(
        state,
        iter([[masked(make_batch(step), 0, 1)] for step in range(12)]),
        recipe,
        ExecutionConfig(),
        CPU,
        report=lambda step, metrics: None,
        hooks=[Hook(1, lambda state: saved.append(state.step), on_stop="run")],
        bad=bad,
    )
    assert (outcome, state.step) == (("finished", 12) if fails_at is None else ("failed", fails_at))
    assert saved == list(range(1, fails_at or 13))
    assert f"{2 * state.step} of the {8 * state.step} examples" in bad.reason(CPU)


@pytest.mark.parametrize(("num_bad", "too_many"), [(1, False), (10, False), (11, True)])
def test_a_few_bad_images_of_a_small_corpus_never_end_a_training(num_bad, too_many):
    bad = BadExamples(1e-4, num_rows=100)
    for _ in range(1000):
        bad.add(num_bad, 100)
        assert bad.too_many == too_many


def test_reason_names_count_limit_first_examples_and_next_step(make_batch):
    bad = BadExamples(1e-4, num_rows=1_000_000)
    for step in range(40):
        bad.add(bad.name([masked(make_batch(step), 0, 1, 2, 5)]), 4096)
    assert bad.reason(CPU).startswith(
        "160 of the 163,840 examples read since the workers started cannot be decoded, but execution.max_bad_fraction=0.0001 "
        "allows 16 of so many. The first are: shard, row 0: corrupt; shard, row 1: corrupt; shard, row 2: corrupt. "
        "`vitline data verify NAME --pixels`"
    )
