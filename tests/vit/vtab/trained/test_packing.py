"""Memory of trials and how many share a GPU: estimates, compared with a measured step."""

import pytest

from vitline.vit.config import TrainRecipe
from vitline.vit.evaluation.packing import micro_batch_size, trial_resources, trials_per_gpu
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.variants import network_variant

SMALL = ViTConfig(image_size_px=32, patch_size_px=8, embed_dim=64, depth=2, num_heads=2, mlp_dim=128)


@pytest.mark.slow
def test_micro_batches_shrink_as_images_and_networks_grow():
    sizes = {
        (v, px): micro_batch_size(network_variant(v, image_size_px=px), "cuda")
        for v in ("b16", "l16")
        for px in (224, 384)
    }
    assert sizes == {("b16", 224): 64, ("b16", 384): 32, ("l16", 224): 32, ("l16", 384): 8}
    assert micro_batch_size(SMALL, "cpu") == 64
    assert micro_batch_size(network_variant("h14", image_size_px=518), "cpu") == 1


@pytest.mark.slow
def test_fewer_trials_share_a_gpu_as_networks_grow():
    def recipe(variant, px):
        config = network_variant(variant, image_size_px=px)
        return TrainRecipe.model_validate(
            {
                "model": config,
                "total_steps": 20,
                "optim": {"warmup_steps": 1},
                "input": {"augment": {"image_size_px": px}},
            }
        )

    together = [
        trials_per_gpu(network_variant(variant, image_size_px=px), 40 * 10**9)
        for variant, px in (("s16", 224), ("b16", 384), ("h14", 518))
    ]
    assert together == [4, 3, 2]
    assert trials_per_gpu(network_variant("h14", image_size_px=518), 141 * 10**9) == 4
    assert trials_per_gpu(network_variant("h14", image_size_px=518), 10**9) == 1
    assert trial_resources(recipe("s16", 224), {"CPU": 64.0, "GPU": 4.0}, 40 * 10**9) == (4, 0.25, 4)
    assert trial_resources(recipe("s16", 224), {"CPU": 64.0}, 40 * 10**9) == (1, 0, 1)
