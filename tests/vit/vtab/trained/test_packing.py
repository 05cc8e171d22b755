"""How many trials share a GPU, and their micro-batches, by the plan of the memory of a training."""

import pytest

from vitline.vit.config import TrainRecipe
from vitline.vit.evaluation.packing import micro_batch_on_cpu, packed, trial_memory, trial_resources
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.variants import network_variant

SMALL = ViTConfig(image_size_px=32, patch_size_px=8, embed_dim=64, depth=2, num_heads=2, mlp_dim=128)
H100, SMALL_GPU = 80 * 10**9, 16 * 10**9


def recipe(config, batch=512, **changes):
    given = {
        "model": config,
        "total_steps": 20,
        "optim": {"optimizer": "sgd", "warmup_steps": 1},
        "input": {"augment": {"image_size_px": config.image_size_px}, "global_batch_size": batch, "num_lanes": 16},
        "precision": "bfloat16",
    }
    return TrainRecipe.model_validate(given | changes)


def variant(name, px, **changes):
    return recipe(network_variant(name, image_size_px=px), **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "px"), [("s16", 224), ("b16", 384), ("l16", 384), ("h14", 518)])
@pytest.mark.parametrize("gpu_bytes", [SMALL_GPU, H100])
def test_trials_share_a_gpu_only_while_each_has_room_for_batches_that_keep_it_busy(name, px, gpu_bytes):
    of = variant(name, px)
    found, memory = packed(of, gpu_bytes), trial_memory(of)
    assert found.trials * (memory.split + found.micro_batch * memory.activations) < gpu_bytes
    assert found.trials == 1 or found.micro_batch >= 64
    more = (gpu_bytes / (found.trials + 1) - memory.split) / memory.activations
    assert found.trials == 4 or more < 64 / 0.85 + 1


@pytest.mark.slow
def test_larger_networks_share_less_and_precision_counts():
    sizes = (("s16", 224), ("b16", 384), ("l16", 384))
    assert [packed(variant(*size), H100).trials for size in sizes] == [4, 4, 1]
    assert packed(variant("b16", 384, precision="float32"), H100).trials < 4
    assert packed(variant("l16", 384), H100).micro_batch >= 64
    assert packed(recipe(SMALL, batch=16), H100) == (4, 16, True)
    assert packed(variant("h14", 518), 10**9) == (1, 1, False)


@pytest.mark.slow
def test_resources_of_a_trial():
    small = variant("s16", 224)
    assert trial_resources(small, {"CPU": 64.0, "GPU": 4.0}, H100)[:3] == (4, 0.25, 4)
    assert trial_resources(small, {"CPU": 64.0}, H100) == (1, 0, 1, 32)
    assert micro_batch_on_cpu(recipe(SMALL)) == 64
    assert micro_batch_on_cpu(variant("h14", 518)) == 1
