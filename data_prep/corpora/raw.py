"""What every source gives: parts that a worker can read by itself, and examples that say where their bytes are."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, JsonValue, NonNegativeInt

from data_prep.config import CorpusRecipe
from data_prep.labels.classes import ClassInfo
from data_prep.parquet_files import read_parquet
from data_prep.splits import DrawnSplit
from infra.config import FrozenConfig
from infra.storage import Store


@dataclass(frozen=True, slots=True)
class RawExample:
    """One example of a source. Bytes [offset, offset + length) of `key` in the store `base`; no length: to its end."""

    example_id: str
    labels: tuple[str, ...]
    split: str
    """As the source names it, or a `DrawnSplit`."""
    base: str
    key: str
    offset: int = 0
    length: int | None = None
    group: str | None = None
    """What shares a split with this example; none: nothing does."""
    weights: tuple[float, ...] | None = None
    refused: tuple[str, str] | None = None
    """Reason and detail where the source knows without reading that this is no example."""
    data: bytes | None = None
    """The bytes, where finding the example has read them anyway, as in an archive."""
    num_bytes: int = 0
    """About how many, where `length` is none; for the progress of `ListedCorpus` only."""
    order_key: int | None = None
    """uint64 by which the rows of a split are sorted, of sources with an order of their own. None: by its hash."""


class Part(FrozenConfig):
    """A piece of a source that one worker lists and reads by itself: the unit of restart."""

    name: str
    """Unique in the source and equal at every listing, such as the name of an archive."""
    num_bytes: NonNegativeInt = 0
    """About as many as have to be read; for the progress."""
    num_examples: NonNegativeInt = 0
    """Where known without reading; else 0."""
    where: dict[str, JsonValue] = Field(default_factory=dict)
    """What the source needs to find the part again."""


@dataclass(frozen=True)
class WorkFolder:
    """Where a source keeps what it needs while its corpus is prepared."""

    root: Store
    """What is fetched stays below `sources/` of it."""
    work: Store
    """Of this corpus alone: lists, and below `spill/` bytes that have no range of their own in the source, such as the
    members of a compressed archive. The spill is deleted when the corpus is published."""
    examples_per_part: int
    """Of sources that choose the size of their parts."""


class FirstRows(NamedTuple):
    """The first rows of a split, as a member of a view."""

    split: str
    num_rows: int


class RawCorpus(ABC):
    """One source, opened by its config, of the same content wherever it is opened."""

    origin: str
    """Where the images come from, written beside every row."""
    credit: str = ""
    """Authors and licence, for the report."""
    single_label: bool = True
    """Whether every example has exactly one label."""
    when_ids_repeat: str = "Ids are paths in Unicode NFC: rename one of the files."
    """What to do where several examples have one id."""
    # So that every corpus is a task too: a setting is chosen on train -> val, and the last training takes both.
    views: Mapping[str, tuple[str | FirstRows, ...]] = MappingProxyType({"trainval": ("train", "val")})
    """Further splits that are others, or the first rows of others, put together, such as train800val200; those are made
    whose members there are."""
    benchmark_rows: Mapping[str, int] = {}
    """Of a benchmark, the examples of each split: they are as published, so none may be missing or refused, and none is
    left out that repeats another. It may have test alone. Empty: this is none."""

    lists_ids: bool = False
    """Whether `listed` tells the ids of examples."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Another text when the examples may have changed. Cheap: reads no image, fetches nothing.
        Raises ValueError where the source does not exist."""

    @abstractmethod
    def parts(self, work: WorkFolder) -> Iterator[Part]:
        """Every part, without reading images; at least one file or archive member to a part.
        Raises ValueError where the source is not what it should be, FetchUnavailable where it cannot be had."""

    @abstractmethod
    def examples(self, part: Part, work: WorkFolder) -> Iterator[RawExample]:
        """The examples of a part, those that cannot be read or are none by their name among them as refused.

        Whatever is in the source, an example or a refusal comes of it. Raises OSError and StoreFailed of the store.
        """

    def listed(self, part: Part, work: WorkFolder) -> pa.Table:
        """What `examples` gives of a part as EXAMPLE_SCHEMA, in its order, as far as it is known without reading an image.
        Of sources that have `lists_ids`. Raises as `examples`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no `lists_ids`: only reading its images tells what they are"
        )

    def declared_classes(self) -> tuple[str, ...]:
        """Labels that are classes whether an example has them or not. Empty: those that examples have."""
        return ()

    def class_info(self, source_id: str) -> ClassInfo:
        """How a label of `examples` is called and what it is a kind of."""
        return ClassInfo(name=source_id, source_id=source_id)


