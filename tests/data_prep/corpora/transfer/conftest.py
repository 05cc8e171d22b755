"""Miniature data sets in their official formats, and tasks made of them."""

import hashlib

import pytest

from vitline.data_prep.benchmarks.official_splits import cut
from vitline.data_prep.benchmarks.transfer import imagenet_real
from vitline.data_prep.benchmarks.transfer.transfer_splits import OFFICIAL_SPLITS, TEST_SETS
from vitline.data_prep.config import Transfer
from vitline.data_prep.labels.class_maps import RELEASES
from vitline.infra.config import replace

from .... import pictures

# As in the kit, numbers do not follow the order of the WNIDs. Twelve classes: sorted as text, 10 and 11 come before 2.
WNIDS = [f"n{1000 + 17 * i:08d}" for i in range(12)]
NUMBERS = {wnid: number for wnid, number in zip(WNIDS, [5, 3, 12, 1, 9, 2, 11, 4, 8, 6, 10, 7], strict=True)}
SYNSETS = [
    *((number, wnid, f"class {number}, of its own", []) for wnid, number in NUMBERS.items()),
    (13, "n00000001", "entity", [*range(1, 13)]),
]
NUM_OF_CLASS, NUM_TEST = 5, 26


@pytest.fixture
def task_source():
    """Source class of the tasks of this folder."""
    return Transfer


@pytest.fixture
def imagenet(tmp_path, monkeypatch, ilsvrc):
    """A folder of ImageNet with 12 classes of 5 training images and 26 validation images: classes in turn, 0, 1, 2, ..."""
    num_train = NUM_OF_CLASS * len(WNIDS)
    monkeypatch.setitem(OFFICIAL_SPLITS, "imagenet", cut(num_train - 6, num_train, NUM_TEST, "validation"))
    digest = hashlib.sha256("\n".join(WNIDS).encode()).hexdigest()
    monkeypatch.setitem(RELEASES, "imagenet1k", replace(RELEASES["imagenet1k"], num_classes=12, sha256=digest))
    train = {
        f"{wnid}.tar": ilsvrc.tar_of(
            {f"{wnid}_{i}.JPEG": pictures.noise((number, i), (6, 6)) for i in range(NUM_OF_CLASS)}
        )
        for number, wnid in enumerate(WNIDS)
    }
    val = {f"ILSVRC2012_val_{i:08d}.JPEG": pictures.noise((100, i), (6, 6)) for i in range(1, NUM_TEST + 1)}
    folder = tmp_path / "imagenet"
    folder.mkdir()
    (folder / "ILSVRC2012_img_train.tar").write_bytes(ilsvrc.tar_of(train))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(ilsvrc.tar_of(val))
    truth = [NUMBERS[WNIDS[i % len(WNIDS)]] for i in range(NUM_TEST)]
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(ilsvrc.kit(SYNSETS, truth))
    return folder


@pytest.fixture
def noise():
    """noise(number, ...): the bytes of an image; equal numbers give equal bytes."""
    return lambda *seed: pictures.noise(seed, (6, 6))


@pytest.fixture
def published(monkeypatch):
    """published(text, num_labelled): this text is the published label file of ReaL until the test ends."""

    def publish(text, num_labelled):
        monkeypatch.setattr(imagenet_real, "REAL_SHA256", hashlib.sha256(text.encode()).hexdigest())
        monkeypatch.setitem(TEST_SETS, "imagenet-real", num_labelled)

    return publish
