"""What every data set of VTAB is to the corpus that is made of it: keys as TFDS names them, pictures and labels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from data_prep.corpora.official.official_files import OfficialFiles
from data_prep.corpora.raw import Part, WorkFolder
from infra.storage import Listed, Store

Key = str | int


@dataclass(frozen=True, slots=True)
class Found:
    """One picture: its key, the split of TFDS that it is in, its class, and its bytes."""

    split: str
    key: Key
    label: int = -1
    data: bytes | None = None
    where: tuple[str, int, int] | None = None
    """Object, offset and length in the store of the data set, where the bytes stand there as they are."""
    refused: tuple[str, str] | None = None
    """Reason (of `RejectReason`) and detail. Key and split are as far as they are known."""


class VtabData(ABC):
    """The official files of one data set, read for one of its tasks."""

    official: ClassVar[OfficialFiles]

    def __init__(self, store: Store, task: str, max_bytes: int) -> None:
        """`max_bytes` is the limit of one image."""
        self.store, self.task, self.max_bytes = store, task, max_bytes

    def files(self) -> dict[str, Listed]:
        """The files that there are, by their official name. Raises ValueError that lists the missing ones."""
        return self.official.found(self.store)

    def file(self, name: str) -> str:
        """The object that is the official file `name` here, perhaps under another of its names."""
        return self.files()[name].key

    @abstractmethod
    def keys(self) -> Mapping[str, Sequence[Key]]:
        """Every key of every split of TFDS that VTAB uses. Raises ValueError where a file is not what it should be."""

    @abstractmethod
    def class_names(self) -> Sequence[str]:
        """In the order of the classes."""

    @abstractmethod
    def parts(self, work: WorkFolder) -> Iterator[Part]:
        """As `RawCorpus.parts`."""

    @abstractmethod
    def pictures(self, part: Part, work: WorkFolder) -> Iterator[Found]:
        """Every picture of a part; those of keys that `keys` lacks are left out later."""
