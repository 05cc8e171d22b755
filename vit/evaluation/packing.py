"""The micro-batch of a trial and the number of trials per GPU, from the activations that a network keeps for its gradient."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from vitline.vit.config import TrainRecipe
from vitline.vit.cost.memory import activation_bytes, num_weights
from vitline.vit.models.config import NetworkConfig

_CLASSES = 1000
_LARGEST_MICRO_BATCH = 64
# Four trials keep a GPU busy while each of them waits for Python; more would only need more memory.
_MOST_TRIALS_PER_GPU = 4
# Memory of the smallest supported GPU (40 GB, rounded down), and what CUDA itself needs per process.
SMALLEST_GPU_BYTES, _CONTEXT_BYTES = 38 << 30, 1 << 30
_ACTIVATION_BYTES = {"cuda": 12 << 30, "cpu": 2 << 30}


class Resources(NamedTuple):
    """The resources of one trial, as Ray counts them; `threads` decode and augment."""

    num_cpus: int
    num_gpus: float
    threads: int


def micro_batch_size(config: NetworkConfig, device: str) -> int:
    """The largest power of two, at most 64, of examples whose activations fit a trial's share of a device (cuda, cpu)."""
    fits = _ACTIVATION_BYTES[device] // activation_bytes(config)
    return 1 << min(max(fits, 1), _LARGEST_MICRO_BATCH).bit_length() - 1


def memory_of_this_gpu() -> int:
    """Bytes of the GPU of this process; where it has none, those of the smallest supported GPU."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else SMALLEST_GPU_BYTES


def trials_per_gpu(config: NetworkConfig, gpu_bytes: int, *, average: bool = False) -> int:
    """How many trials fit on a GPU, each with weights, gradients, momentum (and averaged weights) and activations."""
    weights = num_weights(config, _CLASSES)
    copies = 3 + average
    activations = activation_bytes(config, micro_batch_size(config, "cuda"))
    return max(1, min(_MOST_TRIALS_PER_GPU, gpu_bytes // (4 * copies * weights + activations + _CONTEXT_BYTES)))


def trial_resources(recipe: TrainRecipe, cluster: Mapping[str, float], gpu_bytes: int) -> Resources:
    """What a trial requests on a cluster with these resources: one CPU, or a share of a GPU and of the CPUs per GPU."""
    gpus = int(cluster.get("GPU", 0))
    if not gpus:
        return Resources(1, 0, 1)
    together = trials_per_gpu(recipe.model, gpu_bytes, average=recipe.average_decay is not None)
    cpus = max(1, int(cluster.get("CPU", 1)) // (gpus * together))
    return Resources(cpus, 1 / together, cpus)
