"""Activations by count, without memory, against those that a real forward pass keeps."""

import pytest
import torch

from vitline.vit.cost.memory import activation_bytes, num_frozen_weights, num_weights
from vitline.vit.models.build import build_network
from vitline.vit.models.config import BiTConfig, ViTConfig
from vitline.vit.models.recompute import recompute_blocks
from vitline.vit.models.variants import network_variant

SMALL = ViTConfig(image_size_px=32, patch_size_px=8, embed_dim=64, depth=4, num_heads=2, mlp_dim=128)


def real_bytes(config, num_examples, bfloat16, checkpointing):
    """Bytes of activations that a real forward pass keeps for its examples."""
    network, found = build_network(config, 1000).train(), {}
    recompute_blocks(network, checkpointing)
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bfloat16),
    ):
        network(torch.zeros(num_examples, 3, config.image_size_px, config.image_size_px))
    return sum(storage.nbytes() for pointer, storage in found.items() if pointer not in weights)


@pytest.mark.parametrize("config", [SMALL, BiTConfig(image_size_px=32, stages=(1, 1))], ids=["vit", "bit"])
@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_counted_activations_are_those_of_a_real_forward_pass(config, bfloat16, checkpointing):
    counted = activation_bytes(config, 8, bfloat16=bfloat16, checkpointing=checkpointing)
    real = [real_bytes(config, n, bfloat16, checkpointing) for n in (8, 16)]
    assert counted == pytest.approx(real[1] - real[0], rel=0.02)


def test_frozen_weights_are_counted_by_hand():
    block = 4 * 64 + (3 * 64 + 1 * 64) * 64 + 4 * 64 + 2 * 64 * 128 + 64 + 128
    embeddings = 8 * 8 * 3 * 64 + 64 + 64 + 17 * 64
    counts = {frozen: num_frozen_weights(SMALL, frozen) for frozen in ("none", "embeddings", 2, "backbone")}
    assert counts == {
        "none": 0,
        "embeddings": embeddings,
        2: embeddings + 2 * block,
        "backbone": embeddings + 4 * block + 128,
    }


def test_selective_keeps_more_than_full_and_less_than_all():
    kept = [activation_bytes(SMALL, 8, checkpointing=mode) for mode in ("full", "selective", "none")]
    assert kept[0] < kept[1] < kept[2]


def test_frozen_blocks_keep_no_activations():
    deep = SMALL.model_copy(update={"depth": 8})
    of = {frozen: activation_bytes(SMALL, 8, frozen=frozen) for frozen in ("none", 1, 2, 3, "backbone")}
    blocks = {activation_bytes(config, 8) for config in (SMALL, deep)}
    one_block = (max(blocks) - min(blocks)) / 4
    assert of[1] - of[2] == of[2] - of[3] == one_block
    assert of["none"] > of[1] > of[3] > of["backbone"]
    # What the largest operator of a block holds: the tokens before it, its input and its result, GELU's of the MLP's width.
    tokens = 8 * 4 * 17
    assert of["backbone"] == activation_bytes(deep, 8, frozen="backbone") >= tokens * (64 + 2 * 128)


def test_weights_are_those_of_the_paper():
    assert num_weights(network_variant("b16", image_size_px=224), 1000) == 86_567_656
