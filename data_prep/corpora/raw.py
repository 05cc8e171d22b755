"""What every source gives: a list of examples that says where their bytes are, made without reading an image."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from data_prep.labels import ClassInfo
from infra.storage import Store


@dataclass(frozen=True, slots=True)
class RawExample:
    """One example of a source. Bytes [offset, offset + length) of `key` in the store `base`; no length: to its end."""

    example_id: str
    labels: tuple[str, ...]
    split: str
    base: str
    key: str
    offset: int = 0
    length: int | None = None
    group: str | None = None
    """What shares a split with this example; none: nothing does."""
    weights: tuple[float, ...] | None = None
    refused: tuple[str, str] | None = None
    """Reason and detail where the source knows without reading that this is no example."""


class RawCorpus(ABC):
    """One source, opened by its config."""

    origin: str
    """Where the images come from, written beside every row."""
    credit: str = ""
    """Authors and licence, for the report."""
    single_label: bool = True
    """Whether every example has exactly one label."""
    views: Mapping[str, tuple[str, ...]] = {}
    """Further splits that are others put together, such as train800val200."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Another text when the examples may have changed. Cheap: reads no image, fetches nothing.
        Raises ValueError where the source does not exist."""

    @abstractmethod
    def examples(self, root: Store, spill: Store) -> Iterator[RawExample]:
        """Every example, in an order that the source fixes, without reading image bytes.

        What has no bytes of its own in a store is written to `spill`; what is fetched is kept under `root`.
        Raises ValueError where the source is not what it should be.
        """

    def class_info(self, source_id: str) -> ClassInfo:
        """How a label of `examples` is called and what it is a kind of."""
        return ClassInfo(name=source_id, source_id=source_id)


class FetchUnavailable(RuntimeError):
    """A source cannot be fetched here (no network, no npm, refused): another source may do instead."""
