"""The micro-batch `auto`, on a GPU whose memory is a formula: there is none here."""

import pytest
import torch

from vitline.infra.config import replace
from vitline.vit.config import ExecutionConfig
from vitline.vit.cost import micro_batch
from vitline.vit.cost.micro_batch import micro_batch_that_fits, peak_bytes
from vitline.vit.models.recompute import blocks_of
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.world import World

CPU, GPU = World(), World(device=torch.device("cuda"))
AUTO = ExecutionConfig(micro_batch_size="auto")


class Others(World):
    """Another rank has room for 40 examples."""

    def gather(self, text):
        return [text, "40"]


@pytest.fixture
def state(tiny_recipe):
    return initial_state(tiny_recipe, 5, CPU.device)


@pytest.fixture
def gpu(monkeypatch, state):
    """gpu(examples): of its memory FRACTION has room for weights, gradients, moments and so many examples of a megabyte."""

    def room_for(examples):
        weights = sum(p.nbytes for p in state.model.parameters())
        monkeypatch.setattr(micro_batch, "peak_bytes", lambda state, recipe, world, n: 4 * weights + n * 10**6)
        bytes_needed = 4 * weights + examples * 10**6
        monkeypatch.setattr(micro_batch, "memory_bytes", lambda device: bytes_needed / micro_batch.FRACTION + 1)

    return room_for


def test_as_many_examples_as_fit_beside_weights_and_moments(state, gpu, tiny_recipe):
    recipe = replace(tiny_recipe, **{"input.global_batch_size": 4096})
    gpu(examples=100)
    assert micro_batch_that_fits(state, recipe, AUTO, GPU) == 100
    assert micro_batch_that_fits(state, recipe, AUTO, Others(device=GPU.device)) == 40
    assert micro_batch_that_fits(state, tiny_recipe, AUTO, GPU) == 8, "the whole batch"
    assert micro_batch_that_fits(state, recipe, replace(AUTO, micro_batch_size=300), GPU) == 300
    assert micro_batch_that_fits(state, recipe, AUTO, CPU) == 64
    full = replace(AUTO, activation_checkpointing="full")
    micro_batch_that_fits(state, recipe, full, GPU)
    assert all("forward" in vars(block) for block in blocks_of(state.model)), (
        "measured without activation checkpointing"
    )


def test_a_gpu_without_room_for_one_example_is_an_error_with_next_steps(state, gpu, tiny_recipe):
    gpu(examples=0)
    with pytest.raises(ValueError, match=r"Not one example fits .*0\.001 GB for each.*activation_checkpointing=full"):
        micro_batch_that_fits(state, tiny_recipe, AUTO, GPU)


def test_measuring_changes_neither_weights_nor_moments(state, tiny_recipe, make_batch, monkeypatch):
    train_step(state, state.model, [make_batch(0)], tiny_recipe, CPU)
    before = [p.detach().clone() for p in state.model.parameters()]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    assert peak_bytes(state, tiny_recipe, CPU, 4) == 7
    for p, value in zip(state.model.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert p.grad is None
    assert state.step == 1
