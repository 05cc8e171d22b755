"""The largest sizes of a network. Configs come from files of strangers, too, so they are checked before anything is built."""

from vitline.vit.models.config import NetworkConfig, TransformerConfig

# Far above every published network: the widest has an embed_dim of 6,144, the deepest ResNet stage has 36 blocks.
MAX_BLOCKS, MAX_STAGES, MAX_TOKENS = 1_000, 5, 65_536
_MOST = {
    "image_size_px": 8_192, "embed_dim": 65_536, "mlp_dim": 262_144, "depth": MAX_BLOCKS, "width_factor": 16,
}  # fmt: skip


def check_limits(config: NetworkConfig) -> None:
    """Raises ValueError naming the field of the config that is larger than any network has."""
    stages: tuple[int, ...] = getattr(config, "stages", ())
    if len(stages) > MAX_STAGES:
        raise ValueError(f"{len(stages):,} stages, expected at most {MAX_STAGES}.")
    if max(stages, default=0) > MAX_BLOCKS:
        raise ValueError(f"a stage of {max(stages)} blocks, expected at most {MAX_BLOCKS:,}.")
    for name, most in _MOST.items():
        if (found := getattr(config, name, 0)) > most:
            raise ValueError(f"{name}={found}, expected at most {most:,}.")
    if isinstance(config, TransformerConfig) and config.num_patches > MAX_TOKENS:
        raise ValueError(
            f"{config.num_patches:,} patches of an image of {config.image_size_px} px, expected at most {MAX_TOKENS:,}. "
            "Choose a smaller image size or larger patches."
        )
