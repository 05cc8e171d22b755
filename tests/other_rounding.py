"""Simulates another processor: matrix products are rounded differently for every shape.

A processor chooses its kernels by instruction set and by shape. So on some machines an image's logits in a batch of one
differ in the last digit from those in a batch of two, and on others they are equal. Here every product differs on every
machine: a test that passes with `--other-rounding` does not depend on the choice of kernels.
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
a sum of k products by about sqrt(k) * 6e-8 of its terms: 3e-6 for the 3,072 terms of B/16's widest layer; the squares of the
layers' errors add up."""

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
    """Within this context, each float32 or float64 result of a product or softmax differs by up to one unit in the last
    place from what this processor computes; always in the same way for one shape, so repeated products are equal bit for bit."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _PRODUCTS:
            patch.setattr(owner, name, _with_other_rounding(getattr(owner, name)))
        yield


def _with_other_rounding(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(product)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        result = product(*args, **kwargs)
        # Tensors of a tracer and tensors without data stay unchanged; bfloat16 has its own tolerance in every test.
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
