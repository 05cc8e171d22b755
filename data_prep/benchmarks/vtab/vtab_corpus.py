"""A task of VTAB as a corpus: the reader of its data set with VTAB's official splits."""

import importlib

from vitline.data_prep.benchmarks.label_rules import NUM_CLASSES
from vitline.data_prep.benchmarks.official_corpus import OfficialCorpus
from vitline.data_prep.benchmarks.official_splits import OFFICIAL_SPLITS, VIEWS
from vitline.data_prep.benchmarks.vtab.vtab_tfds import OfficialTfdsCorpus, is_tfds_directory
from vitline.data_prep.benchmarks.vtab_data import VtabData
from vitline.data_prep.config import CorpusRecipe, Vtab
from vitline.data_prep.sources.raw import RawCorpus
from vitline.infra.storage import Store, open_store

_READERS = {
    "caltech101": "caltech101.Caltech101",
    "cifar100": "pixel_arrays.Cifar100",
    "dtd": "listed_archives.Dtd",
    "flowers102": "listed_archives.Flowers102",
    "pets": "listed_archives.Pets",
    "sun397": "sun397.Sun397",
    "svhn": "pixel_arrays.Svhn",
    "patch_camelyon": "patch_camelyon.PatchCamelyon",
    "eurosat": "class_archives.EuroSat",
    "resisc45": "class_archives.Resisc45",
    "diabetic_retinopathy": "diabetic_retinopathy.DiabeticRetinopathy",
    "clevr": "clevr.Clevr",
    "dmlab": "dmlab.DmLab",
    "dsprites": "dsprites.DSprites",
    "kitti": "kitti.Kitti",
    "smallnorb": "smallnorb.SmallNorb",
}
"""By name of the data set."""
_DATA_SETS_OF_TASKS = {
    "clevr_count": "clevr",
    "clevr_distance": "clevr",
    "dsprites_location": "dsprites",
    "dsprites_orientation": "dsprites",
    "kitti_distance": "kitti",
    "smallnorb_azimuth": "smallnorb",
    "smallnorb_elevation": "smallnorb",
}
"""Tasks whose name differs from their data set."""


def data_set_of(task: str) -> str:
    """Name of the data set of a task."""
    return _DATA_SETS_OF_TASKS.get(task, task)


def open_data(task: str, store: Store, max_bytes: int) -> VtabData:
    """The reader of the data set of a task."""
    module, _, name = _READERS[data_set_of(task)].partition(".")
    reader = getattr(importlib.import_module(f"vitline.data_prep.benchmarks.vtab.{module}"), name)
    data: VtabData = reader(store, task, max_bytes)
    return data


def open_task(source: Vtab, recipe: CorpusRecipe) -> RawCorpus:
    """A task from the official files in a folder, or from the directory of one version prepared by TFDS."""
    official_splits = OFFICIAL_SPLITS[data_set_of(source.task)]
    if is_tfds_directory(source.path):
        num_classes = NUM_CLASSES[source.task]
        return OfficialTfdsCorpus(source.path, recipe, source.task, official_splits, VIEWS, num_classes)
    return OfficialCorpus(
        open_data(source.task, open_store(source.path), recipe.decode.max_bytes), official_splits, VIEWS
    )