class ListedCorpus(RawCorpus):
    """A source that is one list of places. Its parts are stretches of the list, kept in the work folder."""

    lists_ids = True

    @abstractmethod
    def listing(self, work: WorkFolder) -> Iterator[RawExample]:
        """Every example, in an order that the source fixes, without `data`. Raises as `parts`."""

    def parts(self, work: WorkFolder) -> Iterator[Part]:
        batch: list[RawExample] = []
        number = 0
        for example in self.listing(work):
            batch.append(example)
            if len(batch) == work.examples_per_part:
                yield self._kept(work, number, batch)
                batch, number = [], number + 1
        if batch:
            yield self._kept(work, number, batch)

    def examples(self, part: Part, work: WorkFolder) -> Iterator[RawExample]:
        yield from examples_of(self.listed(part, work))

    def listed(self, part: Part, work: WorkFolder) -> pa.Table:
        with work.work.open(_list_key(part.name)) as file:
            return read_parquet(file)

    @staticmethod
    def _kept(work: WorkFolder, number: int, batch: list[RawExample]) -> Part:
        name = f"{number:06d}"
        sink = pa.BufferOutputStream()
        pq.write_table(table_of(batch), sink, compression="zstd")
        work.work.write(_list_key(name), sink.getvalue().to_pybytes())
        num_bytes = sum(example.length or example.num_bytes for example in batch)
        return Part(name=name, num_bytes=num_bytes, num_examples=len(batch))


_LISTS = "lists/"


def _list_key(name: str) -> str:
    return f"{_LISTS}{name}.parquet"


def kept_lists(work: WorkFolder) -> Iterator[pa.Table]:
    """The lists that `ListedCorpus.parts` has kept, as EXAMPLE_SCHEMA; none where a source keeps none."""
    for listed in work.work.scan(_LISTS):
        with work.work.open(listed.key) as file:
            yield read_parquet(file)


EXAMPLE_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.string()), nullable=False),
        pa.field("weights", pa.list_(pa.float32())),
        pa.field("split", pa.string(), nullable=False),
        pa.field("val_fraction", pa.float64()),  # shares that the split is drawn with; null: the source names it
        pa.field("test_fraction", pa.float64()),
        pa.field("group", pa.string()),
        pa.field("base", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64()),
        pa.field("order_key", pa.uint64()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
    ]
)
_FIELDS = [field.name for field in fields(RawExample) if field.name not in ("refused", "data", "num_bytes")]


def row_of(example: RawExample) -> dict[str, Any]:
    """An example as a row of EXAMPLE_SCHEMA, without its bytes."""
    row: dict[str, Any] = {name: getattr(example, name) for name in _FIELDS}
    row["val_fraction"] = row["test_fraction"] = None
    if isinstance(example.split, DrawnSplit):
        row["val_fraction"], row["test_fraction"] = example.split.val_fraction, example.split.test_fraction
    row["reason"], row["detail"] = example.refused or (None, None)
    return row


def table_of(examples: Iterable[RawExample]) -> pa.Table:
    """Examples as a table of EXAMPLE_SCHEMA."""
    return pa.Table.from_pylist([row_of(example) for example in examples], schema=EXAMPLE_SCHEMA)


def examples_of(table: pa.Table) -> Iterator[RawExample]:
    """The examples of a table of EXAMPLE_SCHEMA."""
    for row in table.to_pylist():
        reason, detail = row.pop("reason"), row.pop("detail")
        val_fraction, test_fraction = row.pop("val_fraction"), row.pop("test_fraction")
        if val_fraction is not None:
            row["split"] = DrawnSplit(row["group"] or row["example_id"], val_fraction, test_fraction)
        labels, weights = tuple(row.pop("labels")), row.pop("weights")
        yield RawExample(
            **row,
            labels=labels,
            weights=None if weights is None else tuple(weights),
            refused=None if reason is None else (reason, detail),
        )


class Spill:
    """Bytes of examples that have no range of their own in the source, end to end in one object of the work folder.

    `with Spill(place, part) as spill`: visible at a clean exit; written again whole when the part is read again.
    """

    def __init__(self, work: WorkFolder, part: Part) -> None:
        self.key = f"spill/{part.name}"
        self.base, self._writer, self._position = work.work.uri, work.work.writer(self.key), 0

    def __enter__(self) -> "Spill":
        self._file = self._writer.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._writer.__exit__(*raised)

    def keep(self, data: bytes) -> int:
        """Append and give the offset: `RawExample(base=spill.base, key=spill.key, offset=..., length=len(data))`."""
        offset = self._position
        self._file.write(data)
        self._position += len(data)
        return offset


class SplitRule:
    """Where an example goes by its hash, and by the splits that its source names."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "train": "train",
        "training": "train",
        "val": "val",
        "valid": "val",
        "validation": "val",
        "dev": "val",
        "test": "test",
        "testing": "test",
    }
    """How sources call their splits."""

    def __init__(self, recipe: CorpusRecipe, present: frozenset[str] = frozenset()) -> None:
        """`present` are the splits that the source names by itself: what it lacks is hashed off train, val where there
        is no val, test where there is neither val nor test. Under `val_per_class` planning takes val off train instead."""
        self._test_fraction = 0.0 if present & {"val", "test"} else recipe.test_fraction
        self._val_fraction = 0.0 if "val" in present or recipe.val_per_class else recipe.val_fraction

    def assign_split(self, group_key: str, named: str | None = None) -> str:
        """The split of an example: as named, or a `DrawnSplit`. `group_key` is the example id unless several examples
        belong together."""
        if named in ("val", "test"):
            return named
        return DrawnSplit(group_key, self._val_fraction, self._test_fraction)


class FetchUnavailable(RuntimeError):
    """A source cannot be fetched here (no network, no npm, refused): another source may do instead."""
