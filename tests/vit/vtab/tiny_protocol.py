"""A network and a protocol with which a trial takes a second."""

from vitline.vit.evaluation.protocols import Protocol
from vitline.vit.input.config import AugmentConfig
from vitline.vit.models.config import ViTConfig

ARCHITECTURE = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32, pool="gap")
PROTOCOL = Protocol(
    name="tiny",
    image_size_px=None,
    learning_rates=(1e-3, 0.3, 0.1),
    total_steps=4,
    warmup_steps=1,
    global_batch_size=16,
    num_lanes=4,
    augment=AugmentConfig(image_size_px=8, train_crop="none", flip=False),
)
