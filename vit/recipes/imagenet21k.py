"""The paper's ViTs on ImageNet-21k.

Expected: 83.97 % (B/16), 81.28 (B/32), 85.15 (L/16) and 80.99 (L/32) top-1 on ImageNet after fine-tuning at 384 px; L/16 has 85.30 at
512 px and 72.72 on VTAB. The paper has no S/16.
Source: arXiv:2010.11929, Tables 2, 3, 5 and 9, App. B.1.
Hardware: TPUv3 in the paper, where L/16 takes about 30 days on 8 cores. Here on GPUs; none has been run to its end.
Cost: 230 TPUv3-core-days for L/16. For your GPUs: `vitline pretrain run --plan`.
"""

from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.input.config import InputConfig
from vitline.vit.models.variants import vit_config
from vitline.vit.recipes.paper import BATCH, CLIP_NORM, I21K_TRAIN_IMAGES, PAPER_CROP

OF_THE_PAPER = ("b32", "b16", "l32", "l16")
"""The variants of Table 3 on ImageNet-21k."""


def i21k(variant: str, epochs: int = 90) -> TrainRecipe:
    """A ViT on ImageNet-21k: Adam, batch 4096, peak rate 1e-3, linear decay, weight decay 0.03, dropout 0.1, sigmoid loss."""
    return TrainRecipe(
        model=vit_config(variant, pre_logits=True, dropout_rate=0.1, head_bias_init=-10.0),
        input=InputConfig(global_batch_size=BATCH, num_lanes=512, shuffle_window=4, augment=PAPER_CROP),
        optim=OptimConfig(
            peak_lr=1e-3, warmup_steps=10_000, schedule="linear", end_lr=1e-5, weight_decay=0.03, clip_norm=CLIP_NORM
        ),
        loss="sigmoid",
        total_steps=epochs * I21K_TRAIN_IMAGES // BATCH,
        precision="bfloat16",
    )
