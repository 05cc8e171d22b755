"""The demo without emoji: the same small ViT on handwritten digits, without mirroring."""

from infra.config import replace
from vit.config import TrainRecipe
from vit.recipes import emoji


def pretrain_recipe() -> TrainRecipe:
    """About 51 epochs over the 750 training images of the digits 0 to 4."""
    return replace(emoji.pretrain_recipe(), **{"input.augment.flip": False, "total_steps": 300})
