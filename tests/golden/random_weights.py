"""Weights and images of the golden vectors: drawn again wherever they are needed, so that only results are stored.

RandomState's stream is frozen by numpy, so the same seed gives the same numbers in every version.
"""

from collections.abc import Mapping, Sequence

import numpy as np


def random_weights(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, np.ndarray]:
    """float32 arrays by name, drawn in order of the names: none near zero, so that every term of a network matters.

    Kernels keep the scale of what passes through them; scales lie around 1, all else around 0.
    """
    draw = np.random.RandomState(seed)
    weights = {}
    for name in sorted(shapes):
        values = draw.standard_normal(tuple(shapes[name])).astype(np.float32)
        leaf = name.rsplit("/", 1)[-1].rsplit(".", 1)[-1]
        if leaf in ("scale", "gamma"):
            values = 1 + 0.2 * values
        elif leaf == "kernel":
            fan_in = max(1, values.size // _fan_out(name, values.shape))
            values = values * np.float32(1.5 / np.sqrt(fan_in))
        else:
            values = 0.3 * values
        weights[name] = values.astype(np.float32)
    return weights


def _fan_out(name: str, shape: tuple[int, ...]) -> int:
    """Outputs of a kernel; attention's query, key and value keep heads and head dim apart."""
    stacked = 1 if "encoderblock/" in name else 0  # blocks along a first axis
    heads = any(f"/{part}/kernel" in name for part in ("query", "key", "value"))
    return int(np.prod(shape[:stacked], dtype=int)) * int(np.prod(shape[-2:] if heads else shape[-1:], dtype=int))


def random_images(count: int, size_px: int, seed: int) -> np.ndarray:
    """float32 (count, size, size, 3) in [-1, 1]."""
    return np.random.RandomState(seed).uniform(-1, 1, (count, size_px, size_px, 3)).astype(np.float32)
