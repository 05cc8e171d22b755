"""The simulation of a training on many nodes, against closed forms and against its own laws."""

from dataclasses import replace
from math import exp, pi, sqrt
from random import Random
from statistics import fmean

import pytest

from vitline.vit.cost.cluster_assumptions import ClusterAssumptions
from vitline.vit.cost.cluster_twin import (
    KEPT,
    MOST_NODES,
    Stretch,
    Workload,
    knee_of,
    simulate,
    slowest_of,
    step_time,
    twin,
)

WORK = Workload(
    total_steps=10_000,
    save_every_steps=500,
    global_batch_size=4_096,
    num_lanes=256,
    micro_batch=128,
    images_per_s=256.0,
    decode_threads=8,
    bytes_per_image=1e5,
    sent_bytes=4e8,
    checkpoint_bytes=1e9,
    overlaps=True,
    min_workers=None,
    max_restarts=3,
)
CALM = ClusterAssumptions(step_scatter=0, failures_per_node_day=0)
"""Nothing is random."""


def test_without_failures_and_scatter_days_are_steps_saves_and_one_start():
    """16 images a rank and step are 1/16 s; twenty saves hold the steps for 1 s each, and the last checkpoint takes 1 GB / (32 nodes x
    12.5 GB/s, of which the store gives 25 GB/s) = 0.04 s."""
    found = simulate(WORK, CALM, 32, Random(0))
    assert step_time(WORK, CALM, 32).step_s == 0.0625
    assert found.wall_s == pytest.approx(180 + 10_000 / 16 + 20 + 0.04)
    assert (found.failures, found.ended, found.parts["lost work"]) == (0, True, 0)


def test_a_write_that_is_slower_than_the_steps_holds_the_next_save():
    """Blocks of 100 s, 100 s and 50 s with writes of 80 s, then of 120 s: saves wait for the write before."""
    quick, slow = (Stretch(10.0, 250, 100, 1.0, 2.0, write_s) for write_s in (80.0, 120.0))
    assert [quick.saved(block) for block in range(4)] == [10, 112, 214, 296]
    assert [slow.saved(block) for block in range(4)] == [10, 112, 234, 356]
    assert (quick.whole(3), slow.whole(3)) == (376, 476)
    assert [slow.blocks_at(time) for time in (0, 231.9, 232, 353.9, 354, 475.9)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("per_day", "block"), [(1.0, 500), (12.0, 500), (12.0, 2_000)])
def test_failures_cost_what_dalys_formula_says(per_day, block):
    """Daly (2006), the complete cost function: M e^(R/M) (e^((tau + delta)/M) - 1) for each block of tau seconds, where checkpoints are
    written at once. The first start may fail like the others: M (e^(R/M) - 1)."""
    work = replace(WORK, save_every_steps=block, checkpoint_bytes=0, max_restarts=10**9)
    assumed = ClusterAssumptions(step_scatter=0, failures_per_node_day=per_day, replacement_s=0, save_stall_s=20)
    between, step_s = 86_400 / per_day / 4, step_time(work, assumed, 4).step_s
    start, blocks, random = assumed.start_s, work.total_steps / block, Random(1)
    expected = between * exp(start / between) * (exp((block * step_s + 20) / between) - 1) * blocks
    expected += between * (exp(start / between) - 1)
    found = [simulate(work, assumed, 4, random).wall_s for _ in range(2_000)]
    assert fmean(found) == pytest.approx(expected, rel=0.01)


def test_rare_failures_lose_half_a_block_each():
    """Young (1974): a failure loses half of the time between two checkpoints."""
    work, random = replace(WORK, checkpoint_bytes=0), Random(2)
    assumed = ClusterAssumptions(step_scatter=0, failures_per_node_day=0.2, save_stall_s=0)
    found = [simulate(work, assumed, 4, random) for _ in range(4_000)]
    failures = sum(one.failures for one in found)
    lost = sum(one.parts["lost work"] for one in found) / failures
    in_steps = 1 - fmean(one.parts["starts and waits"] for one in found) / fmean(one.wall_s for one in found)
    assert lost == pytest.approx(in_steps * 500 * step_time(work, assumed, 4).step_s / 2, rel=0.08)


