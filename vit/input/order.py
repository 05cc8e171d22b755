"""The reading order of training: the row of a split at any position, computed directly, without a stored list.

The rule has four parts. In epoch e a keyed permutation deals the row groups of the
split to L lanes in turn. Inside a lane, rows are shuffled in blocks of w row groups. The epoch takes one row of every
lane that still has one, in turn. Epochs follow each other without a gap, and batch g is positions [g * B, (g + 1) * B).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitline.data_prep.shard_format import Manifest, SplitInfo
from vitline.vit.input.config import InputConfig, lanes_advice
from vitline.vit.input.permutation import KeyedPermutation, derive_key, hash64

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """Lane and row in the lane of positions; int64 arrays of one shape."""

    epoch: Ints
    lane: Ints
    lane_row: Ints
    """Index of the row in its lane, after shuffling."""

    def where(self, mask: NDArray[np.bool_]) -> "Places":
        """The places for which the mask is true."""
        return Places(self.epoch[mask], self.lane[mask], self.lane_row[mask])


@dataclass(frozen=True)
class Rows(Places):
    """The stored rows of positions; int64 arrays of one shape."""

    block: Ints
    """Index, in its lane, of the block of w row groups that holds the row."""
    row_group: Ints
    """Row group, counted over all segments of the split."""
    row_in_group: Ints
    row: Ints
    """Row, counted over all segments of the split."""

    def at(self, index: Ints) -> "Rows":
        """The rows at the given indices."""
        return Rows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


class Order:
    """The reading order of one split: position <-> row in both directions, for every position from 0 without end.

    A pure function of (corpus digest, seed, B, L, w) and of the split's shape; ranks are not part of it. `groups` are the row
    groups to read, where they are not all of the split. Memory is
    O(L x distinct lane lengths) for each of the few epochs in use, time per position is O(log).
    Raises ValueError if L does not divide B or is more than the number of row groups of the split.
    """

    def __init__(
        self,
        split: SplitInfo,
        *,
        corpus_digest: str,
        seed: int,
        global_batch_size: int,
        num_lanes: int,
        shuffle_window: int,
        groups: "RowGroups | None" = None,
    ) -> None:
        self.groups = groups or RowGroups.of(split)
        self.global_batch_size = global_batch_size
        self.num_lanes = num_lanes
        self.shuffle_window = shuffle_window
        if min(global_batch_size, num_lanes, shuffle_window) < 1:
            raise ValueError(
                f"global_batch_size={global_batch_size}, num_lanes={num_lanes} and shuffle_window={shuffle_window} "
                "must all be 1 or more."
            )
        if global_batch_size % num_lanes:
            raise ValueError(
                f"num_lanes={num_lanes} must divide global_batch_size={global_batch_size}. "
                f"{lanes_advice(global_batch_size, self.groups.num_groups)}"
            )
        if num_lanes > self.groups.num_groups:
            raise ValueError(
                f"num_lanes={num_lanes} is more than the {self.groups.num_groups} row groups of the split "
                f"({self.groups.num_rows:,} rows, {self.groups.rows_per_group} per group), so a lane would be empty. "
                f"{lanes_advice(global_batch_size, self.groups.num_groups)}"
            )
        self._deal_key = derive_key(seed, "order.deal", corpus_digest)
        self._block_key = derive_key(seed, "order.block", corpus_digest)
        self._epoch = lru_cache(maxsize=8)(self._build_epoch)

    @classmethod
    def of(
        cls, manifest: Manifest, split: str, config: InputConfig, seed: int, groups: "RowGroups | None" = None
    ) -> "Order":
        """The order of a training on a split of a corpus. Raises ValueError naming the corpus where lanes do not fit it."""
        try:
            return cls(
                manifest.split(split),
                corpus_digest=manifest.digest,
                seed=seed,
                global_batch_size=config.global_batch_size,
                num_lanes=config.num_lanes,
                shuffle_window=config.shuffle_window,
                groups=groups,
            )
        except ValueError as error:
            raise ValueError(f"{manifest.name}/{manifest.version}: {error}") from error

    @property
    def num_rows(self) -> int:
        """Examples in one epoch."""
        return self.groups.num_rows

    def slots(self, batch: int) -> Ints:
        """The positions of one global batch, shape (B,)."""
        return np.arange(batch * self.global_batch_size, (batch + 1) * self.global_batch_size)

    def places(self, positions: ArrayLike) -> Places:
        """Epoch, lane and row in the lane of positions of any shape. The lane determines which rank serves a position."""
        positions = np.asarray(positions, dtype=np.int64)
        epoch, within = positions // self.num_rows, positions % self.num_rows
        lane, lane_row = np.empty_like(epoch), np.empty_like(epoch)
        for e, here in _by_value(epoch):
            lane[here], lane_row[here] = self._epoch(e).turns.place(within[here])
        return Places(epoch, lane, lane_row)

    def rows(self, places: Places) -> Rows:
        """The stored rows at places."""
        block, group, row_in_group = (np.empty_like(places.epoch) for _ in range(3))
        for e, here in _by_value(places.epoch):
            epoch, lane, lane_row = self._epoch(e), places.lane[here], places.lane_row[here]
            block[here], start, shuffle = epoch.block_of(lane, lane_row)
            group[here], row_in_group[here] = epoch.group_of(lane, start + shuffle(lane_row - start))
        row = self.groups.first_row(group) + row_in_group
        return Rows(places.epoch, places.lane, places.lane_row, block, group, row_in_group, row)

    def locate(self, positions: ArrayLike) -> Rows:
        """The stored rows at positions of any shape."""
        return self.rows(self.places(positions))

    def position_of(self, epoch: ArrayLike, row: ArrayLike) -> Ints:
        """The position of a row in an epoch, the inverse of `locate`."""
        epoch, row = np.broadcast_arrays(np.asarray(epoch, dtype=np.int64), np.asarray(row, dtype=np.int64))
        position = np.empty_like(epoch)
        for e, here in _by_value(epoch):
            position[here] = e * self.num_rows + self._epoch(e).position(row[here])
        return position

    def lane_sizes(self, epoch: int) -> Ints:
        """Rows of every lane in one epoch, shape (L,)."""
        return self._epoch(epoch).lane_rows

    def block_groups(self, epoch: int, lane: int, block: int) -> Ints:
        """The row groups of a lane's block, in lane order; empty after the lane's last block."""
        table = self._epoch(epoch)
        stop = min((block + 1) * self.shuffle_window, int(table.lane_groups[lane]))
        return table.deal(np.arange(block * self.shuffle_window, stop) * self.num_lanes + lane)

    def block_rows(self, epoch: int, lane: int, block: int) -> range:
        """The rows of the lane that a block holds."""
        return self._epoch(epoch).rows_of_block(lane, block)

    def following_block(self, epoch: int, lane: int, block: int) -> tuple[int, int]:
        """(epoch, block) that the lane reads next."""
        last = (int(self._epoch(epoch).lane_groups[lane]) - 1) // self.shuffle_window
        return (epoch, block + 1) if block < last else (epoch + 1, 0)

    def _build_epoch(self, epoch: int) -> "_Epoch":
        deal = KeyedPermutation(self.groups.num_groups, hash64(self._deal_key, epoch))
        return _Epoch(self.groups, self.num_lanes, self.shuffle_window, deal, hash64(self._block_key, epoch))


@dataclass(frozen=True)
class RowGroups:
    """The row groups of a split: R rows each, except those that are `short`, as the last of a segment may be."""

    rows_per_group: int
    num_groups: int
    num_rows: int
    first_group: Ints
    """First row group of every segment."""
    start_row: Ints
    """First row of every segment."""
    short: Ints
    """The row groups with fewer than R rows, ascending."""
    missing: Ints
    """How many rows each of them lacks."""

    @classmethod
    def of(cls, split: SplitInfo) -> "RowGroups":
        rows = np.array([s.num_rows for s in split.segments], dtype=np.int64)
        size = split.rows_per_row_group
        if not rows.size or rows.sum() != split.num_rows:
            raise ValueError(
                f"A split of {split.num_rows} rows lists segments of {rows.tolist()} rows, which do not add up to it. "
                "The manifest is damaged; prepare the corpus again."
            )
        num_groups = -(-rows // size)
        missing, last = num_groups * size - rows, np.cumsum(num_groups) - 1
        return cls(
            rows_per_group=size,
            num_groups=int(num_groups.sum()),
            num_rows=int(rows.sum()),
            first_group=np.cumsum(num_groups) - num_groups,
            start_row=np.cumsum(rows) - rows,
            short=last[missing > 0],
            missing=missing[missing > 0],
        )

    @classmethod
    def of_sizes(cls, sizes: Ints) -> "RowGroups":
        """Row groups of any sizes, each 1 or more."""
        largest = int(sizes.max())
        missing = largest - sizes
        return cls(
            rows_per_group=largest,
            num_groups=len(sizes),
            num_rows=int(sizes.sum()),
            first_group=np.arange(len(sizes)),
            start_row=np.cumsum(sizes) - sizes,
            short=np.flatnonzero(missing),
            missing=missing[missing > 0],
        )

    def first_row(self, group: Ints) -> Ints:
        """First row of each row group, counted over the split."""
        segment = np.searchsorted(self.first_group, group, side="right") - 1
        return self.start_row[segment] + (group - self.first_group[segment]) * self.rows_per_group

    def group_of(self, row: Ints) -> Ints:
        """The row group of each row."""
        segment = np.searchsorted(self.start_row, row, side="right") - 1
        return self.first_group[segment] + (row - self.start_row[segment]) // self.rows_per_group

    def size(self, group: ArrayLike) -> Ints:
        """Number of rows of each row group."""
        group = np.asarray(group)
        at = np.minimum(np.searchsorted(self.short, group), len(self.short) - 1)
        lacks = np.where(self.short[at] == group, self.missing[at], 0) if self.short.size else 0
        return self.rows_per_group - lacks + np.zeros_like(group)


class _Epoch:
    """The lanes of one epoch: which row groups each lane reads, how it shuffles their rows, when its turns come.

    `deal` maps a slot to a row group; lane l gets the slots l, l + L, l + 2 L, ... A row group's index in its lane is
    slot // L. All arithmetic assumes full row groups and then corrects for the few short ones.
    """

    def __init__(self, groups: RowGroups, num_lanes: int, window: int, deal: KeyedPermutation, key: ArrayLike) -> None:
        self.deal, self._groups, self._lanes, self._window, self._key = deal, groups, num_lanes, window, key
        lanes = np.arange(num_lanes)
        self.lane_groups = groups.num_groups // num_lanes + (lanes < groups.num_groups % num_lanes)
        short_slot = deal.inverse(groups.short)
        short_lane, short_index = short_slot % num_lanes, short_slot // num_lanes
        self._short = _ShortGroups(groups.rows_per_group, short_lane, short_index, groups.missing)
        self._block_ends = self._short.ends(window)
        self._group_ends = self._short.ends(1)
        self.lane_rows = self._short.start(lanes, self.lane_groups)
        self.turns = _Turns(self.lane_rows)

    def block_of(self, lane: Ints, lane_row: Ints) -> tuple[Ints, Ints, KeyedPermutation]:
        """Block, its first row in the lane, and the permutation of its rows, for rows of lanes."""
        block = self._block_ends.unit_of(lane, lane_row)
        start, stop = self._bounds(lane, block)
        return block, start, KeyedPermutation(stop - start, hash64(self._key, lane, block))

    def rows_of_block(self, lane: int, block: int) -> range:
        """The rows of one block in its lane."""
        start, stop = self._bounds(np.array(lane), np.array(block))
        return range(int(start), int(stop))

    def _bounds(self, lane: Ints, block: Ints) -> tuple[Ints, Ints]:
        stop = np.minimum((block + 1) * self._window, self.lane_groups[lane])
        return self._short.start(lane, block * self._window), self._short.start(lane, stop)

    def group_of(self, lane: Ints, unshuffled: Ints) -> tuple[Ints, Ints]:
        """(row group, row in it) of rows of lanes before shuffling."""
        index = self._group_ends.unit_of(lane, unshuffled)
        return self.deal(index * self._lanes + lane), unshuffled - self._short.start(lane, index)

    def position(self, row: Ints) -> Ints:
        """Position in the epoch of rows of the split."""
        group = self._groups.group_of(row)
        slot = self.deal.inverse(group)
        lane, index = slot % self._lanes, slot // self._lanes
        unshuffled = self._short.start(lane, index) + row - self._groups.first_row(group)
        _, start, shuffle = self.block_of(lane, unshuffled)
        return self.turns.position(lane, start + shuffle.inverse(unshuffled - start))


class _Turns:
    """In which turn of an epoch each row of each lane comes: one row of every lane that still has one, round after round.

    A lane drops out when its rows are used up. So the epoch is a few intervals of rounds, and the lanes that take part
    are the same in all rounds of an interval. Arrays `_lanes`, `_keys` list the lanes of all intervals one after another.
    """

    def __init__(self, lane_rows: Ints) -> None:
        self._num_lanes = len(lane_rows)
        # Interval i spans the rounds from _first_round[i] to _first_round[i + 1].
        self._first_round = np.concatenate([[0], np.unique(lane_rows)])
        lanes = [np.flatnonzero(lane_rows > first) for first in self._first_round[:-1]]
        self._width = np.array([len(of_interval) for of_interval in lanes])
        self._lanes = np.concatenate(lanes)
        self._first_lane = np.cumsum(self._width) - self._width
        # (interval, lane) as one ascending number, to find a lane in its interval.
        self._keys = self._lanes + np.repeat(np.arange(len(lanes)), self._width) * self._num_lanes
        num_positions = np.diff(self._first_round) * self._width
        self._first_position = np.cumsum(num_positions) - num_positions

    def place(self, position: Ints) -> tuple[Ints, Ints]:
        """(lane, row in lane) of positions in the epoch."""
        interval = np.searchsorted(self._first_position, position, side="right") - 1
        offset, width = position - self._first_position[interval], self._width[interval]
        lane = self._lanes[self._first_lane[interval] + offset % width]
        return lane, self._first_round[interval] + offset // width

    def position(self, lane: Ints, lane_row: Ints) -> Ints:
        """Position in the epoch of rows of lanes, the inverse of `place`."""
        interval = np.searchsorted(self._first_round, lane_row, side="right") - 1
        turn = np.searchsorted(self._keys, interval * self._num_lanes + lane) - self._first_lane[interval]
        rounds = lane_row - self._first_round[interval]
        positions: Ints = self._first_position[interval] + rounds * self._width[interval] + turn
        return positions


class _ShortGroups:
    """The short row groups of an epoch: how many rows are missing in a lane before a given row group."""

    def __init__(self, rows_per_group: int, lane: Ints, index: Ints, missing: Ints) -> None:
        by_place = np.lexsort((index, lane))
        self._size, self._lane, self._index = rows_per_group, lane[by_place], index[by_place]
        self._missing = np.concatenate([[0], np.cumsum(missing[by_place])])
        # (lane, index) as one number that sorts in the same order; an index is below 2^40.
        self._places = self._lane * 2**40 + self._index

    def start(self, lane: Ints, index: Ints) -> Ints:
        """Number of rows of a lane before its row group `index`."""
        return index * self._size - self._missing_between(self._places, lane * 2**40, lane * 2**40 + index)

    def ends(self, window: int) -> "_Ends":
        """The end, in rows of its lane, of each block of `window` row groups that contains a short one."""
        stop = self.start(self._lane, (self._index // window + 1) * window)
        return _Ends(self._size * window, self._lane * 2**40 + stop, self._missing)

    def _missing_between(self, keys: Ints, first: Ints, stop: Ints) -> Ints:
        missing: Ints = self._missing[np.searchsorted(keys, stop)] - self._missing[np.searchsorted(keys, first)]
        return missing


@dataclass(frozen=True)
class _Ends:
    """Finds the unit (block or row group) of a row: adds the rows missing before it, then divides by the full size."""

    rows_per_unit: int
    ends: Ints
    missing: Ints

    def unit_of(self, lane: Ints, row: Ints) -> Ints:
        before = np.searchsorted(self.ends, lane * 2**40 + row, side="right")
        lane_first = np.searchsorted(self.ends, lane * 2**40)
        return (row + self.missing[before] - self.missing[lane_first]) // self.rows_per_unit


def _by_value(values: Ints) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """(value, mask) for every distinct value; there are nearly always one or two."""
    for value in np.unique(values):
        yield int(value), values == value
