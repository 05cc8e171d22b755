"""Convolution with weight standardisation, which the hybrid's ResNet and BiT use with different epsilons."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitline.vit.models.network import lecun_normal_

GROUPS = 32


class StdConv2d(nn.Conv2d):
    """A convolution without bias whose kernels are standardised over (in, height, width) in every forward pass.

    With `same` it pads like TensorFlow's SAME, else by (kernel - 1) / 2 on each side.
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
        # The convolution itself does symmetric padding, without a copy.
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
        """Does nothing: torch calls it when the layer is created, but the network draws all weights later."""

    def init_weights(self) -> None:
        lecun_normal_(self.weight)


def pad_same(x: Float[Tensor, "B C H W"], kernel: int, stride: int, value: float = 0.0) -> Float[Tensor, "B C h w"]:
    """TensorFlow's SAME padding: the output has ceil(side / stride) pixels; odd padding is larger after the image."""
    pads: list[int] = []
    for side in (x.shape[3], x.shape[2]):
        total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


def standardize_by_std(weight: Tensor, eps: float) -> Tensor:
    """(w - mean) / (std + eps) with the biased std, for the hybrid."""
    centred, variance = _centred(weight)
    # The root of a zero variance has no finite gradient. Such a kernel stays zero, whatever it is divided by.
    std = torch.sqrt(torch.where(variance > 0, variance, 1.0))
    return centred / (std + eps)


def standardize_by_variance(weight: Tensor, eps: float) -> Tensor:
    """(w - mean) / sqrt(var + eps) with the biased variance, for BiT."""
    centred, variance = _centred(weight)
    return centred * torch.rsqrt(variance + eps)


def _centred(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The centred kernel and its variance, in float32 or float64 even under autocast."""
    weight = weight if weight.dtype == torch.float64 else weight.float()
    centred = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
    return centred, centred.square().mean(dim=(1, 2, 3), keepdim=True)
