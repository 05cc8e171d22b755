"""The examples of VTAB: sizes, and digests of VTAB-1k's keys that were computed independently of this code."""

import functools
import hashlib
from collections import Counter
from pathlib import Path

import pytest

from vitline.data_prep.benchmarks.official_splits import NUM_TRAIN, NUM_VAL, OFFICIAL_SPLITS, VIEWS
from vitline.data_prep.benchmarks.tfds_order import tfds_order

SIZES = {
    "caltech101": (2754, 306, 3060, 6084),
    "cifar100": (45000, 5000, 50000, 10000),
    "dtd": (1880, 1880, 3760, 1880),
    "flowers102": (1020, 1020, 2040, 6149),
    "pets": (2944, 736, 3680, 3669),
    "sun397": (76128, 10875, 87003, 21750),
    "svhn": (65931, 7326, 73257, 26032),
    "patch_camelyon": (262144, 32768, 294912, 32768),
    "eurosat": (16200, 5400, 21600, 5400),
    "resisc45": (18900, 6300, 25200, 6300),
    "diabetic_retinopathy": (35126, 10906, 46032, 42670),
    "clevr": (63000, 7000, 70000, 15000),
    "dmlab": (65550, 22628, 88178, 22735),
    "dsprites": (589824, 73728, 663552, 73728),
    "kitti": (6347, 423, 6770, 711),
    "smallnorb": (24300, 12150, 36450, 12150),
}
EUROSAT = {
    "AnnualCrop": 3000,
    "Forest": 3000,
    "HerbaceousVegetation": 3000,
    "Highway": 2500,
    "Industrial": 2500,
    "Pasture": 2000,
    "PermanentCrop": 2500,
    "Residential": 3000,
    "River": 2500,
    "SeaLake": 3000,
}


def sun397(split):
    import tensorflow_datasets

    folder = Path(tensorflow_datasets.__file__).parent / "image_classification"
    return (folder / f"sun397_tfds_{ {'train': 'tr', 'validation': 'va'}[split] }.txt").read_text().split()


KEYS = {
    "clevr": lambda split, n: [f"CLEVR_{'train' if split == 'train' else 'val'}_{i:06d}.png" for i in range(n)],
    "patch_camelyon": lambda split, n: [f"{'valid' if split == 'validation' else split}_{i}" for i in range(n)],
    "eurosat": lambda split, n: [f"{k}_{k}_{i}.jpg" for k, count in EUROSAT.items() for i in range(1, count + 1)],
    "sun397": lambda split, n: sun397(split),
}


@functools.cache
def ordered(name, split):
    """Every key of a split, in TFDS's order."""
    keys = list(KEYS.get(name, lambda split, n: range(n))(split, OFFICIAL_SPLITS[name].sizes[split]))
    return [keys[i] for i in tfds_order(split, keys)]


def keys_of(name, part):
    return ordered(name, part.split)[part.start : part.stop]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train800", "val200"),
    [
        ("cifar100", "5b25ee0661c3bc4a", "93377e439662509b"),
        ("svhn", "901fe4f6d4f65bc8", "36ae944d2e322a4f"),
        ("smallnorb", "438b845e2bd4a468", "d9fca0e85af945f0"),
        ("dsprites", "54130b46ffd22579", "86005e8c04783edc"),
        ("clevr", "5dc1033102716488", "9a9150228251ccef"),
        ("patch_camelyon", "c1122cb7e413b8b3", "b3998b44bc8423a1"),
        ("eurosat", "7dac90dec1b73063", "5c9a3ab3702faf20"),
        ("sun397", "bbfe318c912bf278", "ed3f4079a4f342a7"),
    ],
)
def test_vtab_1k_examples_are_those_of_the_paper(name, train800, val200):
    official_splits = OFFICIAL_SPLITS[name]
    found = [keys_of(name, official_splits.train)[:NUM_TRAIN], keys_of(name, official_splits.val)[:NUM_VAL]]
    digests = [hashlib.sha256("\n".join(map(str, keys)).encode()).hexdigest()[:16] for keys in found]
    assert digests == [train800, val200]


def test_first_keys_are_unchanged():
    assert keys_of("cifar100", OFFICIAL_SPLITS["cifar100"].train)[:4] == [16399, 1680, 47917, 17307]
    assert keys_of("clevr", OFFICIAL_SPLITS["clevr"].test)[:2] == ["CLEVR_val_011736.png", "CLEVR_val_005989.png"]
    assert keys_of("dsprites", OFFICIAL_SPLITS["dsprites"].test)[:3] == [493443, 195884, 225768]


@pytest.mark.parametrize("name", SIZES)
def test_splits_have_the_published_sizes_and_joined_splits_use_their_first_rows(name):
    official_splits = OFFICIAL_SPLITS[name]
    found = Counter(
        official_splits.split_of(split, i) for split, count in official_splits.sizes.items() for i in range(count)
    )
    train, val, trainval, test = SIZES[name]
    assert found == {"train": train, "val": val, "test": test}
    assert train + val == trainval
    assert official_splits.split_of("extra", 0) is None
    assert VIEWS["train800val200"] == (*VIEWS["train800"], *VIEWS["val200"]) == (("train", 800), ("val", 200))
