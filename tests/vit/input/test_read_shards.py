"""What lanes read: each row group once per epoch, in bounded memory, and nothing that is in the cache."""

import gc
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from vitline.data_prep.shard_format import SegmentInfo, SplitInfo
from vitline.vit.input.decoded_cache import CachedExample, DecodedCache
from vitline.vit.input.load_queue import AHEAD, LoadQueue
from vitline.vit.input.order import Order
from vitline.vit.input.read_shards import LaneReader, RowGroup

GROUP_BYTES = 1000


class CountedGroup(RowGroup):
    alive = 0

    def __init__(self, *args):
        super().__init__(*args)
        CountedGroup.alive += 1

    def __del__(self):
        CountedGroup.alive -= 1


@pytest.fixture
def setting():
    """240 rows in 60 groups of 4 on 6 lanes with w = 2; `read` records every row group that is loaded."""
    info = SplitInfo(
        num_rows=240,
        rows_per_row_group=4,
        row_groups_per_shard=60,
        segments=(SegmentInfo(split="train", name="s", num_rows=240, num_shards=1),),
        digest="d",
    )
    order = Order(info, corpus_digest="d", seed=0, global_batch_size=6, num_lanes=6, shuffle_window=2)
    read = []

    def load(row_group):
        read.append(row_group)
        rows = range(row_group * 4, row_group * 4 + 4)
        return CountedGroup(pa.array([str(r).encode() for r in rows], pa.binary()), list(rows), GROUP_BYTES)

    split = SimpleNamespace(info=info, cache_key="d", cache=DecodedCache(10**6), load=load)
    loads = LoadQueue(2)
    yield SimpleNamespace(order=order, split=split, loads=loads, read=read)
    loads.close()


def gather_steps(setting, reader, steps, world_size=1, rank=0):
    """Gathers and checks the examples; returns the largest number of row groups in memory at once."""
    most = 0
    for step in steps:
        rows = setting.order.locate(setting.order.slots(step))
        mine = rows.at(np.flatnonzero(rows.lane % world_size == rank))
        examples = reader.gather(mine)
        assert [e.row for e in examples] == mine.row.tolist() == [e.label for e in examples]
        assert [e.encoded for e in examples] == [str(r).encode() for r in mine.row.tolist()]
        most = max(most, CountedGroup.alive)
    return most


@pytest.mark.parametrize("ahead_groups", [0, 3, 100])
def test_every_row_group_is_read_once_per_epoch_in_bounded_memory(setting, ahead_groups):
    reader = LaneReader(setting.split, setting.order, setting.loads, ahead_groups * GROUP_BYTES)
    most = gather_steps(setting, reader, range(40))
    reads_of_first_epoch = [g for g in range(60) if setting.read.count(g) == 1]
    assert set(setting.read) == set(range(60))
    assert len(reads_of_first_epoch) >= 60 - 12  # the first blocks of the second epoch are being read ahead
    assert most <= 6 * 2 + min(ahead_groups, 6 * 2) + 3  # open blocks, blocks read ahead, groups being handed over


class RunAtOnce:
    """Runs every load when it is queued, and counts the loads of each step by urgency."""

    def __init__(self):
        self.of_step = []

    def wait_for(self, load):
        return load.result()

    def put(self, load, urgency):
        if not load.begun:
            load.run()
            self.of_step[-1].append(urgency)


@pytest.mark.parametrize("first", [0, 13])
def test_loads_are_spread_over_the_steps_between_borders_of_blocks(setting, first):
    """12 row groups are read in the 8 steps of a block. All lanes come to its end at the same step, at which nothing is loaded."""
    loads = RunAtOnce()
    reader = LaneReader(setting.split, setting.order, loads, 10**6)
    for step in range(first, 120):
        loads.of_step.append([])
        gather_steps(setting, reader, [step])
    after_first_block = loads.of_step[8 - first % 8 :]
    assert {urgency for step in after_first_block for urgency in step} == {AHEAD}
    assert max(map(len, after_first_block)) <= 3
    assert {len(step) for step in after_first_block[-first % 8 :: 8]} == {2}


def test_rank_reads_its_own_lanes_only(setting):
    reader = LaneReader(setting.split, setting.order, setting.loads, 0)
    gather_steps(setting, reader, range(40), world_size=3, rank=1)
    own = {int(g) for lane in (1, 4) for block in range(5) for g in setting.order.block_groups(0, lane, block)}
    assert set(setting.read) == own


def test_seek_reads_open_blocks_only(setting):
    reader = LaneReader(setting.split, setting.order, setting.loads, 0)
    gather_steps(setting, reader, [25])
    setting.loads.close()
    assert set(setting.read) <= {int(g) for lane in range(6) for g in setting.order.block_groups(0, lane, 3)}


@pytest.mark.slow
def test_cached_rows_are_not_read(setting):
    for row in range(240):
        if row // 4 != 17:
            setting.split.cache.offer("d", row, CachedExample(np.zeros((1, 1, 3), np.uint8), row))
    reader = LaneReader(setting.split, setting.order, setting.loads, 10**6)
    for step in range(40):
        examples = reader.gather(setting.order.locate(setting.order.slots(step)))
        assert all((e.pixels is None) == (e.row // 4 == 17) for e in examples)
    assert setting.read == [17]
    gc.collect()
