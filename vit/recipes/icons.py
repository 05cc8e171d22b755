"""The demo: a small hybrid on icons of open sets.

Expected: the scores of `make demo`, over five seeds in README.md; tests/benchmarks/README.md says how the settings were chosen.
Source: vitline; that hybrids are ahead at small budgets is from arXiv:2010.11929, Sec. 4.4.
Hardware: two CPU cores.
Cost: minutes there (tests/benchmarks/demo_cost.py).
"""

from vitline.infra.config import replace
from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.models.config import HybridConfig
from vitline.vit.recipes import digits


def network() -> HybridConfig:
    """A ResNet's stem and one block, then a Vision Transformer on 16 patches. At small budgets the paper's hybrids are ahead of its
    Vision Transformers (Sec. 4.4)."""
    return HybridConfig(
        image_size_px=digits.IMAGE_SIZE_PX,
        stages=(1,),
        patch_size=2,
        embed_dim=128,
        depth=4,
        num_heads=4,
        mlp_dim=512,
        pool="gap",
    )


def pretrain_recipe() -> TrainRecipe:
    """About 16 epochs over the training images. Nothing is mirrored: a left arrow is not a right one."""
    changes = {"model": network(), "optim.warmup_steps": 80, "total_steps": 800}
    return replace(digits.pretrain_recipe(), **changes)


def execution() -> ExecutionConfig:
    """Two workers that each take half of a batch at once."""
    return ExecutionConfig(num_workers=2, micro_batch_size=64, log_every_steps=10, save_every_steps=200, grace_s=10)
