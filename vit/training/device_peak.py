"""Peak FLOP/s of a device, for model FLOPs utilisation (MFU)."""

import re
import time
from typing import Literal

import torch

from infra.names import there_are

Precision = Literal["float32", "bfloat16"]
# Peak FLOP/s without sparsity as the vendors publish them: (bfloat16, float32 with TF32 off).
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
    """(FLOP/s, origin of the number): published by the vendor for a known GPU, measured with matrix products on a CPU."""
    if device.type == "cuda":
        name, peak = torch.cuda.get_device_name(device), maker_peak(device, precision)
        return peak, f"{name}, the vendor's dense peak" if peak else f"{name}, peak unknown"
    return measured_peak(precision), f"{torch.get_num_threads()} CPU threads, measured with a matrix product"


def maker_peak(device: torch.device, precision: Precision) -> float | None:
    """FLOP/s of a known GPU by its vendor; None for any other device."""
    return _peak_of(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def named_peak(gpu: str, precision: Precision) -> float:
    """FLOP/s of a GPU by its name. Raises ValueError listing the known ones."""
    peak = _peak_of(gpu, precision)
    if peak is None:
        raise ValueError(f"The peak of the GPU {gpu!r} is not known; {there_are(gpu, GPU_PEAKS)}")
    return peak


def _peak_of(name: str, precision: Precision) -> float | None:
    peaks = next((peaks for key, peaks in GPU_PEAKS.items() if re.search(rf"\b{key}\b", name, re.IGNORECASE)), None)
    return None if peaks is None else peaks[precision == "float32"]


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
