"""Data sets that are archives with one folder per class, all in one TFDS split."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from vitline.data_prep.benchmarks.image_files import image_paths
from vitline.data_prep.benchmarks.labelled_archive import LabelledArchive
from vitline.data_prep.benchmarks.official_files import OfficialFile, official_files
from vitline.data_prep.sources.folder_layout import refusal_by_name
from vitline.infra.config import replace
from vitline.infra.storage import Listed


class ClassArchive(LabelledArchive):
    """Files are <anything>/<class>/<file>, keys are <class>_<file>. Classes are in alphabetical order."""

    def class_names(self) -> Sequence[str]:
        return sorted({path.split("/")[-2] for path in self._paths})

    def labels(self) -> Mapping[str, Mapping[str, int]]:
        numbers = {name: number for number, name in enumerate(self.class_names())}
        return {"train": {_key(path): numbers[path.split("/")[-2]] for path in self._paths}}

    def key_of(self, path: str) -> str | None:
        return _key(path) if _is_of_class(path) else None

    @cached_property
    def _paths(self) -> list[str]:
        return [path for path in image_paths(self.store, self.archive) if _is_of_class(path)]


def _is_of_class(path: str) -> bool:
    return path.count("/") >= 1 and refusal_by_name(path) is None


def _key(path: str) -> str:
    return "_".join(path.split("/")[-2:])


class EuroSat(ClassArchive):
    """Sentinel-2 images in RGB, 64 x 64."""

    official = official_files("eurosat")


class Resisc45(ClassArchive):
    """Aerial images, 256 x 256, 700 per class. The official archive is a RAR, which must be repacked."""

    official = official_files("resisc45")

    def files(self) -> dict[str, Listed]:
        """As the base class. If only the RAR exists, raises ValueError that says how to repack it."""
        found, (rar,) = super().files(), self.official.files
        if found[rar.name].key != rar.name:
            return found
        first, *others = rar.other_names
        readable = replace(self.official, files=(OfficialFile(name=first, other_names=tuple(others)),))
        try:
            return {rar.name: readable.found(self.store)[first]}
        except ValueError:
            raise ValueError(
                f"{self.store.uri_of(rar.name)} cannot be read, because RAR needs a special program. Unpack it there, or "
                "repack it, for example: bsdtar -cf NWPU-RESISC45.tar @NWPU-RESISC45.rar"
            ) from None
