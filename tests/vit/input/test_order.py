"""Properties of the reading order (vit/input/order.py), and a naive implementation of its definition."""

import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vitline.data_prep.shard_format import SegmentInfo, SplitInfo
from vitline.vit.input.order import Order, RowGroups
from vitline.vit.input.permutation import KeyedPermutation, derive_key, hash64
from vitline.vit.input.plan import check_world_size, plan_order, propose_num_lanes


def split_of(segments, rows_per_group):
    infos = [SegmentInfo(split="train", name=f"s{i:03d}", num_rows=n, num_shards=1) for i, n in enumerate(segments)]
    return SplitInfo(
        num_rows=sum(segments),
        rows_per_row_group=rows_per_group,
        row_groups_per_shard=10**9,
        segments=tuple(infos),
        digest="",
    )


def order_of(segments, rows_per_group, lanes, window, batch=None, seed=0, digest="d"):
    return Order(
        split_of(segments, rows_per_group),
        corpus_digest=digest,
        seed=seed,
        global_batch_size=batch or lanes,
        num_lanes=lanes,
        shuffle_window=window,
    )


@st.composite
def orders(draw):
    segments = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    rows_per_group = draw(st.integers(1, 9))
    num_groups = sum(-(-n // rows_per_group) for n in segments)
    lanes = draw(st.integers(1, min(num_groups, 12)))
    return order_of(
        segments,
        rows_per_group,
        lanes,
        draw(st.integers(1, 5)),
        batch=lanes * draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**32)),
    )


def naive_epoch(segments, rows_per_group, lanes, window, seed, digest, epoch):
    """One epoch as a list of (lane, row), implemented with lists from the sentences of the definition."""
    groups, start = [], 0
    for num_rows in segments:
        rows = list(range(start, start + num_rows))
        groups += [rows[i : i + rows_per_group] for i in range(0, num_rows, rows_per_group)]
        start += num_rows
    deal = KeyedPermutation(len(groups), hash64(derive_key(seed, "order.deal", digest), epoch))
    dealt = [[] for _ in range(lanes)]
    for slot, group in enumerate(deal(range(len(groups)))):
        dealt[slot % lanes].append(groups[group])
    shuffled = []
    for lane, of_lane in enumerate(dealt):
        rows = []
        for block, first in enumerate(range(0, len(of_lane), window)):
            together = [row for group in of_lane[first : first + window] for row in group]
            key = hash64(hash64(derive_key(seed, "order.block", digest), epoch), lane, block)
            rows += [together[i] for i in KeyedPermutation(len(together), key)(range(len(together)))]
        shuffled.append(rows)
    taken = []
    while any(shuffled):
        taken += [(lane, rows.pop(0)) for lane, rows in enumerate(shuffled) if rows]
    return taken


