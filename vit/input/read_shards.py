"""Reads encoded examples in the reading order, from row groups that the lanes keep open.

A lane keeps one block of w row groups open. All lanes come to the end of their blocks at about the same step. So that the
store sees a steady stream and no batch waits, the next blocks are loaded bit by bit while the open ones are read: a lane
in the middle of its block makes the next of half of the lanes load.
"""

import threading
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np
import pyarrow as pa

from vitline.data_prep.decode import DecodePolicy, decode
from vitline.data_prep.shard_format import Manifest, ShardReader, segment_store
from vitline.infra.config import digest_of
from vitline.infra.storage import DiskCache, Store
from vitline.vit.input.decoded_cache import CachedExample, DecodedCache, Label
from vitline.vit.input.load_queue import AHEAD, NOW, SOON, Load, LoadQueue
from vitline.vit.input.mapped_labels import MappedLabels, kept_indices
from vitline.vit.input.order import Order, RowGroups, Rows

# A corpus of few images has small row groups, whose requests to a store take as long as that of 8 MiB.
_LOAD_BYTES = 8 * 2**20
_HELD_BYTES = 64 * 2**20  # splits up to this size are held in memory once they have been read from a store


@dataclass(frozen=True)
class RowGroup:
    """A loaded row group: the encoded image and the label of each row."""

    images: pa.BinaryArray
    labels: list[Label]
    num_bytes: int


@dataclass(slots=True)
class Example:
    """One example that was read: `pixels` (height, width, 3) if they were cached, else the `encoded` bytes.

    `label` is the label of the corpus; training uses `split.mapped(label)`.
    """

    split: "SplitReader"
    row: int
    label: Label
    encoded: bytes | None = None
    pixels: np.ndarray | None = None

    def decoded(self) -> np.ndarray:
        """The pixels, which are also offered to the cache. Raises ValueError naming shard and row if decoding fails."""
        if self.pixels is not None:
            return self.pixels
        assert self.encoded is not None
        pixels = self.split.decode(self.row, self.encoded)
        self.split.cache.offer(self.split.cache_key, self.row, CachedExample(pixels, self.label))
        return pixels


