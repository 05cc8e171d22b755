"""Interface of all sources: parts that a worker can read independently, and examples that locate their bytes."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypedDict

import pyarrow as pa
from pydantic import Field, JsonValue, NonNegativeInt

from vitline.data_prep.config import CorpusRecipe
from vitline.data_prep.labels.classes import ClassInfo
from vitline.data_prep.parquet_files import read_table, write_table
from vitline.data_prep.sources.splits import HashedSplit
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Listed, Store


@dataclass(frozen=True, slots=True)
class RawExample:
    """One example of a source. Bytes [offset, offset + length) of `key` in the store `base`; no length: to its end."""

    example_id: str
    labels: tuple[str, ...]
    split: str
    """The split that the source names, or a `HashedSplit`."""
    base: str
    key: str
    offset: int = 0
    length: int | None = None
    group: str | None = None
    """Examples of one group share a split; None: no group."""
    weights: tuple[float, ...] | None = None
    refused: tuple[str, str] | None = None
    """Reason and detail, if the source knows without reading that this is not a usable example."""
    data: bytes | None = None
    """The bytes, if they were read anyway while finding the example, such as in an archive."""
    num_bytes: int = 0
    """Approximate size if `length` is None; only for the progress of `ListedCorpus`."""
    is_link: bool = False
    """Whether a link leads to it, so that it is a copy: of equal images, one that is where its file is stays."""
    order_key: int | None = None
    """uint64 sort key of the rows of a split, for sources with an order of their own. None: by hash."""


class Locator(TypedDict):
    """Where the bytes of an example are, as fields of `RawExample`."""

    base: str
    key: str
    offset: int
    length: int


class SourcePart(FrozenConfig):
    """A unit of a source listing that one task reads: the unit of restart."""

    name: str
    """Unique within the source and the same at every listing, such as the name of an archive."""
    num_bytes: NonNegativeInt = 0
    """Approximate number of bytes to read; for the progress."""
    num_examples: NonNegativeInt = 0
    """Number of examples if it is known without reading; otherwise 0."""
    where: dict[str, JsonValue] = Field(default_factory=dict)
    """Whatever the source needs to find the part again."""


@dataclass(frozen=True)
class WorkFolder:
    """Where a source keeps what it needs between tasks while its corpus is prepared."""

    root: Store
    """Store of the root; fetched data is kept below its `sources/`."""
    store: Store
    """Store for this corpus alone: lists, and below `spill/` the bytes that have no range of their own in the source, such as
    members of a compressed archive. The spill is deleted when the corpus is published."""
    examples_per_part: int
    """Size of a part, for sources that choose it."""


class FirstRows(NamedTuple):
    """The first rows of a split, as a member of a joined split."""

    split: str
    num_rows: int


class ImageSource(ABC):
    """A source, opened from its config. Its content is the same wherever it is opened."""

    origin: str
    """Where the images come from; stored with every row."""
    credit: str = ""
    """Authors and licence, shown in the report."""
    single_label: bool = True
    """Whether every example has exactly one label."""
    when_ids_repeat: str = "Ids are paths in Unicode NFC: rename one of the files."
    """What to do if several examples have one id; the end of the error message."""
    # Makes every corpus usable as a task: settings are chosen on train -> val, and the final training uses both.
    views: Mapping[str, tuple[str | FirstRows, ...]] = MappingProxyType({"trainval": ("train", "val")})
    """Joined splits, such as train800val200: other splits, or first rows of them, one after another. Only those are made whose
    members exist."""
    benchmark_rows: Mapping[str, int] = {}
    """For a benchmark, the number of examples of each split. It is kept as published: no example may be missing or refused, and
    duplicates stay. It may have only a test split. Empty: not a benchmark."""

    lists_ids: bool = False
    """Whether `listed` returns the ids of examples."""

    @property
    def is_test_set(self) -> bool:
        """Whether it is a benchmark without images to train on."""
        return bool(self.benchmark_rows) and "train" not in self.benchmark_rows

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that differs whenever the examples may have changed. Fast: reads no image and fetches nothing.
        Raises ValueError if the source does not exist."""

    def fetch(self, root: Store, say: Callable[[str], None]) -> None:
        """Downloads what the source needs, if it is not kept below the root already. By default a source needs nothing.
        Raises FetchUnavailable."""
        return

    @abstractmethod
    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        """Every part, without reading images; a part has at least one file or archive member.
        Raises ValueError if the source is not of the expected kind, FetchUnavailable if it cannot be fetched."""

    @abstractmethod
    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        """The examples of a part. Unreadable ones, and files that are not images by their names, are included as refused.

        Everything in the source becomes an example or a refusal. Raises OSError and StoreFailed from the store.
        """

    def listed(self, part: SourcePart, work: WorkFolder) -> pa.Table:
        """The examples of a part as EXAMPLE_SCHEMA, in the order of `examples`, as far as they are known without reading images.
        Raises as `examples`, and ValueError for a source without `lists_ids`."""
        raise ValueError(f"not supported: the ids of {type(self).__name__} are known only once its images are read")

    def structure(self, work: WorkFolder) -> str:
        """How names of folders and files were understood, for people, once `parts` is exhausted. Empty: nothing had to be."""
        return ""

    def declared_classes(self) -> tuple[str, ...]:
        """Labels that are classes whether an example has them or not. Empty: the labels of the examples are the classes."""
        return ()

    def class_info(self, source_id: str) -> ClassInfo:
        """Name and ancestors of a label of `examples`."""
        return ClassInfo(name=source_id, source_id=source_id)


