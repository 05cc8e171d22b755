"""Another processor, simulated: matrix products round otherwise for every shape.

A processor chooses its kernels by instruction set and by shape, so a picture's logits in a batch of one differ in the
last digit from those in a batch of two on one machine, and are equal on the next. Here every product differs, on every
machine: a test that passes with `--other-rounding` does not depend on which kernels happened to be chosen.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AWAY = 1e-5
"""Largest promised difference of float32 logits between kernels, over the largest logit (vit/README.md). Rounding moves
a sum of k products by about sqrt(k) * 6e-8 of its terms: 3e-6 for the 3,072 of B/16's widest layer, and layers add up as
their squares do."""

_PRODUCTS = (
    (F, "linear"),
    (F, "conv2d"),
    (F, "scaled_dot_product_attention"),
    (torch, "matmul"),
    (Tensor, "__matmul__"),
    (Tensor, "softmax"),
)


@contextlib.contextmanager
def other_rounding() -> Iterator[None]:
    """Inside, each float32 or float64 result of a product or softmax is up to one unit in the last place away from what
    this processor computes; the same for the same shape, so that what is repeated is equal bit for bit."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _PRODUCTS:
            patch.setattr(owner, name, _rounded_otherwise(getattr(owner, name)))
        yield


def _rounded_otherwise(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(product)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        result = product(*args, **kwargs)
        # A tracer's tensors, and those without data, are left to it; bfloat16 has its own tolerance everywhere.
        if type(result) is not Tensor or result.device.type != "cpu" or torch.compiler.is_compiling():
            return result
        if result.dtype not in (torch.float32, torch.float64):
            return result
        return result + result.detach() * _last_place(tuple(result.shape), result.dtype)

    return call


def _last_place(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """-1, 0 or 1 unit in the last place for every element, a hash of its position and the shape."""
    key = functools.reduce(lambda found, side: (found * 1_000_003 + side + 1) % 2**31, shape, 0)
    mixed = (torch.arange(math.prod(shape)) * 2_654_435_761 + key * 40_503) % 2**32
    mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) % 2**32
    return (((mixed >> 13) % 3 - 1).to(dtype) * torch.finfo(dtype).eps).reshape(shape)
