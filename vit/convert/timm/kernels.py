"""Rescales kernels, because timm standardises them with other epsilons: a rescaled kernel gives the same result."""

from collections.abc import Callable

from torch import Tensor


def rescale(weights: dict[str, Tensor], prefix: str, change: Callable[[Tensor], Tensor]) -> None:
    """Changes all convolution kernels whose names start with `prefix`, in place."""
    for name, value in weights.items():
        if name.startswith(prefix) and value.ndim == 4:
            weights[name] = change(value.detach())


def kernel_from_timm(kernel: Tensor) -> Tensor:
    """The kernel a k for which a k / (a std + 1e-5) = k / sqrt(var + 1e-8)."""
    std = _std(kernel)
    return (kernel * (1e3 * ((std.square() + 1e-8).sqrt() + std))).to(kernel.dtype)


def kernel_to_timm(kernel: Tensor) -> Tensor:
    """The kernel b k for which b k / sqrt(b^2 var + 1e-8) = k / (std + 1e-5)."""
    std = _std(kernel)
    return (kernel * (1e-8 / (2e-5 * std + 1e-10)).sqrt()).to(kernel.dtype)


def _std(kernel: Tensor) -> Tensor:
    """Biased standard deviation per output channel, in float64."""
    return kernel.double().std(dim=(1, 2, 3), correction=0, keepdim=True)
