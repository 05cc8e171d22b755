"""Data sets that are archives with one folder per class, all in one TFDS split."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from vitline.data_prep.benchmarks.official_files import OfficialFile, official_files
from vitline.data_prep.benchmarks.picture_files import picture_members, picture_parts, picture_paths
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.sources.folder_layout import refusal_by_name
from vitline.data_prep.sources.raw import Part, WorkFolder
from vitline.infra.config import replace
from vitline.infra.storage import Listed


class ClassArchive(BenchmarkData):
    """Files are <anything>/<class>/<file>, keys are <class>_<file>. Classes are in alphabetical order."""

    def keys(self) -> Mapping[str, Sequence[Key]]:
        return {"train": [_key(path) for path in self._paths]}

    def class_names(self) -> Sequence[str]:
        return sorted({path.split("/")[-2] for path in self._paths})

    def parts(self, work: WorkFolder) -> Iterator[Part]:
        yield from picture_parts(self.store, self._archive, work)

    def pictures(self, part: Part, work: WorkFolder) -> Iterator[Found]:
        numbers = {name: number for number, name in enumerate(self.class_names())}
        for member, data, where in picture_members(self.store, part, self.max_bytes, _is_of_class):
            if member.refused:
                yield Found("train", member.path, refused=member.refused)
            else:
                yield Found("train", _key(member.path), numbers[member.path.split("/")[-2]], data, where)

    @property
    def _archive(self) -> str:
        return self.file(self.official.files[0].name)

    @cached_property
    def _paths(self) -> list[str]:
        return [path for path in picture_paths(self.store, self._archive) if _is_of_class(path)]


def _is_of_class(path: str) -> bool:
    return path.count("/") >= 1 and refusal_by_name(path) is None


def _key(path: str) -> str:
    *_, name, file = path.split("/")
    return f"{name}_{file}"


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
