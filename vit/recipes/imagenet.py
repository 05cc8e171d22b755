"""The paper's ViTs from scratch on ImageNet.

Expected: 74.79 % (B/16), 69.19 (B/32), 72.59 (L/16) and 66.90 (L/32) top-1 on ImageNet's validation images at 224 px after this training
alone; 77.91, 73.38, 76.53 and 71.16 after fine-tuning at 384 px.
Source: arXiv:2010.11929, Tables 3 and 5, App. B.1; the scores at 224 px are the authors' in google-research/vision_transformer, issue 62.
Hardware: TPUv3 in the paper. Here on GPUs; none has been run to its end.
Cost: 300 epochs of 1.27 million images. For your GPUs: `vitline pretrain run --plan`.
"""

from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.input.config import InputConfig
from vitline.vit.models.variants import vit_config
from vitline.vit.recipes.paper import BATCH, IMAGENET_TRAIN_IMAGES, PAPER_CROP

IMAGENET = ("b32", "b16", "l32", "l16")


def imagenet(variant: str, epochs: int = 300) -> TrainRecipe:
    """A ViT from scratch on ImageNet: peak rate 3e-3, cosine decay, weight decay 0.3, dropout 0.1, clipping at 1."""
    return TrainRecipe(
        model=vit_config(variant, pre_logits=True, dropout_rate=0.1, head_bias_init=-6.9),
        input=InputConfig(global_batch_size=BATCH, num_lanes=256, shuffle_window=4, augment=PAPER_CROP),
        optim=OptimConfig(peak_lr=3e-3, warmup_steps=10_000, schedule="cosine", weight_decay=0.3, clip_norm=1.0),
        loss="sigmoid",
        total_steps=epochs * IMAGENET_TRAIN_IMAGES // BATCH,
        precision="bfloat16",
    )
