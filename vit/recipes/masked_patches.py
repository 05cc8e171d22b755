"""The paper's self-supervised pre-training: masked patch prediction (arXiv:2010.11929, Sec. 4.6 and App. B.1.2).

Expected: 79.9 % top-1 on ImageNet after fine-tuning at 384 px, 2 points above training from scratch and 4 below pre-training on labels;
most of it is there after 100,000 steps.
Source: arXiv:2010.11929, Sec. 4.6 and App. B.1.2. It states neither weight decay nor dropout: none here.
Hardware: TPUv3 in the paper. Here on GPUs; it has not been run to its end.
Cost: 1M steps of 4,096 images, 13.5 epochs of JFT-300M. For your GPUs: `vitline pretrain run --plan`.
"""

from vitline.vit.config import MaskedPatchConfig, OptimConfig, TrainRecipe
from vitline.vit.input.config import InputConfig
from vitline.vit.models.config import PatchTarget
from vitline.vit.models.variants import vit_config
from vitline.vit.recipes.paper import BATCH, CLIP_NORM, PAPER_CROP


def jft(variant: str = "b16", target: PatchTarget = "mean-color-3bit", *, total_steps: int = 1_000_000) -> TrainRecipe:
    """Adam, batch 4096, peak rate 2e-4, warmup of 10,000 steps, cosine decay; half of the patches are corrupted."""
    return TrainRecipe(
        model=vit_config(variant),
        input=InputConfig(global_batch_size=BATCH, num_lanes=512, shuffle_window=4, augment=PAPER_CROP),
        optim=OptimConfig(peak_lr=2e-4, warmup_steps=10_000, schedule="cosine", clip_norm=CLIP_NORM),
        masked_patches=MaskedPatchConfig(target=target),
        total_steps=total_steps,
        precision="bfloat16",
    )
