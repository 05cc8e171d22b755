"""How many examples a trial may hold at a time, and how many trials share a GPU: from what a network keeps for its gradient."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from vit.config import TrainRecipe
from vit.models.build import meta_network
from vit.models.config import NetworkConfig

_CLASSES = 1000
_LARGEST_MICRO_BATCH = 64
# Four trials together keep a GPU busy while each waits for its own Python; more only take each other's memory.
_MOST_TRIALS_PER_GPU = 4
# Of the smallest GPU that such networks are trained on (40 GB), less what CUDA itself takes.
_GPU_BYTES, _CONTEXT_BYTES = 38 << 30, 1 << 30
_ACTIVATION_BYTES = {"cuda": 12 << 30, "cpu": 2 << 30}


class Resources(NamedTuple):
    """Of one trial, as Ray counts them; `threads` decode and augment."""

    num_cpus: int
    num_gpus: float
    threads: int


def activation_bytes(config: NetworkConfig, num_examples: int = 1) -> int:
    """Bytes that a training step keeps of `num_examples` for its gradient, in float32, computed without any data."""
    return _saved_bytes(config, num_examples + 1) - _saved_bytes(config, 1)


def micro_batch_size(config: NetworkConfig, device: str) -> int:
    """The largest power of two of examples, at most 64, whose activations fit a trial's share of a device (cuda, cpu)."""
    fits = _ACTIVATION_BYTES[device] // activation_bytes(config)
    return 1 << min(max(fits, 1), _LARGEST_MICRO_BATCH).bit_length() - 1


def trials_per_gpu(config: NetworkConfig, *, average: bool = False) -> int:
    """How many such trials fit a GPU together: weights, gradients, momentum (and averages) and activations of each."""
    weights = sum(p.numel() for p in meta_network(config, _CLASSES).parameters())
    copies = 3 + average
    activations = activation_bytes(config, micro_batch_size(config, "cuda"))
    return max(1, min(_MOST_TRIALS_PER_GPU, _GPU_BYTES // (4 * copies * weights + activations + _CONTEXT_BYTES)))


def trial_resources(recipe: TrainRecipe, cluster: Mapping[str, float]) -> Resources:
    """What a trial asks of a cluster with so many CPUs and GPUs: a CPU, or a share of a GPU and of the CPUs beside it."""
    gpus = int(cluster.get("GPU", 0))
    if not gpus:
        return Resources(1, 0, 1)
    together = trials_per_gpu(recipe.model, average=recipe.average_decay is not None)
    cpus = max(1, int(cluster.get("CPU", 1)) // (gpus * together))
    return Resources(cpus, 1 / together, cpus)


def _saved_bytes(config: NetworkConfig, num_examples: int) -> int:
    network = meta_network(config, _CLASSES).train()
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    side = config.image_size_px
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(torch.empty(num_examples, 3, side, side, device="meta"))
    return sum(storage.nbytes() for storage in kept.values())
