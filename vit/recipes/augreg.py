"""AugReg: "How to train your ViT?" (Steiner et al., arXiv:2106.10270), Sec. 3.3, and big_vision's configs vit_i21k.py, vit_i1k.py.

Six levels of augmentation, each with or without regularisation (dropout and stochastic depth of 0.1). The loss is the
paper's sigmoid; Adam, peak rate 1e-3, cosine decay, 10,000 steps of warmup, batch 4096, clipping at 1. There is no layer
before the head. What the paper does not state follows big_vision: images are resized without antialias, and evaluated on
the central 224 px of a shorter side of 256 px. Differences of RandAugment and MixUp from big_vision are named in
vit/input/augmentations.

Expected: 83.96 % top-1 on ImageNet after fine-tuning of B/16 at 224 px, 85.49 at 384 px, with the level that is best before it (medium1).
Source: arXiv:2106.10270, Sec. 3.3 and Table 3, and big_vision.
Hardware: TPUs in the paper. Here on GPUs; none has been run to its end.
Cost: 300 epochs of 14.1 million images. For your GPUs: `vitline pretrain run --plan`.
"""

from typing import Any

from vitline.infra.config import replace
from vitline.infra.names import known_names_text
from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.config import TransformerConfig
from vitline.vit.models.variants import vit_config
from vitline.vit.recipes.paper import BATCH, I21K_TRAIN_IMAGES

LEVELS: dict[str, tuple[int, float | None, float | None]] = {
    "none": (0, None, None),
    "light1": (2, 0, None),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}
"""Layers and magnitude of RandAugment, and alpha of MixUp. `light1` has magnitude 0, which still changes images."""
_RATE = 0.1


def at_level(recipe: TrainRecipe, level: str) -> TrainRecipe:
    """The recipe with the augmentation of a level. Raises ValueError for an unknown level."""
    if level not in LEVELS:
        raise ValueError(f"There is no level {level!r} of AugReg; {known_names_text(level, LEVELS)}")
    layers, magnitude, alpha = LEVELS[level]
    changes: dict[str, Any] = {"randaugment_layers": layers, "randaugment_magnitude": magnitude, "mixup_alpha": alpha}
    augment = replace(recipe.input.augment, **changes, cutmix_alpha=None)
    return replace(recipe, **{"input.augment": augment})


def regularised(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe with dropout of 0.1, and stochastic depth that grows to 0.1. Raises ValueError for a BiT ResNet."""
    if not isinstance(recipe.model, TransformerConfig):
        raise ValueError(
            f"AugReg's regularisation is dropout and stochastic depth, which {recipe.model.summary} does not have. Use a Vision "
            "Transformer or a hybrid, or train without it."
        )
    return replace(recipe, **{"model.dropout_rate": _RATE, "model.stochastic_depth_rate": _RATE})


def i21k(variant: str, level: str, *, epochs: int = 300, weight_decay: float = 0.1) -> TrainRecipe:
    """A ViT on ImageNet-21k at a level of augmentation, without regularisation. The paper also has weight decay 0.03, and 30
    epochs."""
    plain = TrainRecipe(
        model=vit_config(variant, head_bias_init=-10.0),
        input=InputConfig(
            global_batch_size=BATCH,
            num_lanes=512,
            shuffle_window=4,
            augment=AugmentConfig(antialias=False, eval_resize="shorter_side", eval_resize_px=256),
        ),
        optim=OptimConfig(
            peak_lr=1e-3, warmup_steps=10_000, schedule="cosine", weight_decay=weight_decay, clip_norm=1.0
        ),
        loss="sigmoid",
        total_steps=epochs * I21K_TRAIN_IMAGES // BATCH,
        precision="bfloat16",
    )
    return at_level(plain, level)
