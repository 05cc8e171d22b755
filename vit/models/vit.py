"""The Vision Transformer, top to bottom: patches -> tokens -> encoder -> pooled token -> logits.

Source: arXiv:2010.11929, Sec. 3.1 and App. A and D.4, with the initialisation, epsilons and tanh-approximated GELU of the
paper's JAX code. Modules correspond to the symbols of the paper, so that both can be compared.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitline.vit.models.config import TransformerConfig, ViTConfig
from vitline.vit.models.network import Network, drop_branch, lecun_normal_, normalised
from vitline.vit.models.pos_embed import sincos_2d

POS_EMBED_STD = 0.02
BLOCKS_TOGETHER = 4
"""Blocks that are compiled as one: fewer calls of compiled code than with one, and faster to compile than all. Its effect on a GPU has not
been measured."""


class SelfAttention(nn.Module):
    """Multi-head self-attention with fused q, k, v: softmax(q k^T / sqrt(head dim)) v. Paper, App. A.

    With relative position embeddings there is a learned key for each offset between two positions of the sequence. Its
    product with the query is added to the logits (App. D.4). The paper leaves the details open: here each block has one
    table of 2T - 1 offsets for all its heads, the class token is position 0, and the products are scaled like the others.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        dim = config.embed_dim
        self.num_heads, self.head_dim = config.num_heads, dim // config.num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias)
        self.out = nn.Linear(dim, dim)
        relative = config.pos_embed == "relative"
        offsets = 2 * config.num_tokens - 1
        self.pos_embed_offsets = nn.Parameter(torch.zeros(offsets, self.head_dim)) if relative else None

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        q, k, v = self.heads(x)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self.offset_logits(q))
        attended: Tensor = self.out(x.transpose(1, 2).flatten(2))
        return attended

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        """The attention weights of every head and query, for inspection. Training uses the fused function instead."""
        q, k, _ = self.heads(x)
        logits = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        bias = self.offset_logits(q)
        return (logits if bias is None else logits + bias).softmax(dim=-1)

    def heads(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, H, T, head dim)."""
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def offset_logits(self, q: Float[Tensor, "B H T d"]) -> Float[Tensor, "B H T T"] | None:
        """The logits that relative position embeddings add; None without them."""
        if self.pos_embed_offsets is None:
            return None
        place = torch.arange(q.shape[2], device=q.device)
        offset = place[:, None] - place[None, :] + (q.shape[2] - 1)
        by_offset = q @ self.pos_embed_offsets.to(q.dtype).T / math.sqrt(self.head_dim)
        return by_offset.gather(3, offset.expand(*q.shape[:2], -1, -1))


class Block(nn.Module):
    """Pre-norm encoder block. Dropout after the attention output and both MLP layers, never on attention weights."""

    def __init__(self, config: TransformerConfig, drop_rate: float = 0.0):
        super().__init__()
        dim = config.embed_dim
        self.norm1 = nn.LayerNorm(dim, eps=config.norm_eps)
        self.attention = SelfAttention(config)
        self.norm2 = nn.LayerNorm(dim, eps=config.norm_eps)
        self.fc1 = nn.Linear(dim, config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, dim)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.drop_rate, self.approximate = drop_rate, "tanh" if config.gelu == "tanh" else "none"

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        branch = self.dropout(self.attention(self.norm1(x)))
        x = x + drop_branch(branch, self.drop_rate, self.training)
        hidden = self.dropout(F.gelu(self.fc1(self.norm2(x)), approximate=self.approximate))
        return x + drop_branch(self.dropout(self.fc2(hidden)), self.drop_rate, self.training)


class AttentionPool(nn.Module):
    """A learned query attends to all tokens, followed by a residual MLP: big_vision's MAP head. No dropout."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        dim = config.embed_dim
        self.num_heads, self.head_dim = config.num_heads, dim // config.num_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, dim))
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.fc1 = nn.Linear(dim, config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, dim)
        self.approximate = "tanh" if config.gelu == "tanh" else "none"

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        q = (
            self.query(self.probe.expand(x.shape[0], -1, -1))
            .unflatten(2, (self.num_heads, self.head_dim))
            .transpose(1, 2)
        )
        kv = self.key_value(x).unflatten(2, (2, self.num_heads, self.head_dim))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        x = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))[:, 0]
        pooled: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm(x)), approximate=self.approximate))
        return pooled