class ListedCorpus(ImageSource):
    """A source that is one list of locations. Its parts are consecutive pieces of the list, kept in the work folder."""

    lists_ids = True

    @abstractmethod
    def listing(self, work: WorkFolder) -> Iterator[RawExample]:
        """Every example without `data`, in an order that the source defines. Raises as `parts`."""

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        batch: list[RawExample] = []
        number = 0
        for example in self.listing(work):
            batch.append(example)
            if len(batch) == work.examples_per_part:
                yield self._kept(work, number, batch)
                batch, number = [], number + 1
        if batch:
            yield self._kept(work, number, batch)

    def examples(self, part: SourcePart, work: WorkFolder) -> Iterator[RawExample]:
        yield from examples_of(self.listed(part, work))

    def listed(self, part: SourcePart, work: WorkFolder) -> pa.Table:
        return read_table(work.store, _list_key(part.name))

    @staticmethod
    def _kept(work: WorkFolder, number: int, batch: list[RawExample]) -> SourcePart:
        name = f"{number:06d}"
        write_table(work.store, _list_key(name), table_of(batch))
        num_bytes = sum(example.length or example.num_bytes for example in batch)
        return SourcePart(name=name, num_bytes=num_bytes, num_examples=len(batch))


_LISTS = "lists/"


def _list_key(name: str) -> str:
    return f"{_LISTS}{name}.parquet"


def kept_lists(work: WorkFolder) -> Iterator[pa.Table]:
    """The lists that `ListedCorpus.parts` has saved, as EXAMPLE_SCHEMA; none for other sources."""
    for listed in work.store.scan(_LISTS):
        yield read_table(work.store, listed.key)


EXAMPLE_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.string()), nullable=False),
        pa.field("weights", pa.list_(pa.float32())),
        pa.field("split", pa.string(), nullable=False),
        pa.field("val_fraction", pa.float64()),  # shares with which the split is drawn; null: named by the source
        pa.field("test_fraction", pa.float64()),
        pa.field("group", pa.string()),
        pa.field("base", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64()),
        pa.field("order_key", pa.uint64()),
        pa.field("is_link", pa.bool_(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
    ]
)


class ExampleRow(TypedDict):
    """A row of EXAMPLE_SCHEMA."""

    example_id: str
    labels: Sequence[str]
    weights: Sequence[float] | None
    split: str
    val_fraction: float | None
    test_fraction: float | None
    group: str | None
    base: str
    key: str
    offset: int
    length: int | None
    order_key: int | None
    is_link: bool
    reason: str | None
    detail: str | None


