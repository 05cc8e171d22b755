"""How many trials share a GPU, and the micro-batch of each, from the plan of the memory of a training."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.cost.memory import activation_bytes, num_weights
from vitline.vit.cost.training_memory import PlannedMemory, planned_memory

_CLASSES = 1000
SMALLEST_GPU_BYTES = 38 << 30
"""Memory of a GPU of 40 GB, rounded down: what is assumed of one that is not known."""
# Four trials keep a GPU busy while each of them waits for Python, and micro-batches of 64 keep it busy while they compute.
_MOST_TRIALS_PER_GPU, _BUSY_BATCH = 4, 64
_CONTEXT_BYTES = 1 << 30  # what CUDA itself needs per process
_CPU_ACTIVATION_BYTES = 2 << 30


class Packing(NamedTuple):
    """Trials that share a GPU."""

    trials: int
    micro_batch: int
    """Of each."""
    fits: bool
    """Whether one example fits into the memory of the GPU, by the plan."""


class Resources(NamedTuple):
    """The resources of one trial, as Ray counts them; `threads` decode and augment."""

    num_cpus: int
    num_gpus: float
    threads: int
    micro_batch: int


def trial_memory(recipe: TrainRecipe) -> PlannedMemory:
    """The memory of a trial with micro-batches of one example."""
    return planned_memory(recipe, ExecutionConfig(), num_weights(recipe.model, _CLASSES), micro_batch=1, sharers=1)


def packed(recipe: TrainRecipe, gpu_bytes: int) -> Packing:
    """As many trials, up to 4, as leave each room for micro-batches of 64, or of the whole batch; else one, with what fits."""
    memory, batch = trial_memory(recipe), recipe.input.global_batch_size
    for together in range(_MOST_TRIALS_PER_GPU, 0, -1):
        fits = memory.examples_that_fit(gpu_bytes // together - _CONTEXT_BYTES)
        if fits >= min(_BUSY_BATCH, batch):
            break
    return Packing(together, max(1, min(fits, batch)), fits >= 1)


def micro_batch_on_cpu(recipe: TrainRecipe) -> int:
    """The largest power of two, at most 64, of examples whose activations take up to 2 GiB in float32."""
    fits = _CPU_ACTIVATION_BYTES // activation_bytes(recipe.model)
    return 1 << min(max(fits, 1), 64).bit_length() - 1


def memory_of_this_gpu() -> int:
    """Bytes of the GPU of this process; where it has none, those of the smallest supported GPU."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else SMALLEST_GPU_BYTES


def trial_resources(recipe: TrainRecipe, cluster: Mapping[str, float], gpu_bytes: int) -> Resources:
    """What a trial requests on a cluster with these resources: one CPU, or a share of a GPU and of the CPUs per GPU."""
    gpus = int(cluster.get("GPU", 0))
    if not gpus:
        return Resources(1, 0, 1, micro_batch_on_cpu(recipe))
    packing = packed(recipe, gpu_bytes)
    cpus = max(1, int(cluster.get("CPU", 1)) // (gpus * packing.trials))
    return Resources(cpus, 1 / packing.trials, cpus, packing.micro_batch)
