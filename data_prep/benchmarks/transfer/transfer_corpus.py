"""A data set of the ViT paper as a corpus: own readers for ImageNet, those of VTAB with other official splits for the rest."""

from collections.abc import Mapping

from vitline.data_prep.benchmarks.official_corpus import OfficialCorpus
from vitline.data_prep.benchmarks.official_files import OfficialFiles
from vitline.data_prep.benchmarks.transfer.imagenet import Imagenet
from vitline.data_prep.benchmarks.transfer.imagenet_real import ImagenetReal
from vitline.data_prep.benchmarks.transfer.imagenet_v2 import ImagenetV2
from vitline.data_prep.benchmarks.transfer.transfer_splits import OFFICIAL_SPLITS, VIEWS
from vitline.data_prep.benchmarks.vtab.listed_archives import Flowers102, Pets
from vitline.data_prep.benchmarks.vtab.pixel_arrays import Cifar10, Cifar100
from vitline.data_prep.benchmarks.vtab.vtab_tfds import OfficialTfdsCorpus, is_tfds_directory
from vitline.data_prep.benchmarks.vtab_data import VtabData
from vitline.data_prep.config import CorpusRecipe, Transfer
from vitline.data_prep.sources.raw import RawCorpus
from vitline.infra.storage import open_store

_OF_IMAGENET: Mapping[str, type[Imagenet] | type[ImagenetReal] | type[ImagenetV2]] = {
    "imagenet": Imagenet,
    "imagenet-real": ImagenetReal,
    "imagenet-v2": ImagenetV2,
}
_READERS: Mapping[str, type[VtabData]] = {
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "pets": Pets,
    "flowers102": Flowers102,
}
_NUM_CLASSES = {"cifar10": 10, "cifar100": 100, "pets": 37, "flowers102": 102}


def open_task(source: Transfer, recipe: CorpusRecipe) -> RawCorpus:
    """A task from the official files in a folder; CIFAR, Pets and Flowers also from a directory prepared by TFDS."""
    task, store = source.task, open_store(source.path)
    if task in _OF_IMAGENET:
        return _OF_IMAGENET[task](store, recipe)
    if is_tfds_directory(source.path):
        return OfficialTfdsCorpus(source.path, recipe, task, OFFICIAL_SPLITS[task], VIEWS, _NUM_CLASSES[task])
    return OfficialCorpus(_READERS[task](store, task, recipe.decode.max_bytes), OFFICIAL_SPLITS[task], VIEWS)


def data_set_of(task: str) -> str:
    """Name of the data set of a task."""
    return "imagenet" if task in _OF_IMAGENET else task


def official_files_of(task: str) -> OfficialFiles:
    """The official files of a task, and where to get them."""
    return (_OF_IMAGENET.get(task) or _READERS[task]).official
