"""ImageNetV2 (arXiv:1902.10811), matched frequency: 10,000 new images, ten per class of ImageNet, collected like its validation
images.

Folder names are the class numbers in the order of the sorted WNIDs, without leading zeros. Some readers sort them as text, which
makes folder 10 class 2.
"""

import re
from collections.abc import Iterator

from vitline.data_prep.benchmarks.image_files import image_members, image_parts, place_of
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.tfds_order import order_prefix
from vitline.data_prep.benchmarks.transfer.imagenet_task import ImagenetTask
from vitline.data_prep.benchmarks.transfer.transfer_splits import TEST_SETS
from vitline.data_prep.config import CorpusRecipe
from vitline.data_prep.sources.folder_layout import readable_id, refusal_by_name
from vitline.data_prep.sources.raw import RawExample, SourcePart, Spill, WorkFolder
from vitline.infra.storage import Store

_IMAGE = re.compile(r"(?:.*/)?(0|[1-9][0-9]*)/([^/]+)", re.DOTALL)


class ImagenetV2(ImagenetTask):
    """Test split only. Ids: test/207_<file>, with the key that TFDS makes of folder and file."""

    official = official_files("imagenet-v2")

    def __init__(self, store: Store, recipe: CorpusRecipe) -> None:
        super().__init__(store, recipe, {"test": TEST_SETS["imagenet-v2"]})

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        _ = self.kit  # raises if its classes differ
        yield from image_parts(self.store, self.files()[self.official.files[0].name].key, work)

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        with Spill(work, part) as spill:
            for member, data, where in image_members(self.store, part, self.max_bytes, _is_image):
                if member.refused:
                    example_id = readable_id(member.path)
                    yield RawExample(example_id, (), "test", spill.base, spill.key, refused=member.refused)
                elif data is not None:
                    yield self._example(member.path, data, where, spill)

    def _example(self, path: str, data: bytes, where: tuple[str, int, int] | None, spill: Spill) -> RawExample:
        named = _IMAGE.fullmatch(path)
        assert named
        number, key, classes = int(named[1]), readable_id(f"{named[1]}_{named[2]}"), self.kit.classes
        refused = None
        if number >= len(classes):
            refused = ("no_label", f"folder {number} is outside of the classes 0 to {len(classes) - 1}")
        return RawExample(
            example_id=f"test/{key}",
            labels=() if refused else (classes[number],),
            split="test",
            refused=refused,
            data=None if refused else data,
            order_key=order_prefix("test", key),
            **place_of(self.store, where, data, spill),
        )


def _is_image(path: str) -> bool:
    return _IMAGE.fullmatch(path) is not None and refusal_by_name(path) is None
