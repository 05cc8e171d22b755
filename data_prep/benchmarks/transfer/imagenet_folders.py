"""Test sets of ImageNet's classes whose images are in class folders of an archive: V2, A, R, Sketch and C.

- V2 (arXiv:1902.10811), matched frequency: ten new images per class, collected like the validation images. Its folders are the class
  numbers in the order of the sorted WNIDs, without leading zeros. Some readers sort them as text, which makes folder 10 class 2.
- A (arXiv:1907.07174): natural images that ResNet-50 gets wrong. R (arXiv:2006.16241): renditions. Both have 200 classes, and models
  are to choose among these only: so they are all classes of the corpus.
- Sketch (arXiv:1905.13549): drawings of all classes.
- C (arXiv:1903.12261): the validation images, corrupted in 15 ways; a corpus for each, with all five severities.
"""

import re
from collections.abc import Iterator

from vitline.data_prep.benchmarks.image_files import image_members, image_parts, place_of
from vitline.data_prep.benchmarks.tfds_order import order_prefix
from vitline.data_prep.benchmarks.transfer.imagenet_task import ImagenetTask
from vitline.data_prep.benchmarks.transfer.transfer_splits import CORRUPTED, CORRUPTIONS
from vitline.data_prep.config import CorpusRecipe
from vitline.data_prep.decode import ImageRejected
from vitline.data_prep.sources.folder_layout import readable_id, refusal_by_name
from vitline.data_prep.sources.raw import RawExample, SourcePart, Spill, WorkFolder
from vitline.infra.storage import Store


class ImagenetFolders(ImagenetTask):
    """Test split only, of the first official file. Ids: test/n01440764_<file>."""

    image = re.compile(r"(?:.*/)?(?P<folder>n[0-9]{8})/([^/]+)", re.DOTALL)
    """What the paths of images look like. Their groups, of which one is `folder`, make the id: of V2 as TFDS does."""

    def labels_of(self, folder: str) -> tuple[str, ...]:
        """The WNIDs of the images in a folder; empty if there are none."""
        return (folder,) if folder in self.kit.by_wnid and self.kit.by_wnid[folder].is_class else ()

    def made(self, data: bytes) -> bytes:
        """The image to store of a file: by default the file itself. Raises ImageRejected."""
        return data

    def is_image(self, path: str) -> bool:
        return self.image.fullmatch(path) is not None and refusal_by_name(path) is None

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        _ = self.kit  # raises if its classes differ
        yield from image_parts(self.store, self.files()[self.official.files[0].name].key, work)

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        with Spill(work, part) as spill:
            for member, data, where in image_members(self.store, part, self.max_bytes, self.is_image):
                if member.refused:
                    example_id = readable_id(member.path)
                    yield RawExample(example_id, (), "test", spill.base, spill.key, refused=member.refused)
                elif data is not None:
                    yield self._example(member.path, data, where, spill)

    def _example(self, path: str, data: bytes, where: tuple[str, int, int] | None, spill: Spill) -> RawExample:
        named = self.image.fullmatch(path)
        assert named
        key, labels, image, refused = readable_id("_".join(named.groups())), self.labels_of(named["folder"]), data, None
        if not labels:
            refused = ("no_label", f"folder {named['folder']} is none of the {len(self.kit.classes):,} classes")
        else:
            try:
                image = self.made(data)
            except ImageRejected as error:
                refused = (error.reason, error.detail)
        return RawExample(
            example_id=f"test/{key}",
            labels=() if refused else labels,
            split="test",
            refused=refused,
            data=None if refused else image,
            order_key=order_prefix("test", key),
            **place_of(self.store, where if image is data else None, image, spill),
        )


class ImagenetV2(ImagenetFolders):
    """Ids: test/207_<file>."""

    image = re.compile(r"(?:.*/)?(?P<folder>0|[1-9][0-9]*)/([^/]+)", re.DOTALL)

    def labels_of(self, folder: str) -> tuple[str, ...]:
        return tuple(self.kit.classes[int(folder) : int(folder) + 1])


class ImagenetSubset(ImagenetFolders):
    """A and R. The classes of the corpus are those that have images."""

    def declared_classes(self) -> tuple[str, ...]:
        return ()


class ImagenetC(ImagenetFolders):
    """One corruption. Ids: test/3_n01440764_<file>, where 3 is the severity."""

    def __init__(self, store: Store, recipe: CorpusRecipe, task: str) -> None:
        super().__init__(store, recipe, task)
        corruption = CORRUPTIONS[task.removeprefix(CORRUPTED)].folder
        self.image = re.compile(rf"(?:.*/)?{corruption}/([1-5])/(?P<folder>n[0-9]{{8}})/([^/]+)", re.DOTALL)
