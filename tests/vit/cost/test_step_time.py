"""Measured seconds of a step; the thread count of the process is restored."""

import torch

from vitline.vit.config import ExecutionConfig
from vitline.vit.cost.step_time import seconds_per_step, synthetic_batch


def test_step_is_timed_and_the_thread_count_is_restored(tiny_recipe):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert seconds_per_step(tiny_recipe, ExecutionConfig(num_workers=2, micro_batch_size=2), num_classes=5) > 0
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before + 1


def test_synthetic_batch_has_the_shape_of_a_real_one(tiny_recipe):
    batch = synthetic_batch(tiny_recipe, num_classes=5, size=3)
    assert (batch.images.shape, batch.images.dtype) == ((3, 8, 8, 3), torch.uint8)
    assert int(batch.labels.max()) < 5
