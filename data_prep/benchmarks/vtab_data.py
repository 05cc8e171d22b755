"""Interface of VTAB's data sets for the corpus made from them: keys of TFDS, images and labels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vitline.data_prep.benchmarks.official_files import OfficialFiles
from vitline.data_prep.sources.raw import SourcePart, WorkFolder
from vitline.infra.storage import Listed, Store

Key = str | int


@dataclass(frozen=True, slots=True)
class Found:
    """One image: its key, its TFDS split, its class and its bytes."""

    split: str
    key: Key
    label: int = -1
    data: bytes | None = None
    where: tuple[str, int, int] | None = None
    """Object, offset and length in the store of the data set, if the bytes are stored plainly."""
    refused: tuple[str, str] | None = None
    """Reason (of `RejectReason`) and detail. Key and split are given as far as they are known."""


class BenchmarkData(ABC):
    """The official files of one data set, read for one of its tasks."""

    official: ClassVar[OfficialFiles]

    def __init__(self, store: Store, task: str, max_bytes: int) -> None:
        """`max_bytes`: limit of one image."""
        self.store, self.task, self.max_bytes = store, task, max_bytes

    def files(self) -> dict[str, Listed]:
        """The files that are present, by official name. Raises ValueError that lists the missing ones."""
        return self.official.found(self.store)

    def file(self, name: str) -> str:
        """Key of the official file `name`, which may have another accepted name."""
        return self.files()[name].key

    @abstractmethod
    def keys(self) -> Mapping[str, Sequence[Key]]:
        """Every key of every TFDS split that VTAB uses. Raises ValueError if a file is not as expected."""

    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """Class names in the order of the classes."""

    @abstractmethod
    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        """As `ImageSource.parts`."""

    @abstractmethod
    def images(self, part: SourcePart, work: WorkFolder) -> Iterator[Found]:
        """Every image of a part; images whose keys are not in `keys` are left out later."""
