"""The hybrid, top to bottom: a Vision Transformer on the feature map of a ResNet instead of pixels.

Source: arXiv:2010.11929, Sec. 3.1 and 4.1, and the paper's JAX code. Its ResNet differs from BiT's: blocks normalise after
each convolution, as in ResNet v1; the epsilon of weight standardisation is added to the standard deviation; padding is
TensorFlow's SAME; GroupNorm's epsilon is flax's 1e-6.
"""

import functools

import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitline.vit.models.config import HybridConfig
from vitline.vit.models.network import normalised
from vitline.vit.models.std_conv import GROUPS, StdConv2d, pad_same, standardize_by_std
from vitline.vit.models.vit import Transformer

GROUP_NORM_EPS = 1e-6
STANDARDIZE = functools.partial(standardize_by_std, eps=1e-5)


def conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> StdConv2d:
    return StdConv2d(STANDARDIZE, channels_in, channels_out, kernel, stride, same=True)


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=GROUP_NORM_EPS)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1, each followed by GroupNorm; then ReLU of the sum with the shortcut."""

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = conv(channels_in, width, 1), norm(width)
        self.conv2, self.norm2 = conv(width, width, 3, stride), norm(width)
        self.conv3, self.norm3 = conv(width, out, 1), norm(out)
        projects = channels_in != out or stride != 1
        self.conv_proj = conv(channels_in, out, 1, stride) if projects else None
        self.norm_proj = norm(out) if projects else None

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K h w"]:
        shortcut = x
        if self.conv_proj is not None and self.norm_proj is not None:
            shortcut = self.norm_proj(self.conv_proj(x))
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return F.relu(shortcut + self.norm3(self.conv3(x)))


class ResNet(nn.Module):
    """7x7/2 convolution, max-pool/2, then stages of bottlenecks, the second and later ones at stride 2."""

    def __init__(self, stages: tuple[int, ...], width_factor: int):
        super().__init__()
        width = 64 * width_factor
        self.conv_root, self.norm_root = conv(3, width, 7, 2), norm(width)
        self.stages = nn.ModuleList()
        channels = width
        for i, blocks in enumerate(stages):
            stage, mid = nn.ModuleList(), width * 2**i
            for j in range(blocks):
                stage.append(Bottleneck(channels, mid, stride=2 if i > 0 and j == 0 else 1))
                channels = 4 * mid
            self.stages.append(stage)
        self.channels_out = channels

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B C h w"]:
        x = F.relu(self.norm_root(self.conv_root(images)))
        x = F.max_pool2d(pad_same(x, 3, 2, value=-float("inf")), 3, 2)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for block in stage:
                x = block(x)
        return x

    def init_weights(self) -> None:
        """flax's default for kernels. The last norm of a block starts at zero, so that its branch adds nothing at first."""
        for module in self.modules():
            if isinstance(module, StdConv2d):
                module.init_weights()
        for module in self.modules():
            if isinstance(module, Bottleneck):
                nn.init.zeros_(module.norm3.weight)


class HybridTransformer(Transformer):
    """The paper's R50+ViT networks: patches are cut from the feature map, usually of one pixel each."""

    config: HybridConfig

    def __init__(self, config: HybridConfig, num_classes: int):
        resnet = ResNet(config.stages, config.width_factor)
        super().__init__(config, num_classes, channels_in=resnet.channels_out, patch_size=config.patch_size)
        self.resnet = resnet
        self.init_weights()

    def stem(self, images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D h w"]:
        patches: Tensor = self.patch_embed(self.resnet(normalised(images)))
        return patches

    def init_weights(self) -> None:
        self.resnet.init_weights()
        super().init_weights()
