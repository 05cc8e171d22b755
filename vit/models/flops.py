"""Floating-point operations of forward and backward passes, for MFU, plans and the compute in reports."""

from vitline.vit.models.config import (
    BiTConfig,
    Frozen,
    HybridConfig,
    NetworkConfig,
    TransformerConfig,
    UserNetworkConfig,
    ViTConfig,
)


def forward_flops(config: NetworkConfig, num_classes: int) -> int:
    """FLOPs of the forward pass of one image, 2 per multiply-add, for matrix products and convolutions only.

    Norms, GELU, softmax, biases and the standardisation of kernels are not counted, as is usual for MFU.
    """
    if isinstance(config, BiTConfig):
        macs, channels = _bit_macs(config)
        return 2 * (macs + channels * num_classes)
    if isinstance(config, UserNetworkConfig):
        return config.feature_flop + 2 * config.embed_dim * num_classes
    assert isinstance(config, TransformerConfig)
    return 2 * (_stem_macs(config) + config.depth * _block_macs(config) + _head_macs(config, num_classes))


def training_flops(config: NetworkConfig, num_classes: int, frozen: Frozen = "none") -> int:
    """FLOPs of training on one image: three forward passes, as in arXiv:2010.11929, Table 6.

    Layers that are frozen from the embeddings on have a forward pass only. All other matrices have two products in the backward pass,
    one for their own gradient and one for that of their input, which the norm of the lowest trained block needs. A head that is trained
    alone has no norm before it, so its first matrix has one.
    """
    forward = forward_flops(config, num_classes)
    if frozen == "none":
        return 3 * forward
    if frozen == "backbone":
        return forward + _head_backward_flops(config, num_classes)
    assert isinstance(config, TransformerConfig)  # checked by `check_layers`
    num_frozen = 0 if frozen == "embeddings" else frozen
    return 3 * forward - 4 * (_stem_macs(config) + num_frozen * _block_macs(config))


def _head_backward_flops(config: NetworkConfig, num_classes: int) -> int:
    """FLOPs of the gradients of the head, with its pre-logits layer."""
    width = _num_features(config)
    if isinstance(config, TransformerConfig) and config.pre_logits:
        return 2 * (width * width + 2 * width * num_classes)
    return 2 * width * num_classes


def _stem_macs(config: TransformerConfig) -> int:
    if isinstance(config, ViTConfig):
        return config.num_patches * 3 * config.patch_size_px**2 * config.embed_dim
    assert isinstance(config, HybridConfig)
    width = 64 * config.width_factor
    side = _half(config.image_size_px)
    macs = 7 * 7 * 3 * width * side**2
    macs, channels = _stages_macs(macs, config.stages, width, _half(side))
    return macs + config.num_patches * channels * config.patch_size**2 * config.embed_dim


def _num_features(config: NetworkConfig) -> int:
    if isinstance(config, BiTConfig):
        return _bit_macs(config)[1]
    assert isinstance(config, TransformerConfig | UserNetworkConfig)
    return config.embed_dim


def _block_macs(config: TransformerConfig) -> int:
    tokens, dim = config.num_tokens, config.embed_dim
    projections = tokens * (4 * dim * dim + 2 * dim * config.mlp_dim)
    attention = 2 * tokens * tokens * dim
    if config.pos_embed == "relative":
        attention += tokens * (2 * tokens - 1) * dim
    return projections + attention


def _head_macs(config: TransformerConfig, num_classes: int) -> int:
    dim, tokens = config.embed_dim, config.num_tokens
    macs = dim * num_classes + (dim * dim if config.pre_logits else 0)
    if config.pool == "map":
        macs += 2 * dim * dim * (1 + tokens) + 2 * tokens * dim + 2 * dim * config.mlp_dim
    return macs


def _bit_macs(config: BiTConfig) -> tuple[int, int]:
    width = 64 * config.width_factor
    side = _half(config.image_size_px)
    return _stages_macs(7 * 7 * 3 * width * side**2, config.stages, width, _half(side))


def _stages_macs(macs: int, stages: tuple[int, ...], width: int, side: int) -> tuple[int, int]:
    """(`macs` plus the multiply-adds of the bottlenecks of all stages, number of output channels)."""
    channels = width
    for i, blocks in enumerate(stages):
        mid, out = width * 2**i, 4 * width * 2**i
        for j in range(blocks):
            before = side
            side = _half(side) if i > 0 and j == 0 else side
            if channels != out or (i > 0 and j == 0):
                macs += channels * out * side**2
            macs += channels * mid * before**2 + (9 * mid * mid + mid * out) * side**2
            channels = out
    return macs, channels


def _half(side: int) -> int:
    """The side after a stride of 2; both kinds of padding in use round up."""
    return -(-side // 2)
