"""Reads images of records and of shards again, compares them as thumbnails, and finds their plain byte ranges."""

import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitline.data_prep.decode import DecodePolicy, ImageRejected
from vitline.data_prep.examine.decode_sandboxed import decode_all_apart
from vitline.data_prep.examine.range_reads import ByteRange, Data, read_ahead
from vitline.data_prep.examine.thumbnails import looks_same, same_images, thumbnail
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


class Place(NamedTuple):
    """Where the bytes of an image are."""

    base: str
    key: str
    offset: int
    length: int | None
    row: int | None
    listed: ListedShard | None
    """The shard of the row."""

    @classmethod
    def of(cls, row: Mapping[str, Any], prefix: str = "") -> "Place":
        """From a row of a table, in which the names of PLACE_SCHEMA have a prefix."""
        base, key, offset, length, number, shard = (row[prefix + name] for name in PLACE_SCHEMA.names)
        return cls(base, key, offset, length, number, ListedShard(key=key, **shard) if shard else None)

    @property
    def range(self) -> ByteRange:
        return ByteRange(self.base, self.key, self.offset, None if self.length is None else self.offset + self.length)


class ImageReader:
    """Reads images by their places. Caches some thousand thumbnails and one row group. Raises ShardError for a shard that is
    missing, damaged or another one than is listed."""

    def __init__(self, policy: DecodePolicy) -> None:
        self._policy = policy
        self._thumbnails: OrderedDict[Place, np.ndarray | None] = OrderedDict()
        self._group: tuple[tuple[str, str, int], _ShardGroup] | None = None

    def same(self, a: Place, b: Place) -> bool:
        """Whether two images look the same, also scaled, recompressed or mirrored. False if one is unreadable."""
        first, second = self._thumbnail(a), self._thumbnail(b)
        return first is not None and second is not None and looks_same(first, second)

    def same_pairs(self, pairs: Sequence[tuple[Place, Place]]) -> list[bool]:
        """`same` for many pairs at once, in a quarter of the time."""
        self._make(place for pair in pairs for place in pair)
        same, readable = [False] * len(pairs), list[int]()
        thumbnails: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for i, pair in enumerate(pairs):
            first, second = map(self._thumbnail, pair)
            if first is not None and second is not None:
                readable.append(i)
                thumbnails[0].append(first)
                thumbnails[1].append(second)
        if readable:
            for i, found in zip(readable, same_images(*map(np.stack, thumbnails)).tolist(), strict=True):
                same[i] = found
        return same

    def range_of(self, place: Place) -> tuple[int | None, int | None]:
        """Offset and length of the bytes of an image; for a row of a shard, within the file of the shard."""
        if place.row is None:
            return place.offset, place.length
        group, index = self._shard_group(place)
        return group.range_of(index)

    def _thumbnail(self, place: Place) -> np.ndarray | None:
        if place not in self._thumbnails:
            self._make([place])
        return self._thumbnails[place]

    def _make(self, places: Iterable[Place]) -> None:
        """Makes the thumbnails that are missing: the decoding process is at work while the next images are read."""
        while len(self._thumbnails) > _THUMBNAILS_KEPT:
            self._thumbnails.popitem(last=False)
        missing = {place for place in places if place not in self._thumbnails}
        for place, outcome in decode_all_apart(self._read(missing), self._policy):
            self._thumbnails[place] = None if isinstance(outcome, ImageRejected) else thumbnail(outcome)

    def _read(self, missing: Set[Place]) -> Iterator[tuple[Place, Data]]:
        """Places with the bytes there: rows of shards in their order, then ranges. Missing files are noted as unreadable."""
        rows = (place for place in missing if place.row is not None)
        for place in sorted(rows, key=lambda each: (each.base, each.key, each.row)):
            group, index = self._shard_group(place)
            yield place, group.images[index].as_py()
        ranges = ((place, place.range) for place in missing if place.row is None)
        for place, read in read_ahead(sorted(ranges, key=itemgetter(1))):
            try:
                yield place, read()
            except FileNotFoundError:
                self._thumbnails[place] = None

    def _shard_group(self, place: Place) -> tuple["_ShardGroup", int]:
        """The row group that holds a row of a shard, and the index of the row in it."""
        row, listed = place.row, place.listed
        assert row is not None, place
        assert listed is not None, place
        if self._group and self._group[0][:2] == place[:2]:
            size = self._group[1].rows_per_group
            if self._group[0][2] == row // size:
                return self._group[1], row % size
        group = _ShardGroup(open_store(place.base), listed, row)
        size = group.rows_per_group
        self._group = ((place.base, place.key, row // size), group)
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
