"""How trials are placed on GPUs: how many share one, or how many train one trial, and their micro-batches."""

import math
from typing import NamedTuple

import torch

from vitline.vit.config import ExecutionConfig, Precision, TrainRecipe
from vitline.vit.cost.estimate import TRAINING_MFU, flops_per_image
from vitline.vit.cost.memory import activation_bytes, num_weights
from vitline.vit.cost.training_memory import PlannedMemory, planned_memory
from vitline.vit.training.timing.gpus import known_gpu

_CLASSES = 1000
SMALLEST_GPU_BYTES = 38 << 30
"""Memory of a GPU of 40 GB, rounded down: what is assumed of one that is not known."""
# Four trials keep a GPU busy while each of them waits for Python, and micro-batches of 64 keep it busy while they compute.
_MOST_TRIALS_PER_GPU, _BUSY_BATCH = 4, 64
_CONTEXT_BYTES = 1 << 30  # what CUDA itself needs per process
_CPU_ACTIVATION_BYTES = 2 << 30
# Assumed, not measured: twice the GPUs of a machine are 1.9 times as fast, and processes and their meeting take a minute.
_DOUBLING, _RANKS_START_S = 0.95, 60.0
_WORTH_COMPILING_S = 300.0
"""Of training. A compiled ViT is about a quarter faster, and its compilation takes about a minute."""
_UNKNOWN_FLOPS = 100e12


class Packing(NamedTuple):
    """Trials that share a GPU."""

    trials: int
    micro_batch: int
    """Of each."""
    fits: bool
    """Whether one example fits into the memory of the GPU, by the plan."""


class Place(NamedTuple):
    """How a trial is computed."""

    threads: int = 1
    """Of each rank, which decode and augment."""
    micro_batch: int | None = None
    """Of each rank. None: the device is this trial's alone."""
    ranks: int = 1
    """Processes, each with a GPU of one machine; one may have a share of it."""
    compile: bool = False


class Resources(NamedTuple):
    """The resources of one trial, as Ray counts them."""

    num_cpus: int
    num_gpus: float
    place: Place


class Gpus(NamedTuple):
    """The GPUs that trials are distributed over, which are taken to be alike."""

    num: int
    per_machine: int
    memory_bytes: int
    flops: float
    """FLOP/s that one reaches in a trial."""


def trial_memory(recipe: TrainRecipe) -> PlannedMemory:
    """The memory of a trial with micro-batches of one example."""
    return planned_memory(recipe, ExecutionConfig(), num_weights(recipe.model, _CLASSES), micro_batch=1, sharers=1)


def packed(recipe: TrainRecipe, gpu_bytes: int, most: int = _MOST_TRIALS_PER_GPU) -> Packing:
    """As many trials, up to `most`, as leave each room for micro-batches of 64, or of the whole batch; else one, with what fits."""
    memory, batch = trial_memory(recipe), recipe.input.global_batch_size
    for together in range(most, 0, -1):
        fits = memory.examples_that_fit(gpu_bytes // together - _CONTEXT_BYTES)
        if fits >= min(_BUSY_BATCH, batch):
            break
    return Packing(together, max(1, min(fits, batch)), fits >= 1)


def micro_batch_on_cpu(recipe: TrainRecipe) -> int:
    """The largest power of two, at most 64, of examples whose activations take up to 2 GiB in float32."""
    fits = _CPU_ACTIVATION_BYTES // activation_bytes(recipe.model, frozen=recipe.optim.frozen)
    return 1 << min(max(fits, 1), 64).bit_length() - 1


def training_seconds(recipe: TrainRecipe, flops: float) -> float:
    """What the training of a trial takes on one GPU that reaches so many FLOP/s."""
    images = recipe.total_steps * recipe.input.global_batch_size
    return flops_per_image(recipe, _CLASSES) * images / flops


def wall_seconds(one: float, trials: int, gpus: Gpus, ranks: int) -> float:
    """When the last of `trials` ends that take `one` second each on one GPU and run on `ranks` of a machine."""
    at_a_time = gpus.num // gpus.per_machine * (gpus.per_machine // ranks)
    speedup = ranks * math.pow(_DOUBLING, math.log2(ranks))
    return math.ceil(trials / at_a_time) * (one / speedup + (_RANKS_START_S if ranks > 1 else 0))


def ranks_of(recipe: TrainRecipe, trials: int, gpus: Gpus) -> int:
    """On how many GPUs of a machine each of `trials` like this one trains: the number with which the last ends first, and of equal ones
    the smallest. All ranks have equally many lanes, and at least 64 images of a batch."""
    one, batch = training_seconds(recipe, gpus.flops), recipe.input
    powers = (1 << n for n in range(gpus.per_machine.bit_length()))
    possible = [n for n in powers if batch.num_lanes % n == 0 and batch.global_batch_size // n >= _BUSY_BATCH]
    return min([1, *possible], key=lambda ranks: wall_seconds(one, trials, gpus, ranks))


def trial_resources(recipe: TrainRecipe, cpus: int, gpus: Gpus | None, trials: int) -> Resources:
    """What each of `trials` that are to run requests on a cluster: one CPU, or several GPUs, one or a share of one, with as much of the
    CPUs."""
    if gpus is None:
        return Resources(1, 0, Place(micro_batch=micro_batch_on_cpu(recipe)))
    ranks = ranks_of(recipe, trials, gpus)
    # Ray fills one GPU with its shares before the next: of few trials each has a GPU for itself.
    most = 1 if ranks > 1 else min(_MOST_TRIALS_PER_GPU, max(1, trials // gpus.num))
    sharing = packed(recipe, gpus.memory_bytes, most)
    threads = max(1, cpus // (gpus.num * sharing.trials))
    micro_batch = min(sharing.micro_batch, -(-recipe.input.global_batch_size // ranks))
    compiled = training_seconds(recipe, gpus.flops) / ranks > _WORTH_COMPILING_S
    return Resources(threads * ranks, ranks / sharing.trials, Place(threads, micro_batch, ranks, compiled))


def memory_of_this_gpu() -> int:
    """Bytes of the GPU of this process; where it has none, those of the smallest supported GPU."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else SMALLEST_GPU_BYTES


def flops_of_this_gpu(precision: Precision) -> float:
    """FLOP/s that a trial reaches on the GPU of this process, by the table of GPUs."""
    gpu = known_gpu(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    return gpu.peak(precision) * TRAINING_MFU if gpu else _UNKNOWN_FLOPS
