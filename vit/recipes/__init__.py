"""Recipes by name: each returns a whole recipe and how to execute it. A variant derives from a recipe, not from flags."""

from collections.abc import Callable
from dataclasses import dataclass

from vit.config import ExecutionConfig, TrainRecipe
from vit.recipes import digits, emoji, paper


@dataclass(frozen=True)
class Recipe:
    """A named experiment."""

    what: str
    make: Callable[[], tuple[TrainRecipe, ExecutionConfig]]


def _i21k(variant: str, epochs: int = 90) -> Recipe:
    name = f"ViT-{variant[0].upper()}/{variant[1:]}"
    return Recipe(
        f"{name} on ImageNet-21k, {epochs} epochs (paper, Table 3)",
        lambda: (paper.i21k(variant, epochs), paper.cluster_execution()),
    )


RECIPES: dict[str, Recipe] = {
    "vit-b32-i21k": _i21k("b32"),
    "vit-b16-i21k": _i21k("b16"),
    "vit-l32-i21k": _i21k("l32"),
    "vit-l16-i21k": _i21k("l16"),
    "vit-s16-i21k": _i21k("s16"),
    "vit-b16-imagenet": Recipe(
        "ViT-B/16 from scratch on ImageNet, 300 epochs (paper, Table 3)",
        lambda: (paper.imagenet("b16"), paper.cluster_execution()),
    ),
    "digits": Recipe(
        "the same network on digits, where the emoji cannot be fetched", lambda: (digits.pretrain(), emoji.execution())
    ),
    "emoji": Recipe("the demo's small ViT, minutes on two CPU cores", lambda: (emoji.pretrain(), emoji.execution())),
}


def recipe_named(name: str) -> Recipe:
    """Raises ValueError that lists the names there are."""
    if name not in RECIPES:
        raise ValueError(f"There is no recipe {name!r}; there are: {', '.join(RECIPES)}.")
    return RECIPES[name]
