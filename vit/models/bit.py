"""The BiT ResNet, top to bottom: ResNet v2 with GroupNorm for BatchNorm and standardised convolutions.

Source: arXiv:1912.11370, and arXiv:2010.11929, Sec. 4.1, which uses it as the baseline. Epsilons and padding are those of
the BiT code: blocks normalise before each convolution, the shortcut projects the normalised input, and the max-pool of the
stem is padded with zeros.
"""

import functools

import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitline.vit.models.config import BiTConfig
from vitline.vit.models.network import Network, normalised
from vitline.vit.models.std_conv import GROUPS, StdConv2d, standardize_by_variance

GROUP_NORM_EPS = 1e-5
STANDARDIZE = functools.partial(standardize_by_variance, eps=1e-10)


def conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> StdConv2d:
    return StdConv2d(STANDARDIZE, channels_in, channels_out, kernel, stride)


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=GROUP_NORM_EPS)


class PreActBottleneck(nn.Module):
    """GroupNorm, ReLU and a convolution, three times: 1x1, 3x3 (with the stride), 1x1. No activation after the sum."""

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        out = 4 * width
        self.norm1, self.conv1 = norm(channels_in), conv(channels_in, width, 1)
        self.norm2, self.conv2 = norm(width), conv(width, width, 3, stride)
        self.norm3, self.conv3 = norm(width), conv(width, out, 1)
        self.conv_proj = conv(channels_in, out, 1, stride) if channels_in != out or stride != 1 else None

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K h w"]:
        branch = F.relu(self.norm1(x))
        shortcut = x if self.conv_proj is None else self.conv_proj(branch)
        branch = self.conv1(branch)
        branch = self.conv2(F.relu(self.norm2(branch)))
        total: Tensor = shortcut + self.conv3(F.relu(self.norm3(branch)))
        return total


class BiTResNet(Network):
    """Images (B, 3, H, W) in [-1, 1] of any resolution -> logits (B, num_classes)."""

    config: BiTConfig

    def __init__(self, config: BiTConfig, num_classes: int):
        super().__init__()
        self.config, self.num_classes = config, num_classes
        width = 64 * config.width_factor
        self.conv_root = conv(3, width, 7, 2)
        self.stages = nn.ModuleList()
        channels = width
        for i, blocks in enumerate(config.stages):
            stage, mid = nn.ModuleList(), width * 2**i
            for j in range(blocks):
                stage.append(PreActBottleneck(channels, mid, stride=2 if i > 0 and j == 0 else 1))
                channels = 4 * mid
            self.stages.append(stage)
        self.norm = norm(channels)
        self.head = nn.Linear(channels, num_classes)
        self.init_weights()

    def features(self, images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        """The mean of the last feature map."""
        x = F.max_pool2d(F.pad(self.conv_root(normalised(images)), (1, 1, 1, 1)), 3, 2)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for block in stage:
                x = block(x)
        return F.relu(self.norm(x)).mean(dim=(2, 3))

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, StdConv2d):
                module.init_weights()
        self.init_head()