def test_the_slowest_of_two_ranks_and_of_one():
    """The larger of two normal numbers is 1 / sqrt(pi) standard deviations above the mean; a log-normal of 1 % is nearly normal."""
    mean, deviation = slowest_of(1, 0.01)
    assert (mean, deviation) == (pytest.approx(1, abs=1e-5), pytest.approx(0.01, rel=0.01))
    mean, deviation = slowest_of(2, 0.01)
    assert mean == pytest.approx(1 + 0.01 / sqrt(pi), abs=1e-4)
    assert deviation == pytest.approx(0.01 * sqrt(1 - 1 / pi), rel=0.02)
    assert slowest_of(1_000, 0.0) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "assumed", "limit"),
    [
        ({}, {}, "compute"),
        ({}, {"link_bytes_per_s": 1e9}, "network"),
        ({"decode_threads": 1}, {"decode_images_per_core_s": 200}, "decode"),
        ({}, {"store_bytes_per_s": 1e8}, "store"),
        ({}, {"store_node_bytes_per_s": 1e7}, "store"),
    ],
)
def test_what_limits_a_step_is_named(changes, assumed, limit):
    """On 8 nodes: 64 images a rank are 1/4 s of computing, of which 1/6 s hides gradients; with 1 GB/s these take 0.7 s."""
    found = step_time(replace(WORK, **changes), ClusterAssumptions(step_scatter=0, link_latency_s=0, **assumed), 8)
    assert found.limit == limit
    expected = {
        "compute": 0.25,
        "network": 0.25 + 0.7 - 0.5 / 3,
        "decode": 64 / 200,
        "store": 4.096 if "store_bytes_per_s" in assumed else 5.12,
    }
    assert found.step_s == pytest.approx(expected[limit])


def test_every_step_waits_for_a_slow_node_and_for_the_latency_of_links():
    """64 images a rank are 1/4 s, with half the speed 1/2 s. A message goes up and down a tree of 8 nodes, three links each way."""
    work = replace(WORK, overlaps=False, sent_bytes=0)
    found = step_time(work, ClusterAssumptions(step_scatter=0, slow_node_speed=0.5, link_latency_s=0.01), 8)
    assert found == (pytest.approx(0.25), pytest.approx(0.25), pytest.approx(0.06), 0, 0, "compute")
    found = step_time(work, ClusterAssumptions(step_scatter=0.3, slow_node_speed=0.9), 8)
    assert found.slowest_s == pytest.approx(0.25 * (slowest_of(64, 0.3)[0] - 1)), "scatter makes another rank slower"
    slow = ClusterAssumptions(step_scatter=0, slow_node_speed=0.5, decode_images_per_core_s=20)
    assert step_time(WORK, slow, 8).step_s == pytest.approx(64 / (8 * 20 * 0.5)), "its decoding is slow as well"


def test_a_rank_with_more_lanes_than_others_sets_the_step():
    """Of 256 lanes the busiest of 24 ranks has 11, 176 images, and the mean is 170.7."""
    found = step_time(WORK, CALM, 3)
    assert (found.compute_s, found.step_s) == (pytest.approx(4_096 / 24 / 256), pytest.approx(176 / 256))


def test_an_elastic_training_goes_on_while_a_node_is_replaced():
    """The other three nodes train for the hour that a fixed training waits."""
    assumed = ClusterAssumptions(failures_per_node_day=2, replacement_s=3_600)
    found = {}
    for fewest in (None, 8):
        work, random = replace(WORK, min_workers=fewest), Random(3)
        found[fewest] = [simulate(work, assumed, 4, random) for _ in range(300)]
    idle = {
        fewest: sum(one.parts["starts and waits"] - 180 for one in each) / sum(one.failures for one in each)
        for fewest, each in found.items()
    }
    assert idle[None] > 3_000, "an hour, unless the next node fails meanwhile"
    assert idle[8] < 2 * 180 + 60, "a failure costs a start, and another one when the node is replaced"
    assert fmean(one.wall_s for one in found[8]) < fmean(one.wall_s for one in found[None])


def test_rows_end_at_the_lanes_and_are_the_same_each_time():
    found = twin(WORK, ClusterAssumptions(node_hour_price=10))
    assert found == twin(WORK, ClusterAssumptions(node_hour_price=10))
    assert [row.nodes for row in found.rows] == [1, 2, 4, 8, 16, 32]
    nodes, reason = found.not_possible
    assert nodes == 64
    assert "world_size=512 must be 1 to num_lanes=256" in reason
    for row in found.rows:
        assert sum(row.shares.values()) == pytest.approx(1)
        assert row.goodput == pytest.approx(sum(row.shares[part] for part in KEPT))
        assert row.days_low <= row.days <= row.days_high
        assert row.price == pytest.approx(row.days * 24 * 10 * row.nodes)


def test_the_table_goes_up_to_1024_nodes():
    found = twin(replace(WORK, num_lanes=8_192, global_batch_size=8_192), CALM)
    assert (found.rows[-1].nodes, found.not_possible) == (MOST_NODES, None)


def test_the_knee_is_where_a_doubling_first_brings_less():
    rows = [
        row._replace(days=days) for row, days in zip(twin(WORK, CALM).rows, (16, 8, 4.4, 2.5, 1.3, 0.7), strict=True)
    ]
    assert knee_of(rows, 0.8).nodes == 4  # 4.4 / 2.5 is 1.76
    assert knee_of(rows, 0.7).nodes == 32
    assert knee_of([], 0.8) is None


def test_a_training_that_cannot_get_through_says_why():
    found = twin(WORK, ClusterAssumptions(failures_per_node_day=1_000))
    assert not found.rows
    assert found.not_possible[0] == 1
    assert "simulations fail on the way: a node fails every 86 s" in found.not_possible[1]
