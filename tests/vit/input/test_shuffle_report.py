"""The figures of a reading order, worked out by hand or from all its positions."""

import sys
from itertools import combinations
from math import log2
from pathlib import Path

import numpy as np
import pytest

from vitline.data_prep.shard_format import ShardReader
from vitline.vit.input.order import Order

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from shuffle_report import SmallColumns, shuffle_report


@pytest.fixture
def corpus(corpus_maker, tmp_path):
    """corpus(labels, ...): columns, and a function that makes an order; row i has the labels of `labels[i]`."""

    def make(labels, rows_per_group=4, segments=None):
        lists = [each if isinstance(each, list) else [each] for each in labels]
        made = corpus_maker(tmp_path / f"c{len(labels)}", segments or (len(labels),), rows_per_group, labels=lists)

        def order(batch, lanes, window, seed=0):
            return Order(
                made.manifest.split("train"),
                corpus_digest="d",
                seed=seed,
                global_batch_size=batch,
                num_lanes=lanes,
                shuffle_window=window,
            )

        return SmallColumns(made.store, made.manifest, "train"), order

    return make


def test_figures_worked_out_by_hand(corpus):
    """With one lane and a window of one row group, a batch of 4 is a row group, in any order."""
    labels = [0, 0, 1, 1, 0, 0, 0, 2]
    columns, order = corpus(labels)
    report = shuffle_report(order(4, 1, 1), columns)
    three_to_one = 0.75 * log2(4 / 3) + 0.25 * log2(4)
    assert report.class_entropy_bits.value == pytest.approx((1 + three_to_one) / 2)
    assert (report.row_group_pairs.value, report.source_pairs.value, report.neighbours.value) == (6, 6, 3)
    assert (report.num_batches, report.num_rows, report.num_row_groups, report.num_sources) == (64, 8, 2, 1)

    halves = [np.unique([labels[i] for i in half], return_counts=True)[1] / 4 for half in combinations(range(8), 4)]
    expected = np.mean([-(share * np.log2(share)).sum() for share in halves])
    figures = (report.class_entropy_bits, report.row_group_pairs, report.neighbours)
    for figure, exact in zip(figures, (expected, 6 * 3 / 7, 6 * 7 / 28), strict=True):
        assert figure.low <= figure.perfect <= figure.high
        assert figure.perfect == pytest.approx(exact, rel=0.05)


def test_every_label_of_an_example_counts_and_a_batch_may_have_none(corpus):
    columns, order = corpus([[0, 1], [0], [], [2], [], [], [], []])
    report = shuffle_report(order(4, 1, 1), columns)
    assert report.class_entropy_bits.value == pytest.approx((0.5 * log2(2) + 2 * 0.25 * log2(4)) / 2)


def test_repeats_are_the_distances_in_the_list_of_all_positions(corpus):
    columns, order = corpus([i % 3 for i in range(46)], segments=(37, 9))
    for chosen in (order(4, 2, 1), order(12, 3, 2, seed=5)):
        report = shuffle_report(chosen, columns, num_batches=20)
        rows = chosen.locate(np.arange(46 * 10)).row.tolist()
        distances = [rows.index(rows[p], p // 46 * 46 + 46) - p for p in range(20 * chosen.global_batch_size)]
        assert report.shortest_repeat.value == min(distances)
        assert report.median_repeat.value == np.median(distances)
        assert report.median_repeat.low <= 46 <= report.median_repeat.high


def test_a_lane_that_ends_early_makes_the_entropy_too_low(corpus):
    """Three row groups on two lanes: the last third of an epoch comes from one lane, with two classes at most."""
    columns, order = corpus([i // 40 for i in range(120)], rows_per_group=40)
    assert shuffle_report(order(20, 2, 1), columns).too_low


@pytest.mark.slow
def test_a_true_shuffle_is_seldom_out_of_the_range_of_perfect_ones(corpus):
    """One lane with a window as long as an epoch is a perfect shuffle: 5 % are outside, 2.5 % on either side."""
    columns, order = corpus([i // 24 for i in range(96)])
    reports = [shuffle_report(order(16, 1, 24, seed), columns) for seed in range(30)]
    for name in ("class_entropy_bits", "row_group_pairs", "neighbours", "shortest_repeat", "median_repeat"):
        figures = [getattr(report, name) for report in reports]
        assert sum(not figure.low <= figure.value <= figure.high for figure in figures) <= 6, name
    assert not any(report.too_low for report in reports)


def test_a_large_split_is_sampled_and_images_are_never_read(corpus, monkeypatch):
    columns, order = corpus([i % 5 for i in range(192)], rows_per_group=2)
    read, row_group = [], ShardReader.row_group

    def spy(self, index, columns=None):
        read.append((index, tuple(columns)))
        return row_group(self, index, columns)

    monkeypatch.setattr(ShardReader, "row_group", spy)
    report = shuffle_report(order(8, 4, 2), columns, num_batches=24, most_rows=60)
    assert len(read) == report.num_row_groups == len({index for index, _ in read})
    assert 1 < report.num_batches < 24
    assert report.num_rows == 2 * report.num_row_groups <= 60
    assert report.row_group_pairs.perfect == pytest.approx(28 / 191, rel=0.35), "as if drawn from the whole split"
    assert {columns for _, columns in read} == {("labels", "example_id", "source")}
    shuffle_report(order(8, 4, 2), columns, num_batches=24, most_rows=60)
    assert len(read) == report.num_row_groups, "the same rows are read once"
