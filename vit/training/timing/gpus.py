"""The GPUs that vitline knows, by their vendors' figures: for MFU, for the rates and the memory verdicts of plans. Imports no torch."""

import re
from dataclasses import dataclass, replace

from vitline.infra.names import known_names_text
from vitline.vit.config import Precision


@dataclass(frozen=True)
class Gpu:
    """Peak FLOP/s without sparsity, and memory."""

    name: str
    bfloat16_flops: float
    float32_flops: float
    """With TF32 off."""
    memory_bytes: int | None
    """None where it was not given."""

    def peak(self, precision: Precision) -> float:
        """FLOP/s."""
        return self.float32_flops if precision == "float32" else self.bfloat16_flops


GPUS = (
    Gpu("H200", 989e12, 67e12, 141 * 10**9),
    Gpu("H100 PCIe", 756e12, 51e12, 80 * 10**9),
    Gpu("H100", 989e12, 67e12, 80 * 10**9),
    Gpu("A100", 312e12, 19.5e12, 40 * 10**9),
    Gpu("L40S", 362e12, 91.6e12, 48 * 10**9),
    Gpu("L4", 121e12, 30.3e12, 24 * 10**9),
    Gpu("V100", 125e12, 15.7e12, 16 * 10**9),
)
"""The memory is that of the smallest model; a name may hold another."""


def gpu_named(text: str) -> Gpu:
    """A GPU by its name (`H100`, `A100-80GB`) or its figures (`150TFLOPS-48GB`, at either precision; the memory may be left out). Raises
    ValueError listing the known ones."""
    gpu = known_gpu(text)
    if gpu is None and (flops := re.search(r"^(\d+(?:\.\d+)?) ?TFLOPS\b", text, re.IGNORECASE)):
        gpu = Gpu(text, 1e12 * float(flops[1]), 1e12 * float(flops[1]), _memory_in(text))
    if gpu is None or not gpu.bfloat16_flops:
        names = known_names_text(text, [each.name for each in GPUS])
        raise ValueError(f"The peak of the GPU {text!r} is not known; {names} Or give its figures: 150TFLOPS-48GB.")
    return gpu


def known_gpu(name: str) -> Gpu | None:
    """A GPU whose name holds that of a known one, as CUDA reports it; None for others."""
    for gpu in GPUS:
        if re.search(rf"\b{gpu.name}\b", name, re.IGNORECASE):
            return replace(gpu, name=name, memory_bytes=_memory_in(name) or gpu.memory_bytes)
    return None


def _memory_in(name: str) -> int | None:
    found = re.search(r"\b(\d+) ?GB\b", name, re.IGNORECASE)
    return int(found[1]) * 10**9 if found else None
