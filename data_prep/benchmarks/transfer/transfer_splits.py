"""Splits of the training sets that the ViT paper transfers to (arXiv:2010.11929, Sec. B.1.1 and Table 4).

The last 1 % of ImageNet's train, 2 % of CIFAR's, and 10 % of Pets' and Flowers' are val, on which the learning rate is chosen; the
final training uses all of train. The paper gives the shares; that they are the end of train in the order of TFDS follows from the
authors' released configs (`train[:99%]`, `train[:98%]`, `train[:90%]`).
"""

from collections.abc import Mapping
from typing import NamedTuple

from vitline.data_prep.benchmarks.official_splits import OfficialSplits, Views, cut

VIEWS: Views = {"trainval": ("train", "val")}

# Flowers: it is not known whether the paper's training set also contains the 1,020 images of TFDS's validation split. They are left
# out, as in big_vision's transfer config.
OFFICIAL_SPLITS: Mapping[str, OfficialSplits] = {
    "imagenet": cut(1_268_355, 1_281_167, 50_000, "validation"),
    "cifar10": cut(49_000, 50_000, 10_000),
    "cifar100": cut(49_000, 50_000, 10_000),
    "pets": cut(3312, 3680, 3669),
    "flowers102": cut(918, 1020, 6149),
}


class Corruption(NamedTuple):
    """A corruption of ImageNet-C: the archive that holds it, and its folder in there."""

    archive: str
    folder: str


CORRUPTED = "imagenet-c-"
"""How the names of ImageNet-C's corpora begin; the name of the corruption follows."""
CORRUPTIONS: Mapping[str, Corruption] = {
    folder.replace("_", "-"): Corruption(archive, folder)
    for archive, folders in {
        "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
        "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
        "weather": ("snow", "frost", "fog", "brightness"),
        "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    }.items()
    for folder in folders
}
"""In the order of the paper's tables. The four of the archive `extra` are not part of the benchmark."""

TEST_SETS: Mapping[str, int] = {
    "imagenet-real": 46_837,
    "imagenet-v2": 10_000,
    "imagenet-a": 7500,
    "imagenet-r": 30_000,
    "imagenet-sketch": 50_889,
    "objectnet": 18_574,
    **{f"{CORRUPTED}{corruption}": 5 * 50_000 for corruption in CORRUPTIONS},
}
"""Number of images of sets that are only used for testing. Of ObjectNet those of the 113 classes that are ImageNet's."""


def files_of(task: str) -> str:
    """The name of a task's official files: those of ImageNet-C are shared."""
    corruption = CORRUPTIONS.get(task.removeprefix(CORRUPTED))
    return f"{CORRUPTED}{corruption.archive}" if corruption else task
