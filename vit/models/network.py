"""What every network offers: features, logits, and the initial distributions of the originals."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.models.config import NetworkConfig


class Network(nn.Module):
    """Images (B, 3, H, W) in [-1, 1] -> logits (B, num_classes), by way of one feature vector an image."""

    config: NetworkConfig
    num_classes: int
    head: nn.Linear

    def features(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B D"]:
        """What the head sees."""
        raise NotImplementedError

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B K"]:
        return self.head(self.features(images))

    def init_weights(self) -> None:
        """The original's initial distribution, layer by layer, from torch's global generator."""
        raise NotImplementedError

    def init_head(self) -> None:
        """Zeros, as the originals; the bias says how likely a class is before anything is learned."""
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, self.config.head_bias_init)


def lecun_normal_(weight: Tensor) -> None:
    """Truncated normal (+-2 sigma) with variance 1 / fan_in after truncation: flax's default for Dense and Conv."""
    fan_in = weight[0].numel()
    # 0.8796... is the standard deviation of a unit normal cut at +-2; flax divides by it, so do we.
    std = math.sqrt(1.0 / fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def drop_branch(branch: Float[Tensor, "B T D"], rate: float, training: bool) -> Float[Tensor, "B T D"]:
    """Stochastic depth: the branch is zero for a share `rate` of the examples of a training step.

    What is kept is not divided by 1 - rate, as in big_vision (arXiv:2106.10270, Sec. 3.3 states no scaling); timm divides.
    """
    if not training or rate == 0.0:
        return branch
    keep = torch.rand(len(branch), 1, 1, device=branch.device) >= rate
    return branch * keep.to(branch.dtype)
