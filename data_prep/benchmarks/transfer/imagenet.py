"""ImageNet-1k: test is the 50,000 validation images, val the last 1 % of train in the order of TFDS.

TFDS sorts by a hash of file names, so where that 1 % begins depends on the names of all 1,281,167 training images. Listing therefore
reads the headers of the training archive once; afterwards every example determines its split by itself. A split by our own hash
would need no listing, but val would differ from the images on which the published learning rates were chosen.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from vitline.data_prep.archives.archives import index
from vitline.data_prep.benchmarks.tfds_order import order_prefix
from vitline.data_prep.benchmarks.transfer.imagenet_task import ImagenetTask, file_name
from vitline.data_prep.benchmarks.transfer.transfer_splits import OFFICIAL_SPLITS, VIEWS
from vitline.data_prep.sources.folder_layout import is_image
from vitline.data_prep.sources.raw import RawExample, SourcePart, WorkFolder

_VAL_BEGINS = "val-begins.json"
# Each header is one read. A tenth of the archive, 128,100 headers on a local disk, took 29 s with one thread, 9 s with these.
_LIST_THREADS = 16


class Imagenet(ImagenetTask):
    """Parts: the tar of each synset, and pieces of the validation archive. Ids: train/n01440764_18.JPEG and
    validation/ILSVRC2012_val_00000001.JPEG."""

    views = VIEWS

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        self.files()  # raises if one is missing
        validation, train = self.validation_parts(work), list(self.archives.training_parts())
        work.store.write_json(_VAL_BEGINS, self._val_begins(train))
        yield from train
        yield from validation

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        is_train = "synset" in part.where
        tfds_split, val_begins = ("train", work.store.read_json(_VAL_BEGINS)) if is_train else ("validation", 0)
        for example in self.archives.examples(part, work):
            if example.refused:
                yield example
                continue
            name = file_name(example.example_id)
            place_in_order = order_prefix(tfds_split, name)
            split = ("train" if place_in_order < val_begins else "val") if is_train else "test"
            yield replace(example, example_id=f"{tfds_split}/{name}", split=split, order_key=place_in_order)

    def _val_begins(self, train: Sequence[SourcePart]) -> int:
        """`order_prefix` of the first image of val. Raises ValueError unless the archive has all training images."""
        with ThreadPoolExecutor(_LIST_THREADS) as threads:
            prefixes = np.sort(np.concatenate(list(threads.map(self._prefixes, train))))
        splits = OFFICIAL_SPLITS[self.task]
        if len(prefixes) != (expected := splits.sizes["train"]):
            raise self.official.incomplete(self.store, self.files(), f"{len(prefixes):,} training images", expected)
        return int(prefixes[splits.val.start])

    def _prefixes(self, part: SourcePart) -> np.ndarray:
        """`order_prefix` of every image in the tar of a synset. Raises ValueError if it is damaged."""
        where: Any = part.where
        if "synset" not in where:
            return np.empty(0, np.uint64)
        found = []
        for member in index(self.store, where["key"], where["start"], where["end"]):
            if member.kind == "damage" and member.refused:
                raise ValueError(f"{self.store.uri_of(where['key'])}: {member.refused[1]}. Download it again.")
            if member.kind == "file" and not member.refused and is_image(member):
                found.append(order_prefix("train", file_name(member.path)))
        return np.array(found, np.uint64)
