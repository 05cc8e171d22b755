"""Peak FLOP/s of a device, for model FLOPs utilisation (MFU)."""

import time

import torch

from vitline.vit.config import Precision
from vitline.vit.training.timing.gpus import known_gpu


def peak_flops(device: torch.device, precision: Precision) -> tuple[float | None, str]:
    """(FLOP/s, origin of the number): published by the vendor for a known GPU, measured with matrix products on a CPU."""
    if device.type == "cuda":
        name, peak = torch.cuda.get_device_name(device), maker_peak(device, precision)
        return peak, f"{name}, the vendor's dense peak" if peak else f"{name}, peak unknown"
    return measured_peak(precision), f"{torch.get_num_threads()} CPU threads, measured with a matrix product"


def maker_peak(device: torch.device, precision: Precision) -> float | None:
    """FLOP/s of a known GPU by its vendor; None for any other device."""
    gpu = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if gpu is None else gpu.peak(precision)


def measured_peak(precision: Precision) -> float:
    """FLOP/s of the fastest of five square matrix products on the CPU.

    The side is 2,048, or the first smaller power of two whose product takes more than 0.1 s: without bfloat16
    instructions a product of side 2,048 takes a minute.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    for side in (128, 256, 512, 1024, 2048):
        a, b = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - start)
        if min(times[1:]) > 0.1:
            break
    return 2 * side**3 / min(times[1:])
