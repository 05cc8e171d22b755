"""The most operations a second that a device can do: what model FLOPs utilisation (MFU) is a share of."""

import re
import time
from typing import Literal

import torch

Precision = Literal["float32", "bfloat16"]
# Dense peaks without sparsity, in FLOP/s, as the makers print them: (bfloat16, float32 with TF32 off).
GPU_PEAKS: dict[str, tuple[float, float]] = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "V100": (125e12, 15.7e12),
}


def peak_flops(device: torch.device, precision: Precision) -> tuple[float | None, str]:
    """(FLOP/s, where the number is from): the maker's for a known GPU, a measured matrix product on a CPU."""
    if device.type == "cuda":
        name, peak = torch.cuda.get_device_name(device), maker_peak(device, precision)
        return peak, f"{name}, the maker's dense peak" if peak else f"{name}: no peak known"
    return measured_peak(precision), f"{torch.get_num_threads()} CPU threads, measured on a matrix product"


def maker_peak(device: torch.device, precision: Precision) -> float | None:
    """FLOP/s of a known GPU; None for any other device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = next((peaks for key, peaks in GPU_PEAKS.items() if re.search(rf"\b{key}\b", name)), None)
    return None if peaks is None else peaks[precision == "float32"]


def measured_peak(precision: Precision) -> float:
    """FLOP/s of the best of five square matrix products on the CPU: of 2,048 a side, or as many as take it 0.1 s. A
    processor without instructions for bfloat16 takes a minute for the former."""
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
