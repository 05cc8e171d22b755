"""What the recipes of "An Image is Worth 16x16 Words" have in common (arXiv:2010.11929, Table 3 and App. B.1)."""

from vitline.vit.config import ExecutionConfig
from vitline.vit.input.config import AugmentConfig

I21K_TRAIN_IMAGES = 14_146_000
JFT_TRAIN_IMAGES = 303_000_000
IMAGENET_TRAIN_IMAGES = 1_268_355
BATCH = 4096
# Table 3 gives clipping for ImageNet only; the authors' later configs clip at 1.0 everywhere.
CLIP_NORM = 1.0
# Like the paper's code, these recipes resize without antialias (TensorFlow's bilinear resize).
PAPER_CROP = AugmentConfig(
    train_crop="inception", min_area_fraction=0.05, flip=True, antialias=False, image_size_px=224
)


def cluster_execution(num_workers: int = 8) -> ExecutionConfig:
    """One worker per GPU; a checkpoint about every ten minutes for B/16 on eight GPUs."""
    return ExecutionConfig(
        num_workers=num_workers, micro_batch_size=256, decode_threads=12, compile=True, log_every_steps=50,
        save_every_steps=2_000, grace_s=60.0, lease_timeout_s=120.0,
    )  # fmt: skip
