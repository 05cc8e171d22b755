"""The paper's ViTs, hybrids and BiT ResNets on a corpus like JFT-300M.

Expected: 84.15 % (B/16), 80.73 (B/32), 87.12 (L/16), 84.37 (L/32) and 88.08 (H/14) top-1 on ImageNet after fine-tuning at 384 px; 85.58 for
the hybrid R50+B/16, 77.54 for R50x1. On VTAB 77.63 (H/14) and 76.28 (L/16). JFT-300M is not public: scores on other data differ.
Source: arXiv:2010.11929, Tables 2, 3, 6 and 9, App. B.1.
Hardware: TPUv3 in the paper. Here on GPUs; none has been run to its end.
Cost: 2,500 TPUv3-core-days for H/14, 680 for L/16; 55 (B/32) to 4,262 (H/14) exaFLOPs. For your GPUs: `vitline pretrain run --plan`.
"""

from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.input.config import InputConfig
from vitline.vit.models.config import network_config
from vitline.vit.models.variants import network_variant
from vitline.vit.recipes.paper import BATCH, CLIP_NORM, JFT_TRAIN_IMAGES, PAPER_CROP

# Table 3: peak learning rate and epochs on JFT-300M. Where the paper trains for 7 and for 14 epochs, the longer training.
JFT: dict[str, tuple[float, int]] = {
    "b32": (8e-4, 7),
    "b16": (8e-4, 7),
    "l32": (6e-4, 7),
    "l16": (4e-4, 14),
    "h14": (3e-4, 14),
    "bit_r50x1": (1e-3, 7),
    "bit_r50x2": (1e-3, 7),
    "bit_r101x1": (8e-4, 7),
    "bit_r152x1": (6e-4, 7),
    "bit_r152x2": (6e-4, 7),
    "r50_b32": (8e-4, 7),
    "r50_b16": (8e-4, 7),
    "r50_l32": (2e-4, 7),
    "r50_l16": (4e-4, 14),
}


def jft(variant: str) -> TrainRecipe:
    """A ViT, hybrid or BiT ResNet on a corpus like JFT-300M: Adam, batch 4096, linear decay, weight decay 0.1."""
    peak_lr, epochs = JFT[variant]
    before_head = {} if variant.startswith("bit") else {"pre_logits": True}
    return TrainRecipe(
        model=network_config(network_variant(variant, head_bias_init=-10.0, **before_head)),
        input=InputConfig(global_batch_size=BATCH, num_lanes=512, shuffle_window=4, augment=PAPER_CROP),
        optim=OptimConfig(
            peak_lr=peak_lr, warmup_steps=10_000, schedule="linear", end_lr=1e-5, weight_decay=0.1, clip_norm=CLIP_NORM
        ),
        loss="sigmoid",
        total_steps=epochs * JFT_TRAIN_IMAGES // BATCH,
        precision="bfloat16",
    )