def row_of(example: RawExample) -> ExampleRow:
    """An example as a row of EXAMPLE_SCHEMA, without its bytes."""
    drawn = example.split if isinstance(example.split, HashedSplit) else None
    reason, detail = example.refused or (None, None)
    return {
        "example_id": example.example_id,
        "labels": example.labels,
        "weights": example.weights,
        "split": example.split,
        "val_fraction": drawn.val_fraction if drawn else None,
        "test_fraction": drawn.test_fraction if drawn else None,
        "group": example.group,
        "base": example.base,
        "key": example.key,
        "offset": example.offset,
        "length": example.length,
        "order_key": example.order_key,
        "is_link": example.is_link,
        "reason": reason,
        "detail": detail,
    }


def table_of(examples: Iterable[RawExample]) -> pa.Table:
    """Examples as a table of EXAMPLE_SCHEMA."""
    return pa.Table.from_pylist([row_of(example) for example in examples], schema=EXAMPLE_SCHEMA)


def examples_of(table: pa.Table) -> Iterator[RawExample]:
    """The examples of a table of EXAMPLE_SCHEMA."""
    for row in table.to_pylist():
        reason, detail = row.pop("reason"), row.pop("detail")
        val_fraction, test_fraction = row.pop("val_fraction"), row.pop("test_fraction")
        if val_fraction is not None:
            row["split"] = HashedSplit(row["group"] or row["example_id"], val_fraction, test_fraction)
        labels, weights = tuple(row.pop("labels")), row.pop("weights")
        yield RawExample(
            **row,
            labels=labels,
            weights=None if weights is None else tuple(weights),
            refused=None if reason is None else (reason, detail),
        )


class Spill:
    """Appends bytes of examples that have no range of their own in the source to one object of the work folder.

    `with Spill(work, part) as spill`: visible at a clean exit; written anew when the part is read again.
    """

    def __init__(self, work: WorkFolder, part: SourcePart) -> None:
        self.key = f"spill/{part.name}"
        self.base, self._writer, self._position = work.store.uri, work.store.writer(self.key), 0

    def __enter__(self) -> "Spill":
        self._file = self._writer.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._writer.__exit__(*raised)

    def keep(self, data: bytes) -> Locator:
        """Append bytes; returns where they are."""
        offset = self._position
        self._file.write(data)
        self._position += len(data)
        return {"base": self.base, "key": self.key, "offset": offset, "length": len(data)}


def files_digest(files: Iterable[Listed], about: str = "") -> str:
    """Digest of `about`, and of names, sizes and tags of files: the fingerprint of most sources."""
    digest = hashlib.sha256(about.encode())
    for file in files:
        digest.update(f"{file.key}\0{file.size}\0{file.tag}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


class SplitRule:
    """Assigns splits, by the names of the source and by hash."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "train": "train",
        "training": "train",
        "trainval": "train",
        "val": "val",
        "valid": "val",
        "validation": "val",
        "dev": "val",
        "test": "test",
        "testing": "test",
        "eval": "test",
        "evaluation": "test",
    }
    """Names of splits in sources; as on the Hugging Face Hub, with trainval."""

    def __init__(self, recipe: CorpusRecipe, present: frozenset[str] = frozenset()) -> None:
        """`present`: the splits that the source names. Missing ones are drawn from train: val if there is no val, test if
        there is neither val nor test. With `val_per_class`, planning takes val from train instead."""
        self._test_fraction = 0.0 if present & {"val", "test"} else recipe.test_fraction
        self._val_fraction = 0.0 if "val" in present or recipe.val_per_class else recipe.val_fraction

    def assign_split(self, group_key: str, named: str | None = None) -> str:
        """The split of an example: as named, or a `HashedSplit`. `group_key`: the group, or the example id if it has none."""
        if named in ("val", "test"):
            return named
        return HashedSplit(group_key, self._val_fraction, self._test_fraction)


class FetchUnavailable(RuntimeError):
    """A source cannot be fetched (no network, no npm, access refused); another source may be used instead."""