@settings(max_examples=40)
@given(
    segments=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    rows_per_group=st.integers(1, 7),
    window=st.integers(1, 4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_order_equals_the_naive_definition(segments, rows_per_group, window, seed, data):
    num_groups = sum(-(-n // rows_per_group) for n in segments)
    lanes = data.draw(st.integers(1, min(num_groups, 8)))
    order = order_of(segments, rows_per_group, lanes, window, seed=seed)
    expected = [x for e in (0, 1) for x in naive_epoch(segments, rows_per_group, lanes, window, seed, "d", e)]
    found = order.locate(np.arange(2 * sum(segments)))
    assert list(zip(found.lane.tolist(), found.row.tolist(), strict=True)) == expected
    assert found.epoch.tolist() == [0] * sum(segments) + [1] * sum(segments)


def test_order_matches_an_example_worked_out_by_hand(monkeypatch):
    """Segments of 5 and 2 rows, R = 2: groups ab cd e | fg. Dealt to two lanes in the order 2 0 3 1: e fg | ab cd.

    Blocks of w = 2 groups, reversed: lane 0 reads g f e, lane 1 reads d c b a. Read in turn: g d f c e b a.
    """

    class Reversed:
        def __init__(self, size, key):
            self.size = np.asarray(size)

        def __call__(self, i):
            return np.array([2, 0, 3, 1])[i] if self.size.ndim == 0 else self.size - 1 - i

        def inverse(self, i):
            return np.array([1, 3, 0, 2])[i] if self.size.ndim == 0 else self.size - 1 - i

    monkeypatch.setattr("vitline.vit.input.order.KeyedPermutation", Reversed)
    order = order_of([5, 2], rows_per_group=2, lanes=2, window=2)
    found = order.locate(np.arange(7))
    assert "".join("abcdefg"[i] for i in found.row) == "gdfceba"
    assert found.lane.tolist() == [0, 1, 0, 1, 0, 1, 1]
    assert found.row_group.tolist() == [3, 1, 3, 1, 2, 0, 0]
    assert found.row_in_group.tolist() == [1, 1, 0, 0, 0, 1, 0]
    assert order.position_of(0, np.arange(7)).tolist() == [6, 5, 3, 1, 4, 2, 0]


@settings(max_examples=50)
@given(order=orders(), epoch=st.integers(0, 10**6))
def test_every_example_occurs_once_per_epoch_and_its_position_is_found(order, epoch):
    positions = np.arange(epoch * order.num_rows, (epoch + 1) * order.num_rows)
    found = order.locate(positions)
    assert sorted(found.row.tolist()) == list(range(order.num_rows))
    assert (order.position_of(epoch, found.row) == positions).all()


@settings(max_examples=50)
@given(order=orders())
def test_row_groups_are_located_as_stored(order):
    found = order.locate(np.arange(order.num_rows))
    assert (order.groups.group_of(found.row) == found.row_group).all()
    assert (found.row_in_group < order.groups.size(found.row_group)).all()
    assert sorted(zip(found.row_group.tolist(), found.row_in_group.tolist(), strict=True)) == [
        (g, i) for g in range(order.groups.num_groups) for i in range(int(order.groups.size(g)))
    ]


@settings(max_examples=50)
@given(order=orders(), data=st.data())
def test_ranks_split_every_batch_for_any_world_size(order, data):
    world_size = data.draw(st.integers(1, order.num_lanes))
    batch = data.draw(st.integers(0, 50))
    found = order.locate(order.slots(batch))
    shares = [found.row[found.lane % world_size == rank] for rank in range(world_size)]
    assert sum(map(len, shares)) == order.global_batch_size
    assert sorted(np.concatenate(shares)) == sorted(found.row)


@settings(max_examples=50)
@given(order=orders(), data=st.data())
def test_seeking_equals_iterating(order, data):
    batch = data.draw(st.integers(0, 40))
    all_rows = order.locate(np.arange((batch + 1) * order.global_batch_size)).row
    assert (order.locate(order.slots(batch)).row == all_rows[-order.global_batch_size :]).all()


@settings(max_examples=50)
@given(order=orders())
def test_lanes_differ_by_at_most_one_row_group_and_shuffles_stay_in_their_block(order):
    found = order.locate(np.arange(order.num_rows))
    groups = [len(set(found.row_group[found.lane == lane].tolist())) for lane in range(order.num_lanes)]
    assert max(groups) - min(groups) <= 1
    for lane in range(order.num_lanes):
        mine = found.lane == lane
        blocks = found.block[mine]
        assert (np.diff(found.lane_row[mine]) == 1).all()
        assert (np.diff(blocks) >= 0).all()
        for block in np.unique(blocks):
            inside = set(found.row_group[mine][blocks == block].tolist())
            assert inside == set(order.block_groups(0, lane, int(block)).tolist())
            assert len(inside) <= order.shuffle_window


def test_seed_epoch_and_corpus_change_the_order():
    def rows(epoch=0, **changes):
        order = order_of([500], rows_per_group=8, lanes=4, window=2, **changes)
        return order.locate(np.arange(500) + 500 * epoch).row.tolist()

    orders_seen = [rows(), rows(epoch=1), rows(seed=1), rows(digest="other")]
    assert len(set(map(tuple, orders_seen))) == 4
    assert rows() == orders_seen[0]


def test_distant_positions_are_located_without_iterating():
    """A split of the size of JFT after a million epochs: only per-lane state is kept in memory."""
    order = order_of([303_000_000, 1_000], rows_per_group=64, lanes=512, window=8, batch=4096)
    position = 10**6 * order.num_rows + np.arange(4096) * 73_000
    found = order.locate(position)
    assert (order.position_of(found.epoch, found.row) == position).all()


def test_invalid_lanes_window_and_world_size_are_refused():
    with pytest.raises(ValueError, match=r"num_lanes=3 must divide global_batch_size=8"):
        order_of([100], 4, lanes=3, window=1, batch=8)
    with pytest.raises(
        ValueError, match=r"num_lanes=8 is more than the 3 row groups .* \(12 rows, 4 per group\)"
    ) as refused:
        order_of([12], 4, lanes=8, window=1)
    advised = re.search(r"`--set recipe\.input\.num_lanes=(\d+)`", str(refused.value)).group(1)
    assert order_of([12], 4, lanes=int(advised), window=1, batch=8).num_lanes == 2  # 3 does not divide the batch
    with pytest.raises(ValueError, match=r"world_size=9 must be 1 to num_lanes=8"):
        check_world_size(9, 8)
    with pytest.raises(ValueError, match="must all be 1 or more"):
        order_of([12], 4, lanes=1, window=0)


def test_plan_matches_hand_calculation():
    """10 groups of 4 rows on 4 lanes: 12 12 8 8 rows; of 3 ranks, rank 0 serves lanes 0 and 3."""
    order = order_of([40], rows_per_group=4, lanes=4, window=2, batch=8)
    plan = plan_order(order, world_size=3, mean_row_group_bytes=1000)
    assert (plan.max_lanes_per_rank, plan.min_lanes_per_rank) == (2, 1)
    assert plan.rank_imbalance_fraction == pytest.approx((12 + 8) / (40 / 3) - 1)
    assert plan.thin_fraction == pytest.approx(8 / 40)  # after 8 rounds of 4, two lanes read 4 more rows each
    assert plan.open_memory_bytes == 2 * 2 * 1000


@given(st.integers(1, 400), st.integers(1, 512), st.integers(1, 8), st.integers(1, 8))
def test_proposed_num_lanes_is_always_valid(num_rows, batch, window, world_size):
    split = split_of([num_rows], 4)
    assume(any(batch % n == 0 for n in range(world_size, min(batch, -(-num_rows // 4)) + 1)))
    lanes = propose_num_lanes(
        split,
        global_batch_size=batch,
        shuffle_window=window,
        world_size=world_size,
        mean_row_group_bytes=window * 2**28,
    )
    order_of([num_rows], 4, lanes, window, batch=batch)
    check_world_size(world_size, lanes)


def test_proposed_num_lanes_for_typical_sizes():
    def lanes(num_rows, rows_per_group, **given):
        return propose_num_lanes(split_of([num_rows], rows_per_group), **given)

    eight_mib = 2**23
    assert lanes(14_000_000, 64, global_batch_size=4096, shuffle_window=4, mean_row_group_bytes=eight_mib) == 64
    assert lanes(6000, 16, global_batch_size=64, shuffle_window=4, world_size=2, mean_row_group_bytes=10**5) == 64
    assert lanes(800, 4, global_batch_size=64, shuffle_window=8, world_size=2, mean_row_group_bytes=10**5) == 16
    with pytest.raises(ValueError, match="Use fewer workers"):
        lanes(8, 4, global_batch_size=64, shuffle_window=1, world_size=3, mean_row_group_bytes=10**5)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_row_groups_of_any_sizes_are_those_of_segments_of_one_group_each(sizes):
    """So all laws above hold for them."""
    found, expected = RowGroups.of_sizes(np.array(sizes)), RowGroups.of(split_of(sizes, max(sizes)))
    for name, value in vars(expected).items():
        assert np.array_equal(getattr(found, name), value), name
