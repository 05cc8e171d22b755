"""Official splits of VTAB: slices of TFDS splits, in the order of TFDS (google-research/task_adaptation, data/)."""

from collections.abc import Mapping
from typing import NamedTuple

from vitline.data_prep.sources.raw import FirstRows
from vitline.infra.config import FrozenConfig

NUM_TRAIN, NUM_VAL = 800, 200
"""VTAB-1k trains on the first 800 examples of train and chooses settings on the first 200 of val."""


class Slice(NamedTuple):
    """Examples [start, stop) of a TFDS split."""

    split: str
    start: int
    stop: int


class OfficialSplits(FrozenConfig):
    """Train, val and test of a data set, as slices of TFDS splits."""

    train: Slice
    val: Slice
    test: Slice

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of examples of each TFDS split that is used."""
        sizes: dict[str, int] = {}
        for part in self.rows.values():
            sizes[part.split] = max(sizes.get(part.split, 0), part.stop)
        return sizes

    @property
    def rows(self) -> Mapping[str, Slice]:
        """The slices of train, val and test."""
        return {"train": self.train, "val": self.val, "test": self.test}

    @property
    def num_rows(self) -> Mapping[str, int]:
        """Number of examples of train, val and test."""
        return {name: part.stop - part.start for name, part in self.rows.items()}

    def split_of(self, split: str, position: int) -> str | None:
        """train, val or test, by TFDS split and position; None if the example is not used."""
        for name, part in self.rows.items():
            if part.split == split and part.start <= position < part.stop:
                return name
        return None


def order_key(position: int, size: int) -> int:
    """uint64 that sorts the examples of a TFDS split in the order of TFDS."""
    return (position << 64) // size


Views = Mapping[str, tuple[str | FirstRows, ...]]

VIEWS: Views = {
    "trainval": ("train", "val"),
    "train800": (FirstRows("train", NUM_TRAIN),),
    "val200": (FirstRows("val", NUM_VAL),),
    "train800val200": (FirstRows("train", NUM_TRAIN), FirstRows("val", NUM_VAL)),
}
"""Joined splits of every task. The rows of train, val and test are in the order of TFDS."""


def _own(train: int, val: int, test: int) -> OfficialSplits:
    """Splits of a data set that has three official splits."""
    return OfficialSplits(train=Slice("train", 0, train), val=Slice("validation", 0, val), test=Slice("test", 0, test))


def cut(train: int, trainval: int, test: int, test_split: str = "test") -> OfficialSplits:
    """Splits of a data set whose val is the end of its train."""
    return OfficialSplits(
        train=Slice("train", 0, train), val=Slice("train", train, trainval), test=Slice(test_split, 0, test)
    )


def _one(train: int, trainval: int, total: int) -> OfficialSplits:
    """Splits of a data set with a single TFDS split."""
    return OfficialSplits(
        train=Slice("train", 0, train), val=Slice("train", train, trainval), test=Slice("train", trainval, total)
    )


OFFICIAL_SPLITS: Mapping[str, OfficialSplits] = {
    "caltech101": cut(2754, 3060, 6084),
    "cifar100": cut(45_000, 50_000, 10_000),
    "dtd": _own(1880, 1880, 1880),
    "flowers102": _own(1020, 1020, 6149),
    "pets": cut(2944, 3680, 3669),
    "sun397": _own(76_128, 10_875, 21_750),
    "svhn": cut(65_931, 73_257, 26_032),
    "patch_camelyon": _own(262_144, 32_768, 32_768),
    "eurosat": _one(16_200, 21_600, 27_000),
    "resisc45": _one(18_900, 25_200, 31_500),
    "diabetic_retinopathy": _own(35_126, 10_906, 42_670),
    "clevr": cut(63_000, 70_000, 15_000, "validation"),
    "dmlab": _own(65_550, 22_628, 22_735),
    "dsprites": _one(589_824, 663_552, 737_280),
    "kitti": _own(6347, 423, 711),
    "smallnorb": OfficialSplits(
        train=Slice("train", 0, 24_300), val=Slice("test", 0, 12_150), test=Slice("test", 12_150, 24_300)
    ),
}
"""By name of the data set: 16 data sets make the 19 tasks."""
