"""Every benchmark (the tasks of VTAB, and the other data sets of the ViT paper) with its reader, its official splits and its
number of classes. A new data set needs a reader, official files and splits, and an entry here."""

from collections.abc import Mapping
from pkgutil import resolve_name

from vitline.data_prep.benchmarks.official_corpus import OfficialCorpus
from vitline.data_prep.benchmarks.official_files import OfficialFiles, official_files
from vitline.data_prep.benchmarks.official_splits import OFFICIAL_SPLITS, VIEWS
from vitline.data_prep.benchmarks.transfer import transfer_splits
from vitline.data_prep.benchmarks.transfer.transfer_splits import CORRUPTED, CORRUPTIONS, files_of
from vitline.data_prep.benchmarks.vtab.vtab_tfds import OfficialTfdsCorpus, is_tfds_directory
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData
from vitline.data_prep.config import CorpusRecipe, Transfer, Vtab
from vitline.data_prep.sources.raw import ImageSource
from vitline.infra.storage import Store, open_store

_BELOW = "vitline.data_prep.benchmarks."
_READERS = {
    "caltech101": "vtab.caltech101.Caltech101",
    "cifar10": "vtab.pixel_arrays.Cifar10",
    "cifar100": "vtab.pixel_arrays.Cifar100",
    "dtd": "vtab.listed_archives.Dtd",
    "flowers102": "vtab.listed_archives.Flowers102",
    "pets": "vtab.listed_archives.Pets",
    "sun397": "vtab.sun397.Sun397",
    "svhn": "vtab.pixel_arrays.Svhn",
    "patch_camelyon": "vtab.patch_camelyon.PatchCamelyon",
    "eurosat": "vtab.class_archives.EuroSat",
    "resisc45": "vtab.class_archives.Resisc45",
    "diabetic_retinopathy": "vtab.diabetic_retinopathy.DiabeticRetinopathy",
    "clevr": "vtab.clevr.Clevr",
    "dmlab": "vtab.dmlab.DmLab",
    "dsprites": "vtab.dsprites.DSprites",
    "kitti": "vtab.kitti.Kitti",
    "smallnorb": "vtab.smallnorb.SmallNorb",
}
"""`BenchmarkData` by data set, below _BELOW; only the libraries that it needs are imported."""
_IMAGENET = {
    "imagenet": "transfer.imagenet.Imagenet",
    "imagenet-real": "transfer.imagenet_real.ImagenetReal",
    "imagenet-v2": "transfer.imagenet_folders.ImagenetV2",
    "imagenet-a": "transfer.imagenet_folders.ImagenetSubset",
    "imagenet-r": "transfer.imagenet_folders.ImagenetSubset",
    "imagenet-sketch": "transfer.imagenet_folders.ImagenetFolders",
    "objectnet": "transfer.objectnet.ObjectNet",
    **{f"{CORRUPTED}{name}": "transfer.imagenet_folders.ImagenetC" for name in CORRUPTIONS},
}
"""`ImagenetTask` by task. They are corpora of their own: their class map is that of the development kit."""
_DATA_SETS_OF_TASKS = {
    "clevr_count": "clevr",
    "clevr_distance": "clevr",
    "dsprites_location": "dsprites",
    "dsprites_orientation": "dsprites",
    "kitti_distance": "kitti",
    "smallnorb_azimuth": "smallnorb",
    "smallnorb_elevation": "smallnorb",
    **dict.fromkeys(_IMAGENET, "imagenet"),
}
"""Tasks whose name differs from their data set."""
NUM_CLASSES: Mapping[str, int] = {
    "caltech101": 102,
    "cifar10": 10,
    "cifar100": 100,
    "dtd": 47,
    "flowers102": 102,
    "pets": 37,
    "sun397": 397,
    "svhn": 10,
    "patch_camelyon": 2,
    "eurosat": 10,
    "resisc45": 45,
    "diabetic_retinopathy": 5,
    "clevr_count": 8,
    "clevr_distance": 6,
    "dmlab": 6,
    "dsprites_location": 16,
    "dsprites_orientation": 16,
    "kitti_distance": 4,
    "smallnorb_azimuth": 18,
    "smallnorb_elevation": 9,
}
"""Number of classes of every task but ImageNet's."""


def data_set_of(task: str) -> str:
    """Name of the data set of a task."""
    return _DATA_SETS_OF_TASKS.get(task, task)


def official_files_of(task: str) -> OfficialFiles:
    """The official files of a task, and where to get them."""
    return official_files(files_of(task) if task in _IMAGENET else data_set_of(task))


def open_data(task: str, store: Store, max_bytes: int) -> BenchmarkData:
    """The reader of the data set of a task."""
    data: BenchmarkData = resolve_name(f"{_BELOW}{_READERS[data_set_of(task)]}")(store, task, max_bytes)
    return data


def open_task(source: Vtab | Transfer, recipe: CorpusRecipe) -> ImageSource:
    """A task from the official files in a folder or, except for ImageNet, from the directory of one version prepared by TFDS."""
    task, store = source.task, open_store(source.path)
    if task in _IMAGENET:
        imagenet: ImageSource = resolve_name(f"{_BELOW}{_IMAGENET[task]}")(store, recipe, task)
        return imagenet
    all_splits, views = (
        (OFFICIAL_SPLITS, VIEWS)
        if isinstance(source, Vtab)
        else (transfer_splits.OFFICIAL_SPLITS, transfer_splits.VIEWS)
    )
    official_splits = all_splits[data_set_of(task)]
    if is_tfds_directory(source.path):
        return OfficialTfdsCorpus(source.path, recipe, task, official_splits, views, NUM_CLASSES[task])
    return OfficialCorpus(open_data(task, store, recipe.decode.max_bytes), official_splits, views)
