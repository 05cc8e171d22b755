"""Branches: runs from a checkpoint of another run, which goes on, ends, or loses its checkpoints meanwhile."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitline.vit.training.loop as loop
from tests.vit.training.planted import plant
from vitline.infra.config import replace
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import read_state
from vitline.vit.checkpoints.manifest import open_checkpoint
from vitline.vit.checkpoints.names import Retention, checkpoint_steps, find_checkpoints, list_checkpoints
from vitline.vit.checkpoints.read import read_checkpoint
from vitline.vit.checkpoints.save import prune
from vitline.vit.published.models import adapt, load_model
from vitline.vit.run.branch import branches_of, pin_parent
from vitline.vit.run.resolved import resolve
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.guard.spike_guard import SpikeGuard
from vitline.vit.training.world import World

from ..trainings import losses_of

AVERAGED = {"recipe.average_decay": 0.9}


@pytest.fixture
def train(start):
    """train(config): the run after an attempt of one worker."""

    def make(config):
        run, attempt = start(config)
        TrainingRun(run, attempt, World()).execute()
        return run

    return make


@pytest.fixture
def parent_config(train_config):
    """Of 20 steps, with its checkpoints of steps 5, 10, 15 and 20 kept."""
    return replace(train_config("parent", save_every_steps=5, keep_checkpoints=4), **AVERAGED)


@pytest.fixture
def branch(start, parent_config):
    """branch(parent, step, allow, **changes): the config of a branch."""

    def make(parent, step=10, allow=(), **changes):
        of = {"run": parent.uri, "step": step, "allow": allow}
        return replace(parent_config, name="branch", parent=of, **changes)

    return make


def rates(run):
    return {record.step: record.value for record in read_journal(run) if record.key == "optim/lr"}


def after(values, step):
    return {at: value for at, value in values.items() if at > step}


def tensors(run, prefix):
    return read_checkpoint(run, open_checkpoint(run, prefix))


def test_a_branch_without_a_change_equals_the_continuation_of_its_parent_bit_for_bit(train, branch, parent_config):
    parent = train(parent_config)
    run = train(branch(parent))
    assert read_state(run)["state"] == "finished"
    assert losses_of(run) == after(losses_of(parent), 10)
    ours, theirs = (tensors(r, list_checkpoints(r)[0]) for r in (run, parent))
    assert {name.split("/")[0] for name in ours} == {"model", "average", "optim"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    models = [load_model(read_state(r)["model"]) for r in (run, parent)]
    assert models[0].digest == models[1].digest
    assert models[0].provenance["parent"] == f"{parent.uri.rpartition('/')[2]}@10"
    assert run.exists("inputs.png")


def test_another_learning_rate_shows_from_the_next_step_on(train, branch, parent_config):
    parent = train(parent_config)
    lower = {"recipe.optim.peak_lr": parent_config.recipe.optim.peak_lr / 2}
    run = train(branch(parent, allow=tuple(lower), **lower))
    ours, theirs = losses_of(run), after(losses_of(parent), 10)
    assert ours[11] == theirs[11]
    assert all(ours[step] != theirs[step] for step in range(13, 21))
    assert rates(run)[11] == pytest.approx(rates(parent)[11] / 2)


def test_a_cooldown_branch_falls_to_zero_from_where_the_parent_was(train, branch, parent_config):
    parent = train(parent_config)
    cooldown = {"recipe.total_steps": 14, "recipe.optim.decay_steps": 20, "recipe.optim.cooldown_steps": 4}
    run = train(branch(parent, allow=("recipe.total_steps", "recipe.optim"), **cooldown))
    begin = rates(parent)[10]
    assert rates(run) == pytest.approx({11: begin * 3 / 4, 12: begin / 2, 13: begin / 4, 14: 0})
    assert read_state(run)["images_seen"] == 14 * 16


def test_a_branch_that_is_stopped_resumes_from_its_own_checkpoint(train, start, branch, parent_config, stop_at):
    parent = train(parent_config)
    config = branch(parent, step=5)
    run, attempt = start(config)
    stop_at(3, run, attempt)
    assert checkpoint_steps(run) == [8]
    for key in parent.list("checkpoints/"):  # nothing of the parent is needed any more
        parent.delete(key)
    train(config)
    assert losses_of(run) == after(losses_of(parent), 5)


@pytest.mark.slow
def test_two_workers_branch_as_they_go_on_and_one_goes_on_from_the_checkpoint_of_two(
    train, start, branch, parent_config, tmp_path
):
    changes = {"execution.num_workers": 2, "recipe.model.dropout_rate": 0}
    parent, _ = start(replace(parent_config, **changes))
    run, _ = start(branch(parent, **changes))
    command = [sys.executable, str(Path(__file__).with_name("train_runs_together.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "meet"), parent.uri, run.uri], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    assert [process.communicate(timeout=800)[0] for process in ranks] == 2 * [b"finished\nfinished\n"]
    assert open_checkpoint(run, list_checkpoints(run)[0]).manifest["world_size"] == 2
    assert losses_of(run) == after(losses_of(parent), 10)
    alone = train(replace(branch(parent, **changes), name="alone", **{"execution.num_workers": 1}))
    assert losses_of(alone) == pytest.approx(losses_of(run), rel=1e-3)


def test_a_pinned_checkpoint_stays_until_the_branch_has_one_of_its_own(train, start, branch, parent_config):
    """The parent is at work: it saves step 20 and keeps only this one."""
    parent = train(parent_config)
    config = branch(parent, step=10)
    key = resolve(config, parent.uri.rpartition("/runs/")[0]).spec().run_key
    pin_parent(config.parent, key)
    prune(parent, Retention(1), newest=list_checkpoints(parent)[0])
    assert checkpoint_steps(parent) == [10, 20]
    assert branches_of(parent) == {key: 10}
    train(config)
    prune(parent, Retention(1), newest=list_checkpoints(parent)[0])
    assert checkpoint_steps(parent) == [20]
    assert branches_of(parent) == {key: 10}


def test_a_checkpoint_that_is_gone_is_refused_with_the_list_of_those_that_are_kept(train, start, branch, parent_config):
    parent = train(parent_config)
    (gone,) = (prefix for prefix in list_checkpoints(parent) if "000000010" in prefix)
    for key in parent.list(gone):
        parent.delete(key)
    says = r"has no checkpoint of step 10; it keeps those of steps 5, 15, 20 \(`vitline runs show parent-"
    before = parent.list()
    with pytest.raises(ValueError, match=says):
        pin_parent(branch(parent).parent, "branch-0123456789ab")
    assert parent.list() == before
    run = train(branch(parent))
    assert read_state(run)["state"] == "failed"
    assert re.search(says, read_state(run)["reason"])


def test_a_damaged_checkpoint_of_the_parent_is_not_marked_by_the_branch(train, branch, parent_config):
    parent = train(parent_config)
    (prefix,) = (prefix for prefix in list_checkpoints(parent) if "000000010" in prefix)
    (weights,) = (key for key in parent.list(prefix) if key.endswith(".safetensors"))
    data = bytearray(parent.read(weights))
    data[-1] ^= 1
    parent.write(weights, bytes(data))
    before = parent.list()
    run = train(branch(parent))
    assert read_state(run)["state"] == "failed"
    assert prefix in read_state(run)["reason"]
    assert parent.list() == before


@pytest.mark.parametrize(
    ("changes", "allow", "says"),
    [
        ({"recipe.optim.peak_lr": 0.5}, (), r"differs from that of parent-\w+ in recipe.optim.peak_lr: 0.001 -> 0.5\. Restore"),
        (
            {"recipe.optim.peak_lr": 0.5, "recipe.precision": "bfloat16", "recipe.total_steps": 30},
            ("recipe.total_steps",),
            r"in recipe.optim.peak_lr: 0.001 -> 0.5; recipe.precision: float32 -> bfloat16\. Restore",
        ),
        ({"recipe.model.depth": 3}, ("recipe",), "recipe.model.depth .* must stay 2, not 3: the checkpoint holds the weights"),
        ({"recipe.seed": 1}, ("recipe",), "recipe.seed .* must stay 0, not 1: the position in the reading order"),
        ({"recipe.optim.frozen": 1}, ("recipe",), "recipe.optim.frozen .* must stay .none., not 1: the checkpoint holds the moments"),
        ({"recipe.input.num_lanes": 2}, ("recipe",), "recipe.input.num_lanes .*: the position in the reading order"),
        ({"recipe.optim.optimizer": "sgd"}, ("recipe",), "recipe.optim.optimizer .*: the checkpoint holds the moments"),
        ({"recipe.average_decay": None}, ("recipe",), "recipe.average_decay .*: the checkpoint has averaged weights only"),
        ({"split": "val"}, ("recipe",), "The split of a branch of parent-.* must stay train, not val: the position"),
        ({}, ("recipe.optim.peak_lrr",), "allow names 'recipe.optim.peak_lrr', .* Did you mean 'recipe.optim.peak_lr'"),
    ],
)  # fmt: skip
def test_what_a_branch_may_not_change_is_refused_by_name(start, branch, parent_config, root, changes, allow, says):
    parent, _ = start(parent_config)
    with pytest.raises(ValueError, match=says):
        resolve(branch(parent, allow=allow, **changes), root).spec()


def test_the_key_of_a_branch_covers_parent_step_and_recipe(start, branch, parent_config, root):
    parent, _ = start(parent_config)
    other, _ = start(replace(parent_config, **{"recipe.label_smoothing": 0.1}))
    longer = {"recipe.total_steps": 30}
    configs = [
        replace(parent_config, name="branch"),
        branch(parent),
        branch(parent, step=15),
        branch(parent, allow=tuple(longer), **longer),
        branch(other, **{"recipe.label_smoothing": 0.1}),
    ]
    assert len({resolve(config, root).spec().run_key for config in configs}) == len(configs)
    scored = branch(parent, val_split="test", allow=("recipe.optim",), **{"execution.num_workers": 2})
    assert resolve(scored, root).spec().inputs["parent"] == f"{parent.uri.rpartition('/')[2]}@10"


def test_a_length_that_ends_before_the_checkpoint_is_refused(start, branch, parent_config):
    parent, _ = start(parent_config)
    with pytest.raises(
        ValueError, match=r"recipe.total_steps=10 must be more than 10, the step of the parent's checkpoint"
    ):
        branch(parent, **{"recipe.total_steps": 10})


@pytest.fixture
def pretrained(train, train_config):
    return load_model(read_state(train(train_config("source", steps=4)))["model"])


def initial(start, config):
    run, attempt = start(config)
    return TrainingRun(run, attempt, World()).start.newest()


def test_a_pre_training_from_weights_begins_with_them(start, train_config, pretrained, root, two_corpora):
    """All of them for the same classes; a new head for others. The optimizer and the averages begin anew."""
    from vitline.data_prep.find_corpus import Corpora
    from vitline.infra.storage import open_store

    config = replace(train_config("again"), init_model=pretrained.uri, **AVERAGED)
    state, weights = initial(start, config), pretrained.network.state_dict()
    assert state.step == 0
    assert not any(value.any() for moments in state.optimizer.state.values() for value in moments.values())
    for found in (state.model.state_dict(), state.average):
        assert all(torch.equal(found[name], value) for name, value in weights.items())
    birds = Corpora(open_store(two_corpora)).find("birds").store.uri
    other = replace(config, corpus=birds, **{"recipe.input.num_lanes": 1, "recipe.seed": 3})
    found = initial(start, other).model.state_dict()
    assert found["head.weight"].shape[0] == 2
    assert all(torch.equal(found[name], value) for name, value in weights.items() if not name.startswith("head."))
    plain = train_config("again")
    keys = {resolve(c, root).spec().run_key for c in (plain, replace(plain, init_model=pretrained.uri))}
    assert len(keys) == 2


def test_fine_tuning_from_a_model_has_a_new_head_as_before(start, train_config, pretrained):
    config = replace(train_config("tuned"), stage="finetune", init_model=pretrained.uri)
    found = initial(start, config).model.state_dict()["head.weight"]
    assert not torch.equal(found, pretrained.network.state_dict()["head.weight"])
    assert found.equal(adapt(pretrained.network, config.recipe.model, 10).state_dict()["head.weight"])


def test_a_branch_goes_back_to_its_parents_checkpoint_which_stays_pinned_until_then(
    train, branch, parent_config, monkeypatch
):
    """The spike at step 17 leaves out the updates from 15 on; the branch's only checkpoint before it is that of step 15."""
    parent = train(parent_config)
    guard = {"action": "rewind", "rewind_steps": 2, "window_steps": 8}
    config = branch(parent, allow=("recipe.spike_guard",), **{"recipe.spike_guard": guard})
    key = resolve(config, parent.uri.rpartition("/runs/")[0]).spec().run_key
    pin_parent(config.parent, key)
    monkeypatch.setattr(loop, "batch_targets", plant({17}))
    run = train(config)
    state = read_state(run)
    assert (state["state"], state["spikes"]) == ("finished", [17])
    pins = find_checkpoints(parent.list("checkpoints/")).pins
    assert not pins, "the checkpoint of step 20 can be gone back from to 15"

    monkeypatch.setattr(SpikeGuard, "skips", lambda self, step: 15 <= step <= 19)
    other = train(replace(config, name="never-saw-it"))
    ours, theirs = (tensors(each, list_checkpoints(each)[0]) for each in (run, other))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
