"""Back to a checkpoint before a spike."""

import pytest
import torch

from tests.vit.unleased import Unleased
from vitline.infra.config import replace
from vitline.infra.runs.lease import LeaseLost
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.manifest import CannotResume
from vitline.vit.checkpoints.names import Retention, list_checkpoints
from vitline.vit.checkpoints.restore import rewind
from vitline.vit.checkpoints.save import CheckpointSaver
from vitline.vit.checkpoints.state_tensors import state_tensors
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.world import World

CPU = World()


@pytest.fixture
def saved(tiny_recipe, make_batch, tmp_path):
    """The store of a run, its state after 12 steps with a spike there that leaves out steps 9 to 15, a copy of the tensors after
    each step; checkpoints of the steps 4, 8 and 11."""
    recipe = replace(tiny_recipe, spike_guard={"action": "rewind", "rewind_steps": 3, "window_steps": 32})
    run, state, after = open_store(str(tmp_path)), initial_state(recipe, 5, CPU.device), {}
    saver = CheckpointSaver(Unleased(run, 1), CPU, Retention(9))
    for step in range(1, 13):
        train_step(state, state.model, [make_batch(step)], recipe, CPU)
        after[step] = {name: value.clone() for name, value in state_tensors(state).items()}
        if step in (4, 8, 11):
            saver.save(state, {"save_id": str(step), "images_seen": 0})
            saver.wait()
    state.guard.spikes.append(
        {"step": 12, "first": 9, "last": 15, "loss": 9.0, "loss_limit": 1.0, "grad_norm": 1.0, "grad_norm_limit": 2.0}
    )
    return run, state, after, lambda: initial_state(recipe, 5, CPU.device)


def steps(run):
    return [int(prefix[17:26]) for prefix in list_checkpoints(run)]


def test_the_newest_checkpoint_before_the_first_step_is_restored_and_later_ones_go(saved):
    run, state, after, initial = saved
    rewind(run, state, initial, CPU)
    assert state.step == 8
    assert all(torch.equal(value, after[8][name]) for name, value in state_tensors(state).items())
    assert len(state.guard.losses) == 8
    assert [spike["step"] for spike in state.guard.spikes] == [12]
    assert not [key for key in run.list("checkpoints/") if "000011" in key]


def test_a_damaged_checkpoint_is_passed_over_and_without_a_whole_one_nothing_is_deleted(saved):
    run, state, _, initial = saved
    for prefix, reached in (("checkpoints/step-000000008-a1", 4), ("checkpoints/step-000000004-a1", None)):
        (key,) = [key for key in run.list(f"{prefix}/") if key.endswith(".safetensors")]
        run.write(key, run.read(key)[:-8] + b"8 bytes.")
        if reached:
            rewind(run, state, initial, CPU)
            assert state.step == reached
        else:
            with pytest.raises(CannotResume, match=r"None of the 2 checkpoints of .* before step 9, .*action=skip"):
                rewind(run, state, initial, CPU)
    assert steps(run) == [8, 4]


def test_an_attempt_without_its_lease_deletes_nothing(saved):
    def lost():
        raise LeaseLost("another attempt")

    run, state, _, initial = saved
    with pytest.raises(LeaseLost):
        rewind(run, state, initial, CPU, lost)
    assert steps(run) == [11, 8, 4]


def test_pruning_keeps_a_checkpoint_to_go_back_to(saved, tiny_recipe, make_batch):
    """With one to keep, and 3 steps to go back from any later spike: 8 stays beside 11."""
    run, state, _, _ = saved
    saver = CheckpointSaver(Unleased(run, 1), CPU, Retention(1, rewind_steps=3))
    saver.save(state, {"save_id": "12", "images_seen": 0})
    saver.wait()
    assert steps(run) == [12, 8]
