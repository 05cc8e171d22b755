"""Peak FLOP/s of GPUs as their vendors publish them. Imports no torch."""

import re
from typing import Literal

from vitline.infra.names import known_names_text

Precision = Literal["float32", "bfloat16"]
GPU_PEAKS: dict[str, tuple[float, float]] = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "V100": (125e12, 15.7e12),
}
"""Without sparsity: (bfloat16, float32 with TF32 off)."""


def named_peak(gpu: str, precision: Precision) -> float:
    """FLOP/s of a GPU by its name. Raises ValueError listing the known ones."""
    peak = peak_of(gpu, precision)
    if peak is None:
        raise ValueError(f"The peak of the GPU {gpu!r} is not known; {known_names_text(gpu, GPU_PEAKS)}")
    return peak


def peak_of(name: str, precision: Precision) -> float | None:
    """FLOP/s of a GPU whose name holds that of a known one, as CUDA reports it; None for others."""
    peaks = next((peaks for key, peaks in GPU_PEAKS.items() if re.search(rf"\b{key}\b", name, re.IGNORECASE)), None)
    return None if peaks is None else peaks[precision == "float32"]
