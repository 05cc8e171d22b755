"""Activation checkpointing: losses and weights bit for bit as without it; fewer activations are kept, and those products again or not."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitline.infra.config import replace
from vitline.vit.config import ExecutionConfig
from vitline.vit.models.config import BiTConfig, HybridConfig
from vitline.vit.models.recompute import recompute_blocks
from vitline.vit.training.loop import initial_state, train_step
from vitline.vit.training.parallel import wrap
from vitline.vit.training.world import World

NETWORKS = {
    "vit": {"model.stochastic_depth_rate": 0.3},
    "hybrid": {
        "model": HybridConfig(
            image_size_px=32,
            stages=(1,),
            embed_dim=16,
            depth=2,
            num_heads=2,
            mlp_dim=32,
            dropout_rate=0.1,
        ),
        "input.augment.image_size_px": 32,
    },
    "bit": {"model": BiTConfig(image_size_px=32, stages=(1, 1)), "input.augment.image_size_px": 32},
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_training_is_the_same_bit_for_bit(tiny_recipe, make_batch, network, mode):
    recipe = replace(tiny_recipe, **NETWORKS[network])

    def trained(mode):
        state = initial_state(recipe, 5, torch.device("cpu"))
        model = wrap(state.model, ExecutionConfig(activation_checkpointing=mode), World())
        losses = []
        for step in range(4):
            batch = replaced_images(make_batch(step), recipe.model.image_size_px)
            losses.append(float(train_step(state, model, [batch], recipe, World()).loss_sum))
        return losses, state.model.state_dict()

    (expected, weights), (losses, found) = trained("none"), trained(mode)
    assert losses == expected
    assert [*found] == [*weights]
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def replaced_images(batch, side_px):
    generator = torch.Generator().manual_seed(batch.first_slot)
    images = torch.randint(0, 256, (len(batch.labels), side_px, side_px, 3), dtype=torch.uint8, generator=generator)
    return type(batch)(**{**vars(batch), "images": images})


class Counted(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.ran[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def cost(recipe, mode):
    """Bytes that autograd keeps outside of blocks, and how often some operators run in the forward and the backward pass."""
    model = initial_state(recipe, 5, torch.device("cpu")).model
    recompute_blocks(model, "full")  # a second call replaces the first
    recompute_blocks(model, mode)
    kept = []

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    with Counted() as counted, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.rand(8, 3, 8, 8)).sum().backward()
    return sum(kept), counted.ran["addmm"], counted.ran["gelu"]


def test_what_is_kept_and_what_is_computed_again(tiny_recipe):
    depth = tiny_recipe.model.depth
    everything, products, gelus = cost(tiny_recipe, "none")
    kept, again, gelus_again = cost(tiny_recipe, "full")
    assert kept < everything / 3
    assert (again, gelus_again) == (products + 4 * depth, gelus + depth)  # qkv, out, fc1, fc2
    assert cost(tiny_recipe, "selective")[1:] == (products, gelus + depth)


def test_without_gradients_nothing_changes(tiny_recipe):
    model = initial_state(tiny_recipe, 5, torch.device("cpu")).model.eval()
    images = torch.rand(2, 3, 8, 8)
    with torch.inference_mode():
        expected = model(images)
        recompute_blocks(model, "full")
        assert torch.equal(model(images), expected)
