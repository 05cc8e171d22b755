"""The demo without icons: a small ViT on handwritten digits.

Expected: nearly all digits right; with so few, a training from scratch does about as well, so it shows that all works, and no more.
Source: vitline.
Hardware: two CPU cores.
Cost: minutes there.
"""

from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.config import ViTConfig

IMAGE_SIZE_PX = 32


def network() -> ViTConfig:
    """16 patches of 8 px."""
    return ViTConfig(
        image_size_px=IMAGE_SIZE_PX, patch_size_px=8, embed_dim=128, depth=4, num_heads=4, mlp_dim=512, pool="gap"
    )


def pretrain_recipe() -> TrainRecipe:
    """About 51 epochs over the 750 training images of the digits 0 to 4. Nothing is mirrored."""
    return TrainRecipe(
        model=network(),
        input=InputConfig(
            global_batch_size=128,
            num_lanes=16,
            shuffle_window=4,
            augment=AugmentConfig(
                train_crop="inception", min_area_fraction=0.2, flip=False, antialias=True, image_size_px=IMAGE_SIZE_PX
            ),
        ),
        optim=OptimConfig(peak_lr=3e-3, warmup_steps=120, schedule="cosine", weight_decay=0.1, clip_norm=1.0),
        total_steps=300,
    )