class Transformer(Network):
    """Tokens -> logits: the part that the Vision Transformer and the hybrid share. Their stems compute the tokens.

    `pool="token"`: class token with its own position embedding. `pool="gap"`: mean over the patch tokens after the
    final norm. `pool="map"`: attention pool after the final norm. The last two have no class token, and one position
    embedding per patch.
    """

    config: TransformerConfig

    def __init__(self, config: TransformerConfig, num_classes: int, channels_in: int, patch_size: int):
        super().__init__()
        dim = config.embed_dim
        self.config, self.num_classes = config, num_classes
        self.patch_embed = nn.Conv2d(channels_in, dim, kernel_size=patch_size, stride=patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.pool == "token" else None
        self._add_positions(config)
        self.dropout = nn.Dropout(config.dropout_rate)
        last = max(config.depth - 1, 1)
        rates = [config.stochastic_depth_rate * i / last for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.pool = AttentionPool(config) if config.pool == "map" else None
        self.pre_logits = nn.Linear(dim, dim) if config.pre_logits else None
        self.head = nn.Linear(dim, num_classes)

    def _add_positions(self, config: TransformerConfig) -> None:
        """Adds tables (n, entries, width), where n is the depth if every layer has its own table, else 1."""
        n, dim = config.depth if config.pos_embed_at == "every-layer" else 1, config.embed_dim
        if config.pos_embed == "learned-1d":
            self.pos_embed = nn.Parameter(torch.zeros(n, config.num_tokens, dim))
        elif config.pos_embed == "learned-2d":
            self.pos_embed_x = nn.Parameter(torch.zeros(n, config.grid_side, dim // 2))
            self.pos_embed_y = nn.Parameter(torch.zeros(n, config.grid_side, dim // 2))
        elif config.pos_embed == "sincos-2d":
            self.register_buffer("pos_embed_fixed", sincos_2d(config.grid_side, dim), persistent=False)

    def stem(self, images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D h w"]:
        """The grid of patch embeddings."""
        raise NotImplementedError

    def positions(self) -> Float[Tensor, "n T D"] | None:
        """Position tables for the whole sequence; None if nothing is added to the tokens.

        2-D and fixed embeddings add zero to the class token, which is not part of the grid.
        """
        if self.config.pos_embed == "learned-1d":
            return self.pos_embed
        if self.config.pos_embed == "sincos-2d":
            assert isinstance(self.pos_embed_fixed, Tensor)
            table = self.pos_embed_fixed.to(self.norm.weight.dtype)
        elif self.config.pos_embed == "learned-2d":
            side = self.config.grid_side
            x = self.pos_embed_x[:, None].expand(-1, side, -1, -1)
            y = self.pos_embed_y[:, :, None].expand(-1, -1, side, -1)
            table = torch.cat([x, y], dim=3).flatten(1, 2)
        else:
            return None
        return table if self.cls_token is None else F.pad(table, (0, 0, 1, 0))

    def tokens(self, images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B T D"]:
        """The input of the encoder before position embeddings: the class token, if any, and the patches in raster order."""
        x = self.stem(images).flatten(2).transpose(1, 2)
        return x if self.cls_token is None else torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)

    def encode(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Tokens after position embeddings, every block and the final norm."""
        tables, expected = self.positions(), self.config.num_tokens
        if x.shape[1] != expected and self.config.pos_embed != "none":
            raise ValueError(
                f"The image gives {x.shape[1]} tokens, but the position embeddings are for {expected}: this network takes "
                f"images of {self.config.image_size_px} px. Use `at_resolution` to resample them for another size."
            )
        if tables is not None:
            x = x + tables[0]
        x = self.dropout(x)
        blocks, added = list(self.blocks), [self.added_before(i, tables) for i in range(len(self.blocks))]
        for i in range(0, len(blocks), BLOCKS_TOGETHER):
            part = slice(i, i + BLOCKS_TOGETHER)
            x = self.through(x, blocks[part], added[part])
        tokens: Tensor = self.norm(x)
        return tokens

    def added_before(self, block: int, tables: Float[Tensor, "n T D"] | None) -> Float[Tensor, "T D"] | None:
        """The positions that are added before a block; those before the first block belong to the stem."""
        if tables is None or block == 0 or self.config.pos_embed_at == "stem":
            return None
        return tables[block if len(tables) > 1 else 0]

    @staticmethod
    def through(x: Float[Tensor, "B T D"], blocks: list[nn.Module], added: list[Tensor | None]) -> Tensor:
        """Some blocks in a row, each after the positions that are added before it: what `compile_parts` compiles at once."""
        for block, positions in zip(blocks, added, strict=True):
            x = block(x if positions is None else x + positions)
        return x

    def pooled(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        """The feature vector of an image from its encoded tokens, including the tanh of a pre-logits layer."""
        if self.pool is not None:
            x = self.pool(x)
        elif self.cls_token is not None:
            x = x[:, 0]
        else:
            x = x.mean(dim=1)
        return torch.tanh(self.pre_logits(x)) if self.pre_logits is not None else x

    def features(self, images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        return self.pooled(self.encode(self.tokens(images)))

    def encoder(self) -> list[Block]:
        """The blocks of the encoder, with their type."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def init_weights(self) -> None:
        """Draws the weights from the initial distribution of the paper's code, with torch's global generator.

        q, k and v are drawn separately: Xavier over the fused (3D, D) matrix would be smaller by sqrt(2).
        """
        lecun_normal_(self.patch_embed.weight)
        if self.patch_embed.bias is not None:
            nn.init.zeros_(self.patch_embed.bias)
        for name, parameter in self.named_parameters():
            if "pos_embed" in name:
                nn.init.normal_(parameter, std=POS_EMBED_STD)
        for block in self.encoder():
            for projection in (*block.attention.qkv.weight.chunk(3), block.attention.out.weight):
                nn.init.xavier_uniform_(projection)
            if block.attention.qkv.bias is not None:
                nn.init.zeros_(block.attention.qkv.bias)
            nn.init.zeros_(block.attention.out.bias)
            init_mlp(block.fc1, block.fc2)
        if self.pool is not None:
            nn.init.xavier_uniform_(self.pool.probe[0])
            for projection in (self.pool.query.weight, *self.pool.key_value.weight.chunk(2), self.pool.out.weight):
                nn.init.xavier_uniform_(projection)
            for layer in (self.pool.query, self.pool.key_value, self.pool.out):
                nn.init.zeros_(layer.bias)
            init_mlp(self.pool.fc1, self.pool.fc2)
        if self.pre_logits is not None:
            lecun_normal_(self.pre_logits.weight)
            nn.init.zeros_(self.pre_logits.bias)
        self.init_head()


class VisionTransformer(Transformer):
    """The paper's network, whose stem cuts the image into patches and projects each of them."""

    config: ViTConfig

    def __init__(self, config: ViTConfig, num_classes: int):
        super().__init__(config, num_classes, channels_in=3, patch_size=config.patch_size_px)
        self.init_weights()

    def stem(self, images: Float[Tensor, "B 3 H W"] | UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D h w"]:
        pixels = normalised(images)
        if pixels.is_cuda:
            return product_of_patches(self.patch_embed, pixels)
        patches: Tensor = self.patch_embed(pixels)
        return patches


def product_of_patches(convolution: nn.Conv2d, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B D h w"]:
    """What a convolution gives whose stride is its side, as one matrix product. On a GPU a convolution of three channels is slow."""
    side = convolution.stride[0]
    rows, columns = images.shape[2] // side, images.shape[3] // side
    whole = images[:, :, : rows * side, : columns * side].unflatten(3, (columns, side)).unflatten(2, (rows, side))
    patches = whole.permute(0, 2, 4, 1, 3, 5).flatten(3)  # B rows columns 3PP
    return F.linear(patches, convolution.weight.flatten(1), convolution.bias).permute(0, 3, 1, 2)


def init_mlp(*layers: nn.Linear) -> None:
    """Xavier-uniform kernels and nearly zero biases, as in the paper's code."""
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.normal_(layer.bias, std=1e-6)
