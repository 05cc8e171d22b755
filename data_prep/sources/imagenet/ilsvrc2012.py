"""ImageNet-1k (ILSVRC2012) as distributed: two archives of images, and the development kit with the labels."""

import functools
import posixpath
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vitline.data_prep.archives.archive_members import Member
from vitline.data_prep.archives.archives import index, read_members, stretches
from vitline.data_prep.config import CorpusRecipe, Ilsvrc2012
from vitline.data_prep.labels.classes import ClassInfo
from vitline.data_prep.sources.folder_layout import is_image, readable_id, refusal_by_name
from vitline.data_prep.sources.imagenet.ilsvrc2012_kit import KIT, Kit, read_kit
from vitline.data_prep.sources.imagenet.imagenet21k import OTHERS, refused_tars, synset_examples, synset_parts
from vitline.data_prep.sources.raw import ImageSource, RawExample, SourcePart, SplitRule, WorkFolder, files_digest
from vitline.infra.storage import open_store

TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_([0-9]{8})\.JPEG", re.IGNORECASE)


class Ilsvrc2012Corpus(ImageSource):
    """1,000 classes by WNID, one label per image. Parts: the tar of each synset, and pieces of the validation archive.

    Ids are `ILSVRC2012_img_train.tar!n01440764.tar!n01440764_18.JPEG` and
    `ILSVRC2012_img_val.tar!ILSVRC2012_val_00000001.JPEG`.
    """

    def __init__(self, source: Ilsvrc2012, recipe: CorpusRecipe) -> None:
        self._store, self._max_bytes = open_store(source.path), recipe.decode.max_bytes
        self.origin, self._val_split = self._store.uri, source.validation_is
        self._split_rule = SplitRule(recipe, frozenset({"train", source.validation_is}))

    def fingerprint(self) -> str:
        names = sorted((TRAIN, VAL, KIT))
        found = [listed for name in names for listed in self._store.scan(name) if listed.key == name]
        if missing := {*names} - {listed.key for listed in found}:
            raise ValueError(
                f"{self.origin} lacks {', '.join(sorted(missing))}. Give the folder with the files as distributed by image-net.org."
            )
        return files_digest(found)

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        self.fingerprint()  # raises if a file is missing
        _ = self.kit  # raises if it is damaged, before the archives are read
        yield from self.training_parts()
        yield from self.validation_parts(work)

    def training_parts(self) -> Iterator[SourcePart]:
        """The tar of each synset, as `synset_part`, then one part for all other members. Raises ValueError if there is no
        synset."""
        nothing = f"{self._store.uri_of(TRAIN)} holds no n########.tar. Download it again."
        yield from synset_parts(index(self._store, TRAIN), TRAIN, nothing, "train-")

    def validation_parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        """Pieces of the validation archive."""
        for number, stretch in enumerate(stretches(index(self._store, VAL), work.examples_per_part)):
            yield SourcePart(
                name=f"val-{number:06d}",
                num_bytes=stretch.num_bytes,
                num_examples=stretch.num_members,
                where=stretch.where,
            )

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        if part.name.startswith("val-"):
            stretch: Any = part.where
            for member, data in read_members(self._store, VAL, self._max_bytes, **stretch, wanted=is_image):
                if member.kind != "folder":
                    yield self._validation_example(member, data)
            return
        if part.name == f"train-{OTHERS}":
            found = refused_tars(self._store, TRAIN, index(self._store, TRAIN), f"{TRAIN}!")
        else:
            found = synset_examples(self._store, part, self._max_bytes, f"{TRAIN}!")
        for example in found:
            yield replace(example, split=self._split_rule.assign_split(example.example_id, "train"))

    def class_info(self, source_id: str) -> ClassInfo:
        return self.kit.class_info(source_id)

    def _validation_example(self, member: Member, data: bytes | None) -> RawExample:
        labels: tuple[str, ...] = ()
        refused = member.refused or refusal_by_name(member.path)
        if not refused and member.kind != "file":
            refused = ("ignored_file", f"link to {member.target!r:.200}")
        if not refused:
            number = validation_number(posixpath.basename(member.path))
            if 1 <= number <= len(self.kit.truth):
                labels = (self.kit.truth[number - 1],)
            else:
                refused = (
                    "no_label",
                    f"the kit has labels only for ILSVRC2012_val_00000001 to {len(self.kit.truth):08d}",
                )
        return RawExample(
            example_id=f"{VAL}!{readable_id(member.path)}",
            labels=labels,
            split=self._val_split,
            base=self._store.uri,
            key=VAL,
            offset=member.offset or 0,
            length=member.size,
            refused=refused,
            data=None if refused else data,
        )

    @functools.cached_property
    def kit(self) -> Kit:
        """The development kit. Raises ValueError if it is not as expected."""
        return read_kit(self._store)


def validation_number(name: str) -> int:
    """Number of a validation image by its name, 1 to 50,000; 0 for any other name."""
    named = _VAL_IMAGE.fullmatch(name)
    return int(named[1]) if named else 0
