"""The Vision Transformer, top to bottom: patches -> tokens -> encoder -> pooled token -> logits.

Source: arXiv:2010.11929, Sec. 3.1 and App. A, with the initialisation, epsilons and tanh-approximated GELU of the
original JAX code. One module tree per paper symbol, so that the file can be held against the paper.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vit.config import ViTConfig

# The original's LayerNorm epsilon; PyTorch's default of 1e-5 shifts logits visibly in deep models.
LAYER_NORM_EPS = 1e-6


class SelfAttention(nn.Module):
    """Multi-head self-attention with fused q, k, v; softmax(q k^T / sqrt(head dim)) v. Paper, App. A."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(batch, tokens, dim))


class Block(nn.Module):
    """Pre-norm encoder block. Dropout after the attention output and both MLP layers, never on attention weights."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        dim = config.embed_dim
        self.norm1 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.attention = SelfAttention(dim, config.num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.fc1 = nn.Linear(dim, config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, dim)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = self.dropout(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))
        return x + self.dropout(self.fc2(hidden))


class VisionTransformer(nn.Module):
    """Images (B, 3, H, W) in [-1, 1] -> logits (B, num_classes).

    `pool="token"`: class token with its own position embedding. `pool="gap"`: mean over the patch tokens after the
    final norm; there is no class token and the position table has one entry per patch.
    """

    def __init__(self, config: ViTConfig, num_classes: int):
        super().__init__()
        dim = config.embed_dim
        self.config, self.num_classes = config, num_classes
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=config.patch_size_px, stride=config.patch_size_px)
        has_token = config.pool == "token"
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if has_token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, config.num_patches + has_token, dim))
        self.dropout = nn.Dropout(config.dropout_rate)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.pre_logits = nn.Linear(dim, dim) if config.pre_logits else None
        self.head = nn.Linear(dim, num_classes)
        self.init_weights()

    def features(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B D"]:
        """What the head sees: the pooled, normed token, after tanh where the model has a pre-logits layer."""
        # Patchify is a matrix product: channels_last keeps each patch contiguous for it.
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = self.dropout(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        x = x[:, 0] if self.cls_token is not None else x.mean(dim=1)
        return torch.tanh(self.pre_logits(x)) if self.pre_logits is not None else x

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B K"]:
        return self.head(self.features(images))

    def encoder(self) -> list[Block]:
        """The blocks, typed."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def init_weights(self) -> None:
        """The original's initial distribution, layer by layer, from torch's global generator.

        q, k and v are drawn apart: Xavier over the fused (3D, D) matrix would be smaller by sqrt(2).
        """
        lecun_normal_(self.patch_embed.weight)
        if self.patch_embed.bias is not None:
            nn.init.zeros_(self.patch_embed.bias)
        nn.init.normal_(self.pos_embed, std=0.02)
        for block in self.encoder():
            for projection in (*block.attention.qkv.weight.chunk(3), block.attention.out.weight):
                nn.init.xavier_uniform_(projection)
            nn.init.zeros_(block.attention.qkv.bias)
            nn.init.zeros_(block.attention.out.bias)
            for layer in (block.fc1, block.fc2):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.normal_(layer.bias, std=1e-6)
        if self.pre_logits is not None:
            lecun_normal_(self.pre_logits.weight)
            nn.init.zeros_(self.pre_logits.bias)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, self.config.head_bias_init)


def lecun_normal_(weight: Tensor) -> None:
    """Truncated normal (+-2 sigma) with variance 1 / fan_in after truncation: flax's default for Dense and Conv."""
    fan_in = weight[0].numel()
    # 0.8796... is the standard deviation of a unit normal cut at +-2; flax divides by it, so do we.
    std = math.sqrt(1.0 / fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
