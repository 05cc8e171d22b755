"""Reads images of records and of shards again, compares them as thumbnails, and finds their plain byte ranges."""

import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitline.data_prep.decode import DecodePolicy, ImageRejected
from vitline.data_prep.examine.decode_apart import decode_all_apart
from vitline.data_prep.examine.range_reads import ByteRange, Data, read_ahead
from vitline.data_prep.examine.thumbnails import same_picture, same_pictures, thumbnail
from vitline.data_prep.plan.similarity.dedup import LOCATOR_SCHEMA
from vitline.data_prep.shard_format import ListedShard, open_shard
from vitline.infra.storage import Store, open_store

_THUMBNAILS_KEPT = 10_000  # 3 KB each
SHARD_TYPE = pa.struct(
    [
        pa.field("corpus", pa.string()),
        pa.field("content_digest", pa.string()),
        pa.field("num_bytes", pa.int64()),
    ]
)
"""A ListedShard without its key, in a table of images."""
PLACE_SCHEMA = pa.schema(
    [
        *LOCATOR_SCHEMA,
        pa.field("row", pa.int64()),  # row in the shard `key` of the corpus `base`; null: they name a file of a source
        pa.field("shard", SHARD_TYPE),  # what is listed about that shard
    ]
)
"""Where the bytes of images are."""


def listed_as_cell(listed: ListedShard) -> dict[str, Any]:
    """A value of SHARD_TYPE."""
    return {field.name: getattr(listed, field.name) for field in SHARD_TYPE}


class PictureRow(TypedDict):
    """A row of PLACE_SCHEMA."""

    base: str
    key: str
    offset: int
    length: int | None
    row: int | None
    shard: Mapping[str, Any] | None


Place = tuple[str, str, int, int | None]


def _place(row: PictureRow) -> Place:
    """What identifies an image."""
    return row["base"], row["key"], row["offset"], row["row"]


def _range_of(row: PictureRow) -> ByteRange:
    end = None if row["length"] is None else row["offset"] + row["length"]
    return ByteRange(row["base"], row["key"], row["offset"], end)


def picture_row(row: Mapping[str, Any], prefix: str = "") -> PictureRow:
    """The fields of PLACE_SCHEMA in a row of a table, whose names there have a prefix."""
    return {
        "base": row[f"{prefix}base"],
        "key": row[f"{prefix}key"],
        "offset": row[f"{prefix}offset"],
        "length": row[f"{prefix}length"],
        "row": row[f"{prefix}row"],
        "shard": row[f"{prefix}shard"],
    }


class PictureReader:
    """Reads images by their rows: bytes [offset, offset + length) of `key` in `base` or, if `row` is given, that row of the
    shard `key` of the corpus `base`. Caches some thousand thumbnails and one row group. Raises ShardError for a shard that is
    missing, damaged or another one than is listed."""

    def __init__(self, policy: DecodePolicy) -> None:
        self._policy = policy
        self._thumbnails: OrderedDict[Place, np.ndarray | None] = OrderedDict()
        self._group: tuple[tuple[str, str, int], _ShardGroup] | None = None

    def __enter__(self) -> "PictureReader":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._thumbnails.clear()
        self._group = None

    def same(self, a: PictureRow, b: PictureRow) -> bool:
        """Whether two images show the same picture, also scaled, recompressed or mirrored. False if one is unreadable."""
        first, second = self._thumbnail(a), self._thumbnail(b)
        return first is not None and second is not None and same_picture(first, second)

    def same_pairs(self, pairs: Sequence[tuple[PictureRow, PictureRow]]) -> list[bool]:
        """`same` for many pairs at once, in a quarter of the time."""
        self._make(row for pair in pairs for row in pair)
        same, readable = [False] * len(pairs), list[int]()
        thumbnails: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for i, pair in enumerate(pairs):
            first, second = map(self._thumbnail, pair)
            if first is not None and second is not None:
                readable.append(i)
                thumbnails[0].append(first)
                thumbnails[1].append(second)
        if readable:
            for i, found in zip(readable, same_pictures(*map(np.stack, thumbnails)).tolist(), strict=True):
                same[i] = found
        return same

    def range_of(self, row: PictureRow) -> tuple[int | None, int | None]:
        """Offset and length of the bytes of an image; for a row of a shard, within the file of the shard."""
        if (number := row["row"]) is None:
            return row["offset"], row["length"]
        group, index = self._shard_group(row, number)
        return group.range_of(index)

    def _thumbnail(self, row: PictureRow) -> np.ndarray | None:
        if (place := _place(row)) not in self._thumbnails:
            self._make([row])
        return self._thumbnails[place]

    def _make(self, rows: Iterable[PictureRow]) -> None:
        """Makes the thumbnails that are missing: the decoding process is at work while the next images are read."""
        while len(self._thumbnails) > _THUMBNAILS_KEPT:
            self._thumbnails.popitem(last=False)
        missing = {place: row for row in rows if (place := _place(row)) not in self._thumbnails}
        for place, outcome in decode_all_apart(self._read(missing), self._policy):
            self._thumbnails[place] = None if isinstance(outcome, ImageRejected) else thumbnail(outcome)

    def _read(self, missing: Mapping[Place, PictureRow]) -> Iterator[tuple[Place, Data]]:
        """Places with the bytes there, in any order. Missing files are noted as unreadable."""
        of_shards = {place: number for place, row in missing.items() if (number := row["row"]) is not None}
        for place, number in sorted(of_shards.items(), key=lambda each: (each[0][:2], each[1])):
            group, index = self._shard_group(missing[place], number)
            yield place, group.images[index].as_py()
        ranges = sorted((_range_of(missing[place]), place) for place in missing.keys() - of_shards.keys())
        for place, read in read_ahead((place, wanted) for wanted, place in ranges):
            try:
                yield place, read()
            except FileNotFoundError:
                self._thumbnails[place] = None

    def _shard_group(self, place: PictureRow, row: int) -> tuple["_ShardGroup", int]:
        """The row group that holds a row of a shard, and the index of the row in it."""
        base, key, stated = place["base"], place["key"], place["shard"]
        assert stated is not None, place
        if self._group and self._group[0][:2] == (base, key):
            size = self._group[1].rows_per_group
            if self._group[0][2] == row // size:
                return self._group[1], row % size
        group = _ShardGroup(open_store(base), ListedShard(key=key, **stated), row)
        size = group.rows_per_group
        self._group = ((base, key, row // size), group)
        return group, row % size


class _ShardGroup:
    """The images of one row group. They are stored uncompressed, so each is found in the bytes of its column."""

    def __init__(self, store: Store, listed: ListedShard, row: int) -> None:
        with open_shard(store, listed) as file:
            self.rows_per_group = file.metadata.row_group(0).num_rows
            number = row // self.rows_per_group
            table = file.row_group(number, ["image"])
            self.images = table["image"].combine_chunks().field("bytes")
            self._store, self._key = store, listed.key
            self._start, self._end = _column_range(file.metadata.row_group(number))

    def range_of(self, index: int) -> tuple[int, int]:
        """(offset in the file, length) of an image."""
        image = self.images[index].as_py()
        return self._start + self._bytes.find(image), len(image)

    @functools.cached_property
    def _bytes(self) -> bytes:
        return self._store.read_all_of(self._key, self._start, self._end)


def _column_range(group: pq.RowGroupMetaData) -> tuple[int, int]:
    columns = (group.column(i) for i in range(group.num_columns))
    column = next(column for column in columns if column.path_in_schema == "image.bytes")
    return column.data_page_offset, column.data_page_offset + column.total_compressed_size
