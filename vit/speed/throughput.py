"""Images per second and the largest batch of named networks on this device: the paper's Figure 12, and MFU."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.models.build import build_network
from vit.models.config import NetworkConfig
from vit.models.flops import forward_flops
from vit.models.network import Network
from vit.training.device_peak import Precision

MAX_BATCH = 8192
NUM_CLASSES = 1000


@dataclass(frozen=True)
class Speed:
    """Of one network at one resolution: medians over the timed steps."""

    variant: str
    image_size_px: int
    mode: str
    precision: str
    batch_size: int
    images_per_s: float | None
    """None where not even one image fits."""
    mfu: float | None
    """Share of the device's peak: forward FLOPs (training: three times those) over peak; None where no peak is known."""
    largest_batch: int | None
    """Most images that fit into the device's memory uncompiled, to the next power of two; None on a CPU."""


def step_of(network: Network, images: Tensor, mode: str, precision: Precision):
    """One forward pass, or one forward and backward pass, as a call."""
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


def seconds_of(run, device: torch.device, steps: int) -> float:
    """Median seconds of `steps` calls, after one that is not counted."""
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


def measure(
    variant: str,
    config: NetworkConfig,
    *,
    device: torch.device,
    mode: str,
    precision: Precision,
    batch_size: int | None,
    steps: int,
    compiled: bool,
    peak: float | None,
) -> Speed:
    """One line of the table. Without `batch_size`: a quarter of the largest that fits, at most 256; 8 on a CPU."""
    with torch.device(device):
        network = build_network(config, NUM_CLASSES)
    network = network.train(mode == "training")
    side = config.image_size_px
    largest = largest_batch(network, side, mode, precision)
    if largest == 0:
        return Speed(variant, side, mode, precision, 0, None, None, 0)
    batch = batch_size or (min(256, max(1, largest // 4)) if largest else 8)
    images = torch.rand(batch, 3, side, side, device=device).mul_(2).sub_(1)
    if compiled:
        network.compile()
    seconds = seconds_of(step_of(network, images, mode, precision), device, steps)
    per_image = forward_flops(config, NUM_CLASSES) * (3 if mode == "training" else 1)
    rate = batch / seconds
    mfu = rate * per_image / peak if peak else None
    return Speed(variant, side, mode, precision, batch, rate, mfu, largest)


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
    """A line for every variant, resolution and mode, as it is measured; float32 is float32, without TF32."""
    for variant, sizes in configs.items():
        for config in sizes:
            for mode in modes:
                with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
                    yield measure(
                        variant, config, device=device, mode=mode, precision=precision, batch_size=batch_size,
                        steps=steps, compiled=compiled, peak=peak,
                    )  # fmt: skip
