"""Named recipes. Each returns a complete recipe and an execution config. A variant is a new recipe, not a flag."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from vitline.infra.names import known_names_text
from vitline.vit.config import ExecutionConfig, TrainRecipe
from vitline.vit.models.user_code import kind_of
from vitline.vit.models.variants import spelled
from vitline.vit.recipes import (
    augreg,
    bit_l,
    digits,
    icons,
    imagenet,
    imagenet21k,
    jft,
    masked_patches,
    own,
    paper,
    plain,
)


@dataclass(frozen=True)
class Recipe:
    """A named experiment."""

    what: str
    """What it trains, in a phrase."""
    make: Callable[[], tuple[TrainRecipe, ExecutionConfig]]
    """Makes its configs."""
    header: str = ""
    """What is expected of it, source, hardware and cost: the first lines of its file."""


def header_of(module: ModuleType) -> str:
    """The first lines of a file of recipes."""
    return inspect.cleandoc(module.__doc__ or "")


def prefixed(variant: str) -> str:
    """`b16` -> `vit-b16`, `r50_b16` -> `r50-b16`, `bit_r50x1` -> `bit-r50x1`."""
    return variant.replace("_", "-") if "_" in variant else f"vit-{variant}"


def _i21k(variant: str, epochs: int = 90) -> Recipe:
    source = (
        "paper, Table 3"
        if variant in imagenet21k.OF_THE_PAPER
        else "with the settings of the paper, which has no such network"
    )
    return Recipe(
        f"{spelled(variant)} on ImageNet-21k, {epochs} epochs ({source})",
        lambda: (imagenet21k.i21k(variant, epochs), paper.cluster_execution()),
        header_of(imagenet21k),
    )


def _imagenet(variant: str) -> Recipe:
    return Recipe(
        f"{spelled(variant)} from scratch on ImageNet, 300 epochs (paper, Table 3)",
        lambda: (imagenet.imagenet(variant), paper.cluster_execution()),
        header_of(imagenet),
    )


def _jft(variant: str) -> Recipe:
    return Recipe(
        f"{spelled(variant)} on a corpus like JFT-300M, {jft.JFT[variant][1]} epochs (paper, Table 3)",
        lambda: (jft.jft(variant), paper.cluster_execution()),
        header_of(jft),
    )


def _augreg(level: str) -> Recipe:
    return Recipe(
        f"{spelled('b16')} on ImageNet-21k with the augmentation {level} of AugReg, 300 epochs",
        lambda: (augreg.i21k("b16", level), paper.cluster_execution()),
        header_of(augreg),
    )


RECIPES: dict[str, Recipe] = {
    "vit-b32-i21k": _i21k("b32"),
    "vit-b16-i21k": _i21k("b16"),
    "vit-l32-i21k": _i21k("l32"),
    "vit-l16-i21k": _i21k("l16"),
    "vit-s16-i21k": _i21k("s16"),
    **{f"vit-b16-i21k-{level}": _augreg(level) for level in augreg.LEVELS if level != "none"},
    **{f"vit-{variant}-imagenet": _imagenet(variant) for variant in imagenet.IMAGENET},
    "vit-s16-plain-imagenet": Recipe(
        "ViT-S/16 from scratch on ImageNet, 90 epochs, with RandAugment and MixUp (arXiv:2205.01580)",
        lambda: (plain.imagenet(), paper.cluster_execution()),
        header_of(plain),
    ),
    **{f"{prefixed(variant)}-jft": _jft(variant) for variant in jft.JFT},
    "bit-r152x4-jft": Recipe(
        "BiT-R152x4 on a corpus like JFT-300M, 40 epochs of SGD: BiT-L (arXiv:1912.11370)",
        lambda: (bit_l.bit_l(), paper.cluster_execution()),
        header_of(bit_l),
    ),
    "vit-b16-masked-patches-jft": Recipe(
        "ViT-B/16 without labels on a corpus like JFT-300M: masked patches, 1M steps (paper, App. B.1.2)",
        lambda: (masked_patches.jft(), paper.cluster_execution()),
        header_of(masked_patches),
    ),
    "icons": Recipe(
        "the demo's small hybrid on icons, minutes on two CPU cores",
        lambda: (icons.pretrain_recipe(), icons.execution()),
        header_of(icons),
    ),
    "digits": Recipe(
        "a small ViT on digits, used where the icons cannot be downloaded",
        lambda: (digits.pretrain_recipe(), icons.execution()),
        header_of(digits),
    ),
}


def recipe_named(name: str) -> Recipe:
    """The recipe of this name, or a user-defined one: PACKAGE.MODULE:FUNCTION, or the path or URI of a YAML file, which are read when its
    configs are made. Raises ValueError listing the known names."""
    if name in RECIPES:
        return RECIPES[name]
    kind = kind_of(name)
    if kind is None and set(name) & set("./:"):
        raise ValueError(
            f"There is no recipe {name!r}. One of your own is PACKAGE.MODULE:FUNCTION, or a file that ends in .yaml."
        )
    if kind is None:
        raise ValueError(f"There is no recipe {name!r}; {known_names_text(name, RECIPES)}")
    return Recipe(
        name, lambda: own.configs_of_function(name) if kind == "function" else own.configs_of_file(name, RECIPES)
    )
