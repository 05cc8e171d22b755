"""The base class of all networks: features and logits, and the initial distributions of the paper's code."""

import math

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitline.vit.models.config import NetworkConfig


class Network(nn.Module):
    """Images -> one feature vector per image -> logits (B, num_classes).

    Images are (B, 3, H, W) in [-1, 1], or bytes (B, H, W, 3), which are normalised where they are first used: what is compiled, so that
    the first kernel can read bytes.
    """

    config: NetworkConfig
    num_classes: int
    head: nn.Linear
    block_types: tuple[type[nn.Module], ...] = ()
    """Kinds of modules, besides those of vitline, that repeat: what activation checkpointing and sharding work on."""

    def features(self, images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        """The input of the head."""
        raise NotImplementedError

    def forward(self, images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B K"]:
        features = self.features(images)
        if features.device.type == "meta" or not torch.is_autocast_enabled(features.device.type):
            logits: Tensor = self.head(features)
            return logits
        # Of 8 bits, logits around -10, as at the start of the sigmoid loss on 21k classes, lie 1/16 apart and tie.
        with torch.autocast(features.device.type, enabled=False):
            logits = self.head(features.float())
        return logits

    def init_weights(self) -> None:
        """Draws the weights from the initial distribution of the paper's code, with torch's global generator."""
        raise NotImplementedError

    def init_head(self) -> None:
        """Zero weights as in the paper's code, and the bias of the config, which sets the initial probability of a class."""
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, self.config.head_bias_init)


def normalised(
    images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"], low: float = -1.0, high: float = 1.0
) -> Float[Tensor, "B 3 H W"]:
    """Bytes -> float32 in [low, high], channels last in memory. Images that are float already stay as they are."""
    if images.dtype != torch.uint8:
        return images
    # Divided and then shifted, in this order, everywhere: training and published models get equal bits.
    return images.permute(0, 3, 1, 2).float().div_(255 / (high - low)).add_(low)


def lecun_normal_(weight: Tensor) -> None:
    """Truncated normal (+-2 sigma) with variance 1 / fan_in after truncation: flax's default for Dense and Conv."""
    fan_in = weight[0].numel()
    # Divide, like flax, by the standard deviation of a unit normal truncated at +-2.
    std = math.sqrt(1.0 / fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def drop_branch(branch: Float[Tensor, "B T D"], rate: float, training: bool) -> Float[Tensor, "B T D"]:
    """Stochastic depth: in training, sets the branch to zero for each example with probability `rate`.

    The remaining branches are not divided by 1 - rate, as in big_vision (arXiv:2106.10270, Sec. 3.3 states no scaling);
    timm divides.
    """
    if not training or rate == 0.0:
        return branch
    keep = torch.rand(len(branch), 1, 1, device=branch.device) >= rate
    return branch * keep.to(branch.dtype)
