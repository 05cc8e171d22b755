"""A plain ViT from scratch on ImageNet: "Better plain ViT baselines for ImageNet-1k" (arXiv:2205.01580; big_vision's vit_s16_i1k.py).

Expected: 76.5, 78.5 and 80.0 % top-1 on ImageNet's validation set after 90, 150 and 300 epochs.
Source: arXiv:2205.01580 and big_vision, which multiplies weight decay 1e-4 by a rate relative to the peak; this is 0.1 in AdamW.
Hardware: a TPUv3-8 in the paper. Here on GPUs; it has not been run to its end.
Cost: 6.5 hours there for 90 epochs. For your GPUs: `vitline pretrain run --plan`.
"""

from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.variants import vit_config
from vitline.vit.recipes.paper import IMAGENET_TRAIN_IMAGES

BATCH = 1024


def imagenet(variant: str = "s16", epochs: int = 90) -> TrainRecipe:
    """Mean pooling, fixed 2-D sine and cosine embeddings, a tanh layer before the head; RandAugment(2, 10), MixUp 0.2; AdamW, batch
    1024, peak rate 1e-3, cosine decay, softmax."""
    return TrainRecipe(
        model=vit_config(variant, pool="gap", pos_embed="sincos-2d", pre_logits=True),
        input=InputConfig(
            global_batch_size=BATCH,
            num_lanes=256,
            shuffle_window=4,
            augment=AugmentConfig(
                antialias=False,
                eval_resize="shorter_side",
                eval_resize_px=256,
                randaugment_layers=2,
                randaugment_magnitude=10,
                mixup_alpha=0.2,
            ),
        ),
        optim=OptimConfig(peak_lr=1e-3, warmup_steps=10_000, schedule="cosine", weight_decay=0.1, clip_norm=1.0),
        total_steps=epochs * IMAGENET_TRAIN_IMAGES // BATCH,
        precision="bfloat16",
    )
