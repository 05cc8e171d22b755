"""Convolution with weight standardisation: the layer that the hybrid's ResNet and BiT share, each with its own epsilon."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vit.models.network import lecun_normal_

GROUPS = 32


class StdConv2d(nn.Conv2d):
    """A convolution without bias whose kernels are standardised over (in, height, width) at every use.

    `same`: padded as TensorFlow's SAME, one more after than before where the sum is odd; else symmetrically, by
    (kernel - 1) / 2 on each side.
    """

    def __init__(
        self,
        standardize: Callable[[Tensor], Tensor],
        channels_in: int,
        channels_out: int,
        kernel: int,
        stride: int = 1,
        same: bool = False,
    ):
        # A padding that is equal on all sides is the convolution's own: it costs no copy.
        super().__init__(
            channels_in, channels_out, kernel, stride, padding=0 if same else (kernel - 1) // 2, bias=False
        )
        self.standardize, self.same = standardize, same

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K h w"]:
        if self.same:
            x = pad_same(x, self.kernel_size[0], self.stride[0])
        weight = self.standardize(self.weight).to(self.weight.dtype)
        return F.conv2d(x, weight, None, self.stride, self.padding)

    def reset_parameters(self) -> None:
        """Nothing: torch asks for it when a layer is made, and the network draws its weights once it is whole."""

    def init_weights(self) -> None:
        lecun_normal_(self.weight)


def pad_same(x: Float[Tensor, "B C H W"], kernel: int, stride: int, value: float = 0.0) -> Float[Tensor, "B C h w"]:
    """TensorFlow's SAME padding: the output has ceil(side / stride) pixels; an odd remainder goes after the image."""
    pads: list[int] = []
    for side in (x.shape[3], x.shape[2]):
        total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


def standardize_by_std(weight: Tensor, eps: float) -> Tensor:
    """(w - mean) / (std + eps), biased: the hybrid's."""
    centred, variance = _centred(weight)
    # Of a kernel without variance the root has no finite gradient; it stays zero, whatever it is divided by.
    std = torch.sqrt(torch.where(variance > 0, variance, 1.0))
    return centred / (std + eps)


def standardize_by_variance(weight: Tensor, eps: float) -> Tensor:
    """(w - mean) / sqrt(var + eps), biased: BiT's."""
    centred, variance = _centred(weight)
    return centred * torch.rsqrt(variance + eps)


def _centred(weight: Tensor) -> tuple[Tensor, Tensor]:
    """In float32 or better, whatever autocast asks of the convolution."""
    weight = weight if weight.dtype == torch.float64 else weight.float()
    centred = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
    return centred, centred.square().mean(dim=(1, 2, 3), keepdim=True)
