"""BiT-L on a corpus like JFT-300M: the ResNet of the paper's Table 2.

Expected: 87.54 % top-1 on ImageNet after fine-tuning, 76.29 on VTAB. JFT-300M is not public: scores on other data differ.
Source: arXiv:1912.11370, Sec. 3.1, and google-research/big_transfer.
Hardware: TPUv3 in the paper. Here on GPUs; it has not been run to its end.
Cost: 9,900 TPUv3-core-days. For your GPUs: `vitline pretrain run --plan`.
"""

from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.input.config import InputConfig
from vitline.vit.models.config import network_config
from vitline.vit.models.variants import network_variant
from vitline.vit.recipes.paper import BATCH, JFT_TRAIN_IMAGES, PAPER_CROP


def bit_l() -> TrainRecipe:
    """BiT-L by its own recipe: R152x4, SGD with momentum,
    peak rate 0.03 for each 256 images, divided by ten after 10, 23, 30 and 37 of 40 epochs, weight decay 1e-4."""
    return TrainRecipe(
        model=network_config(network_variant("bit_r152x4", head_bias_init=-10.0)),
        input=InputConfig(global_batch_size=BATCH, num_lanes=512, shuffle_window=4, augment=PAPER_CROP),
        optim=OptimConfig(
            optimizer="sgd",
            peak_lr=0.03 * BATCH / 256,
            warmup_steps=5_000,
            schedule="staircase",
            milestones=(10 / 40, 23 / 40, 30 / 40, 37 / 40),
            weight_decay=1e-4,
            clip_norm=None,
        ),
        loss="sigmoid",
        total_steps=40 * JFT_TRAIN_IMAGES // BATCH,
        precision="bfloat16",
    )