class SplitReader:
    """Reads row groups of one split of a corpus, through `shard_cache` if there is one, and decodes their images. Thread-safe.

    `labels` gives the classes in training; where it drops some, rows and row groups are counted among those that stay. Raises
    ValueError if its map does not have one entry per class of the corpus.
    """

    def __init__(
        self,
        corpus: Store,
        manifest: Manifest,
        split: str,
        cache: DecodedCache,
        labels: MappedLabels | None = None,
        shard_cache: DiskCache | None = None,
    ) -> None:
        self.corpus, self.name, self.info, self.cache = corpus, split, manifest.split(split), cache
        self.policy: DecodePolicy = manifest.decode_policy
        renumbered = [digest_of(labels.label_map)] if labels and labels.drops else []
        self.cache_key = digest_of([self.info.digest, self.policy, *renumbered])
        self._map, self._kept = labels, labels.kept if labels else None
        self.groups = self._kept.groups if self._kept else RowGroups.of(self.info)
        self._single_label, self._has_weights = manifest.single_label, manifest.has_weights
        self._label_columns = ["label" if self._single_label else "labels", *(["weights"] if self._has_weights else [])]
        self._reader = ShardReader(corpus, manifest, split, cache=shard_cache)
        self.groups_per_load = 1
        """Neighbouring row groups that are read at a time where rows are read in order, or where the split is held."""
        self._holds, self._held, self._held_lock = False, dict[int, Load[list[RowGroup]]](), threading.Lock()
        if corpus.high_latency and self._kept is None:
            mean_bytes = max(1, manifest.mean_row_group_bytes(split))
            self.groups_per_load = max(1, _LOAD_BYTES // mean_bytes)
            self._holds = mean_bytes * self.info.num_row_groups <= _HELD_BYTES
        if labels is not None and len(labels.label_map) != manifest.num_classes:
            raise ValueError(
                f"The class map of {corpus.uri} has {len(labels.label_map)} entries, but the corpus has "
                f"{manifest.num_classes} classes. Give one entry per class."
            )

    def load(self, row_group: int) -> RowGroup:
        """Reads a row group, or takes it from those that are held. Raises ShardError naming the shard if it differs from the
        manifest."""
        if not self._holds:
            return self.load_neighbours(range(row_group, row_group + 1))[0]
        number, index = divmod(row_group, self.groups_per_load)
        first = row_group - index
        neighbours = range(first, min(first + self.groups_per_load, self.info.num_row_groups))
        with self._held_lock:
            load = self._held.setdefault(number, Load(partial(self.load_neighbours, neighbours)))
        try:
            return load.result()[index]
        except Exception:
            self._held.pop(number, None)  # the store may answer the next time
            raise

    def load_neighbours(self, row_groups: range) -> list[RowGroup]:
        """Reads neighbouring row groups, those of a shard with one request. Raises as `load`."""
        columns = ["image", *self._label_columns]
        if self._kept is None:
            return [self._row_group(table) for table in self._reader.row_groups(row_groups, columns)]
        return [self._row_group(self._reader.row_group(self._stored(group), columns)) for group in row_groups]

    def _row_group(self, table: pa.Table) -> RowGroup:
        images, labels = _one_array(table.column("image")).field("bytes"), self._labels(table)
        if self._kept is not None and self._map is not None:
            here = kept_indices(labels, self._map.label_map)
            images, labels = images.take(pa.array(here, pa.int64())), [labels[i] for i in here]
        return RowGroup(images, labels, images.nbytes)

    def example_id(self, row: int) -> str:
        """The id of the example in a row. Reads the row group without its images; raises like `load`."""
        group = int(self.groups.group_of(np.array(row)))
        table = self._reader.row_group(self._stored(group), columns=["example_id", *self._label_columns])
        ids: list[str] = table.column("example_id").to_pylist()
        if self._kept is not None and self._map is not None:
            ids = [ids[i] for i in kept_indices(self._labels(table), self._map.label_map)]
        return ids[row - int(self.groups.first_row(np.array(group)))]

    def decode(self, row: int, encoded: bytes) -> np.ndarray:
        """Pixels (height, width, 3) uint8 of a row. Raises ValueError naming shard and row if decoding fails."""
        try:
            return decode(encoded, self.policy)
        except ValueError as error:
            raise ValueError(f"{self.where(row)} cannot be decoded: {error}. {_ADVICE}") from error

    def mapped(self, label: Label) -> Label:
        """The label in the classes of the training."""
        return label if self._map is None else self._map(label)

    def where(self, row: int) -> str:
        """Shard and row, for error messages."""
        if self._kept is not None:
            return self._where_kept(row)
        place = self.info.place(int(self.groups.group_of(np.array(row))))
        first_row = place.first_row - place.group_in_shard * self.info.rows_per_row_group
        uri = segment_store(self.corpus, place.segment).uri_of(place.key)
        return f"{uri}, row {row - first_row} (row {row} of split {self.name!r})"

    def _where_kept(self, row: int) -> str:
        assert self._kept is not None
        group = self.groups.group_of(np.array(row))
        stored = int(self._kept.row_groups[group])
        place, number = self.info.place(stored), row - int(self.groups.first_row(group))
        uri = segment_store(self.corpus, place.segment).uri_of(place.key)
        return f"{uri}, example {number} of those kept in row group {stored} of split {self.name!r}"

    def shard_key(self, row_group: int) -> str:
        """The shard that holds a row group."""
        return self.info.place(self._stored(row_group)).key

    def close(self) -> None:
        self._reader.close()

    def _stored(self, row_group: int) -> int:
        """The number of a row group among all of the split."""
        return row_group if self._kept is None else int(self._kept.row_groups[row_group])

    def _labels(self, table: pa.Table) -> list[Label]:
        if self._single_label:
            labels: list[Label] = table.column("label").to_pylist()
            return labels
        lists = table.column("labels").to_pylist()
        weights = table.column("weights").to_pylist() if self._has_weights else [None] * len(lists)
        return list(zip(lists, weights, strict=True))


_ADVICE = (
    "The shard was changed since it was written. "
    "`vitline data verify NAME --pixels` lists all such images; prepare the corpus again to leave them out."
)


# The next blocks are all under way when this fraction of the open ones has been read.
_UNDER_WAY = 0.8


class LaneReader:
    """Reads the examples of one rank from one split.

    Keeps one block of each lane that the rank serves, and up to `read_ahead_bytes` of next blocks. `loads` runs the
    reads. Cached rows are not read. Not thread-safe.
    """

    def __init__(self, split: SplitReader, order: Order, loads: LoadQueue, read_ahead_bytes: int) -> None:
        self._split, self._order, self._loads, self._budget = split, order, loads, read_ahead_bytes
        self._open: dict[int, _Block] = {}
        self._next: dict[int, _Block] = {}
        self._mean_bytes = 0.0

    def gather(self, rows: Rows) -> list[Example]:
        """Waits for and returns the examples of `rows`, which in each lane must come after those of the last call."""
        cached = self._split.cache.split(self._split.cache_key)
        examples: list[Example | None] = [None] * len(rows.row)
        missing: list[tuple[int, Load[RowGroup]]] = []
        opened: set[int] = set()
        columns = (rows.epoch, rows.lane, rows.block, rows.lane_row, rows.row_group, rows.row)
        for i, (epoch, lane, number, lane_row, group, row) in enumerate(
            zip(*(c.tolist() for c in columns), strict=True)
        ):
            if (hit := cached.get(row)) is not None:
                examples[i] = Example(self._split, row, hit.label, pixels=hit.pixels)
                continue
            block = self._open.get(lane)
            if block is None or block.at != (epoch, number):
                block = self._open[lane] = self._opened(lane, epoch, number)
                opened.add(lane)
            block.last_row = lane_row
            load = block.load(group)
            self._loads.put(load, NOW)
            missing.append((i, load))
        for lane in opened:
            self._open[lane].load_groups(self._loads, SOON)
        for i, load in missing:
            loaded, row, in_group = self._loads.wait_for(load), int(rows.row[i]), int(rows.row_in_group[i])
            self._mean_bytes += (loaded.num_bytes - self._mean_bytes) * (0.1 if self._mean_bytes else 1.0)
            examples[i] = Example(self._split, row, loaded.labels[in_group], encoded=loaded.images[in_group].as_py())
        self._read_ahead()
        return examples  # type: ignore[return-value]  # no entry is None any more

    def _opened(self, lane: int, epoch: int, number: int) -> "_Block":
        ahead = self._next.pop(lane, None)
        return ahead if ahead is not None and ahead.at == (epoch, number) else self._block(lane, epoch, number)

    def _read_ahead(self) -> None:
        """Starts the loads of next blocks that are due, while the budget lasts: each lane in its turn, group by group."""
        held = sum(block.num_begun for block in self._next.values())
        for turn, lane in enumerate(sorted(self._open)):
            due = self._open[lane].fraction_read / _UNDER_WAY * len(self._open) - turn  # in blocks of this lane
            if due <= 0:
                continue
            if lane not in self._next:
                epoch, number = self._open[lane].at
                self._next[lane] = self._block(lane, *self._order.following_block(epoch, lane, number))
            block = self._next[lane]
            affordable = int(self._budget // self._mean_bytes) - held if self._mean_bytes else len(block.groups)
            before = block.num_begun
            block.load_groups(self._loads, AHEAD, min(ceil(due * len(block.groups)), before + max(0, affordable)))
            held += block.num_begun - before

    def _block(self, lane: int, epoch: int, block: int) -> "_Block":
        cached = self._split.cache.split(self._split.cache_key)
        groups = self._order.block_groups(epoch, lane, block)
        if cached:
            first, size = self._order.groups.first_row(groups), self._order.groups.size(groups)
            held = [all(r in cached for r in range(f, f + n)) for f, n in zip(first, size, strict=True)]
            groups = groups[~np.array(held, dtype=bool)]
        return _Block((epoch, block), self._order.block_rows(epoch, lane, block), self._split, groups.tolist())


class _Block:
    """The row groups of one block of a lane, without those that are fully cached."""

    def __init__(self, at: tuple[int, int], rows: range, split: SplitReader, groups: list[int]) -> None:
        self.at, self.groups, self._rows, self._split = at, groups, rows, split
        self.last_row = rows.start - 1
        """The row of the lane that was read last."""
        self._loads: dict[int, Load[RowGroup]] = {}

    @property
    def fraction_read(self) -> float:
        return (self.last_row + 1 - self._rows.start) / len(self._rows)

    @property
    def num_begun(self) -> int:
        """Row groups whose load has been queued."""
        return len(self._loads)

    def load(self, row_group: int) -> Load[RowGroup]:
        if row_group not in self._loads:
            self._loads[row_group] = Load(lambda: self._split.load(row_group))
        return self._loads[row_group]

    def load_groups(self, loads: LoadQueue, urgency: int, count: int | None = None) -> None:
        """Queues the loads of the first `count` row groups, or of all."""
        for row_group in self.groups[:count]:
            if row_group not in self._loads:
                loads.put(self.load(row_group), urgency)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
