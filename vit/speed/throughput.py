"""Images per second, MFU and the largest batch of named networks on this device, as in the paper's Figure 12."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.models.build import build_network
from vit.models.config import NetworkConfig
from vit.models.flops import forward_flops
from vit.models.network import Network
from vit.training.timing.gpu_peaks import Precision

MAX_BATCH = 8192
NUM_CLASSES = 1000


@dataclass(frozen=True)
class Speed:
    """The speed of one network at one resolution: medians over the timed steps."""

    variant: str
    image_size_px: int
    mode: str
    precision: str
    batch_size: int
    images_per_s: float | None
    """None if not even one image fits into memory."""
    mfu: float | None
    """Model FLOPs utilisation: forward FLOPs (three times as many in training) per second, divided by the device's peak.
    None if the peak is unknown."""
    largest_batch: int | None
    """Largest power of two of images that fits into the device's memory without compilation; None on a CPU."""


@dataclass(frozen=True)
class BenchSetup:
    """How every network of a table is measured."""

    device: torch.device
    precision: Precision
    batch_size: int | None
    """None: a quarter of the largest batch that fits, at most 256; 8 on a CPU."""
    steps: int
    compiled: bool
    peak: float | None
    """FLOP/s of the device; None if unknown."""


def step_of(network: Network, images: Tensor, mode: str, precision: Precision) -> Callable[[], None]:
    """A function that runs one forward pass, or one forward and backward pass."""
    device = images.device
    labels = torch.arange(len(images), device=device) % network.num_classes

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            if mode == "forward":
                with torch.inference_mode():
                    network(images)
                return
            loss = F.cross_entropy(network(images), labels)
        loss.backward()
        network.zero_grad(set_to_none=True)

    return run


def seconds_of(run: Callable[[], None], device: torch.device, steps: int) -> float:
    """Median seconds of `steps` calls, after one warm-up call."""
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def largest_batch(network: Network, side: int, mode: str, precision: Precision) -> int | None:
    """The largest power of two whose step fits into the GPU's memory; None on a CPU."""
    device = next(network.parameters()).device
    if device.type != "cuda":
        return None
    fits, size = 0, 1
    while size <= MAX_BATCH:
        try:
            images = torch.zeros(size, 3, side, side, device=device)
            step_of(network, images, mode, precision)()
            fits, size = size, 2 * size
        except torch.OutOfMemoryError:
            network.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            break
    return fits


def measure(variant: str, config: NetworkConfig, mode: str, setup: BenchSetup) -> Speed:
    """One line of the table."""
    with torch.device(setup.device):
        network = build_network(config, NUM_CLASSES)
    network = network.train(mode == "training")
    side = config.image_size_px
    largest = largest_batch(network, side, mode, setup.precision)
    if largest == 0:
        return Speed(variant, side, mode, setup.precision, 0, None, None, 0)
    batch = setup.batch_size or (min(256, max(1, largest // 4)) if largest else 8)
    images = torch.rand(batch, 3, side, side, device=setup.device).mul_(2).sub_(1)
    if setup.compiled:
        network.compile()
    seconds = seconds_of(step_of(network, images, mode, setup.precision), setup.device, setup.steps)
    per_image = forward_flops(config, NUM_CLASSES) * (3 if mode == "training" else 1)
    rate = batch / seconds
    mfu = rate * per_image / setup.peak if setup.peak else None
    return Speed(variant, side, mode, setup.precision, batch, rate, mfu, largest)


def bench(
    configs: dict[str, list[NetworkConfig]],
    *,
    device: torch.device,
    peak: float | None,
    modes: tuple[str, ...],
    precision: Precision,
    batch_size: int | None = None,
    steps: int = 5,
    compiled: bool = False,
) -> Iterator[Speed]:
    """Yields one line per variant, resolution and mode as soon as it is measured. float32 never uses TF32."""
    setup = BenchSetup(device, precision, batch_size, steps, compiled, peak)
    for variant, sizes in configs.items():
        for config in sizes:
            for mode in modes:
                with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
                    yield measure(variant, config, mode, setup)
