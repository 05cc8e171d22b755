"""Reads row groups of shards by ranges, each shard compared with the manifest at its first read."""

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

import pyarrow as pa

from vitline.data_prep.parquet_files import Footer, RowGroupFile
from vitline.data_prep.shard_format.identity import ListedShard, ShardError, listed_shards, one_line
from vitline.data_prep.shard_format.manifest import Manifest, RowGroupLocation, SplitInfo, segment_store
from vitline.data_prep.shard_format.open_checked import check_shard, open_shard
from vitline.infra.config import digest_of
from vitline.infra.storage import DiskCache, Store

# Footers of 10,000 to 20,000 shards. Those of further shards are read again when they are needed.
_FOOTER_BYTES = 64 * 2**20


class ShardReader:
    """Reads row groups of one split, each with one range request. Thread-safe.

    The shard list of the corpus is read before the first shard. A shard is compared with it at its first read; its footer is
    kept. Row groups and footers go through `cache`, if there is one and the store is not on this machine (`high_latency`).
    """

    def __init__(
        self,
        corpus: Store,
        manifest: Manifest,
        split: str,
        footer_bytes: int = _FOOTER_BYTES,
        cache: DiskCache | None = None,
    ) -> None:
        self._schema, self._budget = manifest.arrow_schema(), footer_bytes
        self._cache = cache if corpus.high_latency else None
        self.split: SplitInfo = manifest.split(split)
        self._read_list = functools.partial(listed_shards, corpus, manifest, split)
        self._listed: dict[str, ListedShard] | None = None
        self._list_lock = threading.Lock()
        self._homes = {segment.version: segment_store(corpus, segment) for segment in self.split.segments}
        self._footers: OrderedDict[str, Footer] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def row_group(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Row group `index`, counted over all segments, with all columns or the named ones ("image", "labels", "label"...).

        Raises IndexError, and ShardError if the shard is missing, is another shard than the manifest lists, or if its schema,
        rows or page checksums differ.
        """
        return self.row_groups(range(index, index + 1), columns)[0]

    def row_groups(self, indices: range, columns: Sequence[str] | None = None) -> list[pa.Table]:
        """Neighbouring row groups, those of a shard with one range request: for corpora of small row groups, as each request waits for the
        store. It reads all that lies between the columns. Raises as `row_group`."""
        tables: list[pa.Table] = []
        for _, of_shard in itertools.groupby(map(self.split.place, indices), self._uri):
            locations = list(of_shard)
            try:
                tables += self._read(locations, columns, self._cache)
            except ShardError:
                if self._cache is None:
                    raise
                # The cache may hold the footer of an earlier file of equal size and rows. The store alone says what is damaged.
                self._forget(locations[0], self._cache)
                tables += self._read(locations, columns, None)
        return tables

    def _read(
        self, locations: Sequence[RowGroupLocation], columns: Sequence[str] | None, cache: DiskCache | None
    ) -> list[pa.Table]:
        """Neighbouring row groups of one shard."""
        first, tables = locations[0], list[pa.Table]()
        # Without the cache, not the kept footer either: another thread may have taken it from the cache meanwhile.
        footer = (self._kept(first) if cache is self._cache else None) or self._open(first, cache)
        end = footer.byte_range(locations[-1].group_in_shard, columns)[1]
        read = _RangeReader(self._store(first), self._listing()[first.key], footer, cache, end)
        for location in locations:
            try:
                table = footer.row_group(location.group_in_shard, columns, read)
            except FileNotFoundError as error:
                raise ShardError(self._uri(location), "is missing") from error
            except (OSError, pa.ArrowException) as error:
                # Parquet raises OSError for a page whose checksum differs.
                raise ShardError(self._uri(location), f"has a damaged page ({one_line(error)})") from error
            if table.num_rows != location.stored_rows:
                found = f"holds {table.num_rows} rows in row group {location.group_in_shard}, expected {location.stored_rows}"
                raise ShardError(self._uri(location), found)
            tables.append(table.slice(0, location.num_rows))
        read.keep()
        return tables

    def close(self) -> None:
        """Forget the footers."""
        with self._lock:
            self._footers.clear()
            self._num_bytes = 0

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _store(self, location: RowGroupLocation) -> Store:
        return self._homes[location.segment.version]

    def _uri(self, location: RowGroupLocation) -> str:
        return self._store(location).uri_of(location.key)

    def _kept(self, location: RowGroupLocation) -> Footer | None:
        with self._lock:
            footer = self._footers.get(self._uri(location))
            if footer is not None:
                self._footers.move_to_end(self._uri(location))
            return footer

    def _open(self, location: RowGroupLocation, cache: DiskCache | None) -> Footer:
        """The footer of a shard that is what the manifest says, from the cache or the store. It is kept."""
        place = self._place_of_footer(location)
        cached = cache.get(*place) if cache else None
        footer = self._checked_footer(location) if cached is None else Footer(cached)
        if cache and cached is None:
            cache.put(*place, footer.data)
        with self._lock:
            if (earlier := self._footers.pop(self._uri(location), None)) is not None:
                self._num_bytes -= earlier.num_bytes
            self._footers[self._uri(location)] = footer
            self._num_bytes += footer.num_bytes
            while self._num_bytes > self._budget and len(self._footers) > 1:
                self._num_bytes -= self._footers.popitem(last=False)[1].num_bytes
        return footer

    def _checked_footer(self, location: RowGroupLocation) -> Footer:
        num_rows, size = self.split.shard_rows(location.segment, location.shard), self.split.rows_per_row_group

        def check(file: RowGroupFile) -> None:
            check_shard(file, self._uri(location), self._schema, size, num_rows)

        with open_shard(self._store(location), self._listing()[location.key], check) as file:
            return file.footer()

    def _place_of_footer(self, location: RowGroupLocation) -> tuple[str, str]:
        """Namespace and key in the cache: all that a footer is compared with before it gets there."""
        listed, num_rows = self._listing()[location.key], self.split.shard_rows(location.segment, location.shard)
        expected = [self._schema.to_string(truncate_metadata=False), num_rows, self.split.rows_per_row_group]
        stated = [listed.corpus, listed.content_digest, listed.num_bytes]
        return _cache_namespace(self._store(location)), digest_of([self._uri(location), stated, expected])

    def _forget(self, location: RowGroupLocation, cache: DiskCache) -> None:
        with self._lock:
            if (footer := self._footers.pop(self._uri(location), None)) is not None:
                self._num_bytes -= footer.num_bytes
        cache.discard(*self._place_of_footer(location))

    def _listing(self) -> dict[str, ListedShard]:
        with self._list_lock:
            if self._listed is None:
                self._listed = self._read_list()
            return self._listed


class _RangeReader:
    """Reads ranges of a shard, in ascending order, from the cache, or else from its store, from where it then reads on to `end`."""

    def __init__(self, home: Store, listed: ListedShard, footer: Footer, cache: DiskCache | None, end: int) -> None:
        self._home, self._listed, self._footer, self._cache, self._end = home, listed, footer, cache, end
        self._held, self._held_from = b"", 0
        self._unverified: list[tuple[str, bytes]] = []

    def __call__(self, start: int, end: int) -> bytes:
        # The rows of a shard follow from its content digest; where their bytes are, from its footer.
        key = digest_of([self._listed.content_digest, self._footer.digest, start, end])
        cached = self._cache.get(_cache_namespace(self._home), key) if self._cache else None
        if cached is not None:
            return cached
        if end > self._held_from + len(self._held):
            self._held, self._held_from = self._home.read(self._listed.key, start, max(end, self._end)), start
        data = self._held[start - self._held_from : end - self._held_from]
        self._unverified.append((key, data))
        return data

    def keep(self) -> None:
        """Caches what came from the store. Call it once the rows have been read, which verifies the page checksums."""
        if self._cache is not None:
            for key, data in self._unverified:
                self._cache.put(_cache_namespace(self._home), key, data)


def _cache_namespace(home: Store) -> str:
    """Name in the cache of the corpus version that wrote a shard."""
    return digest_of(home.uri)[:16]


def read_row_group(corpus: Store, split: str, manifest: Manifest, row_group: int) -> pa.Table:
    """Read one row group; to read many, use `ShardReader`. Raises as `ShardReader.row_group`."""
    with ShardReader(corpus, manifest, split) as reader:
        return reader.row_group(row_group)
