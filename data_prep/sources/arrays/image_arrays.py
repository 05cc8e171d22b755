"""Pixel arrays, with each image as a lossless PNG in the spill: CIFAR's binary archives, idx files (as for MNIST), npz.

Nothing is unpickled. Files are streamed: some MiB of images are in memory, and for CIFAR one file of the archive. Headers are compared with
the available bytes before any image is read. A damaged array is a ValueError and never a partial result: after a flipped bit, a
compressed file continues with wrong pixels until its checksum is verified at the end.
The official test part becomes test; val is drawn from train if there is none.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vitline.data_prep.archives.lossless_png import lossless_png
from vitline.data_prep.config import CorpusRecipe, ImageArrays
from vitline.data_prep.labels.classes import ClassInfo, number_label
from vitline.data_prep.labels.label_texts import numbered_class
from vitline.data_prep.sources.arrays.array_layouts import ArrayImage, Arrays
from vitline.data_prep.sources.arrays.cifar_archive import Cifar
from vitline.data_prep.sources.arrays.paired_arrays import Idx, Npz
from vitline.data_prep.sources.raw import (
    ImageSource,
    RawExample,
    SourcePart,
    Spill,
    SplitRule,
    WorkFolder,
    files_digest,
)
from vitline.infra.storage import open_store

_LAYOUTS: Mapping[str, type[Arrays]] = {
    "cifar10": Cifar,
    "cifar100": Cifar,
    "cifar100_coarse": Cifar,
    "idx": Idx,
    "npz": Npz,
}


class ImageArraysCorpus(ImageSource):
    """Arrays of one layout. An example id is the split of the array and the position in it, such as train/00001."""

    def __init__(self, source: ImageArrays, recipe: CorpusRecipe) -> None:
        self.origin = open_store(source.path).uri
        self._recipe, self._arrays = recipe, _LAYOUTS[source.layout](self.origin, source.layout)

    def fingerprint(self) -> str:
        return files_digest(self._arrays.files())

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        yield from self._arrays.parts(self._recipe.decode.max_pixels)

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        present: Any = part.where["present"]
        rule = SplitRule(self._recipe, frozenset(present))
        with Spill(work, part) as spill:
            for image in self._arrays.images(part):
                yield _as_example(image, rule, spill, self._arrays.num_classes)

    def class_info(self, source_id: str) -> ClassInfo:
        return numbered_class(source_id, self._arrays.class_names())


def _as_example(image: ArrayImage, rule: SplitRule, spill: Spill, num_classes: int | None) -> RawExample:
    example_id = f"{image.split or 'images'}/{image.number:05d}"
    split = rule.assign_split(example_id, image.split)
    if image.label < 0 or (num_classes is not None and image.label >= num_classes):
        refused = ("no_label", f"label {image.label} is not a class ({num_classes or 'unknown number of'} classes)")
        return RawExample(example_id, (), split, spill.base, spill.key, refused=refused)
    file = lossless_png(image.pixels)
    return RawExample(
        example_id=example_id,
        labels=(number_label(image.label),),
        split=split,
        data=file,
        **spill.keep(file),
    )
