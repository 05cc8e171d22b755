"""ImageNet ReaL (arXiv:2006.07159): ImageNet's validation images with lists of labels, each of which counts as correct.

Entry i of real.json belongs to validation image i + 1; numbers refer to the sorted WNIDs. Images without labels are excluded from the
average: they are refused, and so counted and listed. If the labels differ from the published ones, the whole file is refused: it is
small, and the score depends on nothing but the labels. The formatting of the JSON is irrelevant.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.tfds_order import order_prefix
from vitline.data_prep.benchmarks.transfer.imagenet_task import ImagenetTask, file_name
from vitline.data_prep.sources.imagenet.ilsvrc2012 import validation_number
from vitline.data_prep.sources.raw import RawExample, SourcePart, WorkFolder

_REAL = "real.json"
_MAX_REAL_BYTES = 16 << 20
(REAL_SHA256,) = (file.sha256 for file in official_files("imagenet-real").files if file.name == _REAL)
"""sha256 of the published real.json, which equals the output of json.dumps for its lists."""


class ImagenetReal(ImagenetTask):
    """Test split only, several labels per image. Parts and ids are those of the validation images in `Imagenet`."""

    single_label = False

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        self.files()  # raises if one is missing
        _ = self._labels  # raises if they are not those of ReaL
        yield from self.validation_parts(work)

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        for example in self.archives.examples(part, work):
            if example.refused:
                yield example
                continue
            name = file_name(example.example_id)
            labels = self._labels[validation_number(name) - 1]
            yield replace(
                example,
                example_id=f"validation/{name}",
                labels=labels,
                order_key=order_prefix("validation", name),
                data=example.data if labels else None,
                refused=None if labels else ("ignored_file", "ReaL has no label for this image"),
            )

    @cached_property
    def _labels(self) -> list[tuple[str, ...]]:
        """The WNIDs of every validation image, in order."""
        classes = self.kit.classes
        try:
            numbers = label_lists(self.store.read(_REAL, 0, _MAX_REAL_BYTES))
        except (ValueError, RecursionError) as error:
            raise self.official.damaged(self.store.uri_of(_REAL), error) from error
        return [tuple(classes[number] for number in of_image) for of_image in numbers]


def label_lists(data: bytes) -> list[list[int]]:
    """Labels of every image, in order, from the text of real.json. Raises ValueError if they are not the published ones."""
    lists: list[list[int]] = json.loads(data)
    if (digest := hashlib.sha256(json.dumps(lists).encode()).hexdigest()) != REAL_SHA256:
        raise ValueError(f"its labels (sha256 {digest:.12}) are not the published ones ({REAL_SHA256:.12})")
    return lists
