"""The demo: a small ViT on emoji, minutes on two CPU cores. The settings were measured with tests/benchmarks/demo_seeds.py."""

from vit.config import ExecutionConfig, OptimConfig, TrainRecipe
from vit.input.config import AugmentConfig, InputConfig
from vit.models.config import ViTConfig

IMAGE_SIZE_PX = 32


def network() -> ViTConfig:
    """16 patches of 8 px: as many tokens as images of 64 px with patches of 16 px, but a quarter of the pixels."""
    return ViTConfig(
        image_size_px=IMAGE_SIZE_PX, patch_size_px=8, embed_dim=128, depth=4, num_heads=4, mlp_dim=512, pool="gap"
    )


def pretrain_recipe(seed: int = 0) -> TrainRecipe:
    """About 86 epochs over the training images."""
    return TrainRecipe(
        model=network(),
        input=InputConfig(
            global_batch_size=128,
            num_lanes=16,
            shuffle_window=4,
            augment=AugmentConfig(
                train_crop="inception", min_area_fraction=0.2, flip=True, antialias=True, image_size_px=IMAGE_SIZE_PX
            ),
        ),
        optim=OptimConfig(peak_lr=3e-3, warmup_steps=120, schedule="cosine", weight_decay=0.1, clip_norm=1.0),
        total_steps=1200,
        seed=seed,
    )


def execution(num_workers: int = 2) -> ExecutionConfig:
    return ExecutionConfig(
        num_workers=num_workers, micro_batch_size=64, log_every_steps=10, save_every_steps=200, grace_s=10
    )
