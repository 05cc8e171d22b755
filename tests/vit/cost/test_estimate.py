"""GPUs by name and by figures, and what a plan makes of them."""

import pytest

from vitline.infra.config import replace
from vitline.vit.cost.estimate import PlanGpus, demand_of, flops_per_image
from vitline.vit.models.flops import forward_flops, training_flops
from vitline.vit.training.timing.gpus import gpu_named, known_gpu


@pytest.mark.parametrize(
    ("name", "bfloat16", "memory_gb"),
    [
        ("NVIDIA H100 PCIe", 756e12, 80),
        ("NVIDIA H200", 989e12, 141),
        ("NVIDIA A100-SXM4-80GB", 312e12, 80),
        ("a100", 312e12, 40),
        ("NVIDIA L40S", 362e12, 48),
        ("12.5TFLOPS-48GB", 12.5e12, 48),
    ],
)
def test_a_gpu_is_known_by_its_name_or_its_figures(name, bfloat16, memory_gb):
    gpu = gpu_named(name)
    assert (gpu.name, gpu.peak("bfloat16"), gpu.memory_bytes) == (name, bfloat16, memory_gb * 10**9)


def test_other_gpus_are_not_known():
    assert known_gpu("NVIDIA GeForce RTX 4090") is known_gpu("AMD EPYC") is None
    assert gpu_named("12TFLOPS").memory_bytes is None
    for name in ("RTX 4090", "0TFLOPS", "TFLOPS"):
        with pytest.raises(ValueError, match=r"available: A100, .* Or give its figures: 150TFLOPS-48GB\.$"):
            gpu_named(name)


def test_images_per_second_follow_the_gpu_and_its_precision(tiny_recipe):
    def rate(gpus, precision="float32"):
        return demand_of(replace(tiny_recipe, precision=precision), 10, gpus).images_per_s

    assert rate(PlanGpus("L4", 0.5)) / rate(PlanGpus("100TFLOPS", 0.1)) == pytest.approx(30.3 * 0.5 / 10)
    assert rate(PlanGpus("L4"), "bfloat16") / rate(PlanGpus("L4")) == pytest.approx(121 / 30.3)
    assert " over 3 x " in demand_of(tiny_recipe, 10, PlanGpus("L4")).origin
    for mfu in (0, 1.5):
        with pytest.raises(ValueError, match=rf"--mfu {mfu:g} must be more than 0 and at most 1"):
            rate(PlanGpus("L4", mfu))


def test_what_is_not_trained_has_no_backward_pass(tiny_recipe):
    probe = replace(tiny_recipe, **{"optim.frozen": "backbone"})
    head = flops_per_image(probe, 10)
    assert head == forward_flops(probe.model, 10) + 2 * probe.model.embed_dim * 10
    assert " over 1.0" in demand_of(probe, 10, PlanGpus("L4")).origin
    first = replace(tiny_recipe, **{"optim.head_first_steps": tiny_recipe.total_steps // 4})
    assert flops_per_image(first, 10) == (head + 3 * training_flops(first.model, 10)) / 4
