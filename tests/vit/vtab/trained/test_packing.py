"""How many trials share a GPU, and their micro-batches, by the plan of the memory of a training."""

import pytest

from vitline.infra.config import replace
from vitline.vit.config import TrainRecipe
from vitline.vit.cost.memory import activation_bytes
from vitline.vit.evaluation.packing import (
    Gpus,
    Place,
    micro_batch_on_cpu,
    packed,
    ranks_of,
    training_seconds,
    trial_memory,
    trial_resources,
    wall_seconds,
)
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


def cluster(count, memory_bytes=H100, flops=350e12, per_machine=8):
    return Gpus(count, min(count, per_machine), memory_bytes, flops)


@pytest.mark.slow
def test_resources_of_a_trial():
    small = variant("s16", 224)
    assert trial_resources(small, 64, cluster(4), trials=19) == (4, 0.25, Place(4, 469))
    assert trial_resources(small, 64, cluster(4), trials=9)[:2] == (8, 0.5)
    assert trial_resources(small, 64, cluster(4), trials=3)[:2] == (16, 1.0)  # Ray would put shares on one GPU
    assert trial_resources(small, 64, None, trials=3) == (1, 0, Place(micro_batch=32))
    assert micro_batch_on_cpu(recipe(SMALL)) == 64
    assert micro_batch_on_cpu(variant("h14", 518)) == 1


def test_a_trial_of_frozen_layers_has_room_for_more_images():
    whole, probe = (replace(recipe(SMALL), **{"optim.frozen": frozen}) for frozen in ("none", "backbone"))
    memory = [trial_memory(of) for of in (whole, probe)]
    assert memory[1].parts["gradients"] == memory[1].parts["moments"] == 4 * 1000 * 65
    assert memory[1].activations == activation_bytes(SMALL, bfloat16=True, frozen="backbone")
    assert memory[1].examples_that_fit(10**8) > 1.9 * memory[0].examples_that_fit(10**8), "of two blocks"
    assert training_seconds(probe, 1e12) < 0.35 * training_seconds(whole, 1e12)


def ranks(trials, gpus, steps=2500, batch=512, lanes=64):
    of = variant("l16", 384, total_steps=steps, batch=batch)
    return ranks_of(replace(of, **{"input.num_lanes": lanes}), trials, gpus)


def test_few_or_long_trials_train_on_several_gpus_of_one_machine():
    assert [ranks(trials, cluster(8)) for trials in (1, 2, 4, 8, 64)] == [8, 4, 2, 1, 1]
    assert ranks(19, cluster(8)) == 2  # five rounds on pairs end before three rounds on single ones
    assert ranks(1, cluster(64)) == 8  # no more than a machine has
    assert ranks(1, cluster(8), steps=20) == 1  # it would end before the others have met
    assert ranks(1, cluster(8), batch=128, lanes=16) == 2  # each rank has a batch that keeps it busy
    assert ranks(1, cluster(8), lanes=4) == 4  # and as many lanes as the others
    assert ranks(1, cluster(6, per_machine=6)) == 4


def test_wall_time_counts_rounds_and_what_several_ranks_lose():
    assert wall_seconds(100, 19, cluster(8), 1) == 300
    assert wall_seconds(100, 19, cluster(8), 2) == pytest.approx(5 * (100 / 1.9 + 60))


@pytest.mark.slow
def test_a_long_trial_is_compiled_and_its_ranks_share_the_batch():
    long, short = variant("l16", 384, total_steps=2500), variant("l16", 384)
    wanted = trial_resources(long, 128, cluster(8), trials=1)
    assert wanted == (128, 8, Place(16, 64, 8, compile=True))
    assert not trial_resources(short, 128, cluster(8), trials=8).place.compile
