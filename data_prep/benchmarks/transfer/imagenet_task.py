"""Shared by ImageNet and its other test sets: the classes of the development kit, so that a head trained on one can be scored
on the others."""

import hashlib
from collections.abc import Sequence
from functools import cached_property

from vitline.data_prep.benchmarks.official_files import files_fingerprint, official_files
from vitline.data_prep.benchmarks.transfer.transfer_splits import OFFICIAL_SPLITS, TEST_SETS, files_of
from vitline.data_prep.config import CorpusRecipe, Ilsvrc2012
from vitline.data_prep.labels.class_maps import RELEASES
from vitline.data_prep.labels.classes import ClassInfo
from vitline.data_prep.sources.imagenet.ilsvrc2012 import Ilsvrc2012Corpus
from vitline.data_prep.sources.imagenet.ilsvrc2012_kit import KIT, Kit
from vitline.data_prep.sources.raw import ImageSource, SourcePart, WorkFolder
from vitline.infra.storage import Listed, Store


class ImagenetTask(ImageSource):
    """The class map is that of the development kit: sorted WNIDs, names, hierarchy. Its digest is the same for all that declare it."""

    def __init__(self, store: Store, recipe: CorpusRecipe, task: str) -> None:
        self.store, self.max_bytes, self.task = store, recipe.decode.max_bytes, task
        self.official = official_files(files_of(task))
        self.benchmark_rows = OFFICIAL_SPLITS[task].num_rows if task in OFFICIAL_SPLITS else {"test": TEST_SETS[task]}
        self.origin, self.credit = store.uri, f"{self.official.title}; {self.official.terms}"
        self.archives = Ilsvrc2012Corpus(Ilsvrc2012(path=store.uri), recipe)

    def files(self) -> dict[str, Listed]:
        """Files by official name. Raises ValueError that lists the missing ones."""
        return self.official.found(self.store)

    def fingerprint(self) -> str:
        return files_fingerprint(self.files())

    def declared_classes(self) -> tuple[str, ...]:
        return tuple(self.kit.classes)

    def class_info(self, source_id: str) -> ClassInfo:
        return self.kit.class_info(source_id)

    @cached_property
    def kit(self) -> Kit:
        """The development kit. Raises ValueError if its classes are not those of ILSVRC2012."""
        kit, release = self.archives.kit, RELEASES["imagenet1k"]
        digest = hashlib.sha256("\n".join(kit.classes).encode()).hexdigest()
        if digest != release.sha256:
            raise ValueError(
                f"{self.store.uri_of(KIT)} has {len(kit.classes):,} classes, whose WNIDs have sha256 {digest:.12}; "
                f"expected the {release.num_classes:,} classes of {release.what}, {release.sha256:.12}. It is the kit of "
                f"another year, or it was changed. Download {KIT} from {self.official.home}."
            )
        return kit

    def validation_parts(self, work: WorkFolder) -> Sequence[SourcePart]:
        """Parts of the validation archive. Raises ValueError unless it has one image per label of the kit."""
        parts = list(self.archives.validation_parts(work))
        there, expected = sum(part.num_examples for part in parts), OFFICIAL_SPLITS["imagenet"].sizes["validation"]
        if not there == expected == len(self.kit.truth):
            found = f"{there:,} validation images and {KIT} {len(self.kit.truth):,} labels"
            raise self.official.incomplete(self.store, self.files(), found, expected)
        return parts


def file_name(example_id: str) -> str:
    """The file name of the image, which is its key in TFDS, from an id of `Ilsvrc2012Corpus`."""
    return example_id.rpartition("!")[2].rpartition("/")[2]
