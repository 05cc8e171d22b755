"""Splits of the training sets that the ViT paper transfers to (arXiv:2010.11929, Sec. B.1.1 and Table 4).

The last 1 % of ImageNet's train, 2 % of CIFAR's, and 10 % of Pets' and Flowers' are val, on which the learning rate is chosen; the
final training uses all of train. The paper gives the shares; that they are the end of train in the order of TFDS follows from the
authors' released configs (`train[:99%]`, `train[:98%]`, `train[:90%]`).
"""

from collections.abc import Mapping

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

TEST_SETS: Mapping[str, int] = {"imagenet-real": 46_837, "imagenet-v2": 10_000}
"""Number of images of sets that are only used for testing."""
