"""Merged statistics of parts equal those of the whole, and the whole equals hand-counted values."""

import functools
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitline.data_prep.plan.corpus_stats import (
    ASPECT_RATIO,
    PAIRS_SCHEMA,
    SIDE_PX,
    CorpusStats,
    Leak,
    SampleRule,
    merged,
)
from vitline.infra.storage import json_bytes

NUM_CLASSES, RULE = 40, SampleRule(num_classes=7, per_class=3, per_finding=4)


def places(ids, prefix=""):
    return {
        f"{prefix}base": ["file:///pictures"] * len(ids),
        f"{prefix}key": list(ids),
        f"{prefix}offset": [0] * len(ids),
        f"{prefix}length": pa.array([100] * len(ids), pa.int64()),
    }


def accepted_of(ids, labels, splits, sizes, order_keys, kinds=None):
    kinds = kinds or [("JPEG", "RGB")] * len(ids)
    return pa.table(
        {
            "example_id": pa.array(ids, pa.string()),
            "labels": pa.array(labels, pa.list_(pa.int32())),
            "split": pa.array(splits, pa.string()),
            **places(ids),
            "order_key": pa.array(order_keys, pa.uint64()),
            "num_bytes": pa.array([w * h for w, h in sizes], pa.int64()),
            "width_px": pa.array([w for w, _ in sizes], pa.int32()),
            "height_px": pa.array([h for _, h in sizes], pa.int32()),
            "format": pa.array([f for f, _ in kinds], pa.string()),
            "mode": pa.array([m for _, m in kinds], pa.string()),
        }
    )


def rejects_of(reasons):
    ids = list(reasons)
    columns = {"example_id": ids, "reason": list(reasons.values()), "detail": ["found so"] * len(ids)}
    return pa.table(columns | places(ids), schema=REJECTS)


REJECTS = pa.schema(
    [(name, pa.string()) for name in ("example_id", "reason", "detail", "base", "key")]
    + [("offset", pa.int64()), ("length", pa.int64())]
)


def pairs_of(rows):
    """Rows of (id, kind, left out, other corpus or None, other split, labels differ)."""
    ids = [row[0] for row in rows]
    columns = {
        "example_id": ids,
        "split": ["train"] * len(rows),
        "kind": [row[1] for row in rows],
        "detail": pa.nulls(len(rows), pa.string()),
        "left_out": [row[2] for row in rows],
        "other_corpus": pa.array([row[3] for row in rows], pa.string()),
        "other_split": [row[4] for row in rows],
        "labels_differ": [row[5] for row in rows],
        "other_id": [f"other of {name}" for name in ids],
    }
    return pa.table(columns | places(ids) | places(ids, "other_"), schema=PAIRS_SCHEMA)


def drawn(seed, num_rows):
    rng = np.random.default_rng(seed)
    ids = [f"picture {i}" for i in range(num_rows)]
    labels = [rng.choice(NUM_CLASSES, rng.integers(1, 5), replace=False).tolist() for _ in ids]
    accepted = accepted_of(
        ids,
        labels,
        rng.choice(["train", "val", "test"], num_rows, p=(0.8, 0.1, 0.1)).tolist(),
        rng.integers(1, 3000, (num_rows, 2)).tolist(),
        rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        [(f, "RGB") for f in rng.choice(["JPEG", "PNG"], num_rows)],
    )
    rejects = rejects_of({f"bad {i}": str(rng.choice(["corrupt", "empty"])) for i in range(num_rows // 3)})
    kinds = rng.choice(["same_file", "same_pixels", "near"], num_rows)
    corpora = rng.choice([None, "pets/1", "birds/2"], num_rows)
    pairs = pairs_of(
        [
            (ids[i], str(kinds[i]), bool(i % 3), corpora[i], "test" if i % 2 else "train", i % 5 == 0)
            for i in range(num_rows)
        ]
    )
    return accepted, rejects, pairs


def stats_of(accepted, rejects, pairs=PAIRS_SCHEMA.empty_table(), compared=()):  # noqa: B008
    return CorpusStats.of(accepted, rejects, NUM_CLASSES, RULE, pairs, compared)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), num_rows=st.integers(0, 60), num_parts=st.integers(1, 5))
def test_merged_statistics_do_not_depend_on_how_rows_were_partitioned(data, num_rows, num_parts):
    tables = drawn(num_rows, num_rows)
    whole = stats_of(*tables, [("pets/1", "test")])
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    parts = []
    owners = [rng.integers(0, num_parts, table.num_rows) for table in tables]
    for part in range(num_parts):
        mine = [
            table.take(pa.array(rng.permutation(np.flatnonzero(owner == part))))
            for table, owner in zip(tables, owners, strict=True)
        ]
        parts.append(stats_of(*mine, [("pets/1", "test")]))
    assert functools.reduce(merged, parts).to_json() == whole.to_json()
    # in reverse order
    assert functools.reduce(lambda a, b: merged(b, a), parts).to_json() == whole.to_json()


def test_statistics_survive_pickle_and_json():
    stats = stats_of(*drawn(1, 50), [("pets/1", "test")])
    stored = json.loads(json_bytes(stats.to_json()))
    assert CorpusStats.from_json(stored).to_json() == stats.to_json()
    assert pickle.loads(pickle.dumps(stats)).to_json() == stats.to_json()
    del stored["kinds"]
    with pytest.raises(ValueError, match="Prepare the corpus again"):
        CorpusStats.from_json(stored)


def test_counts_of_five_images():
    accepted = accepted_of(
        ["a", "b", "c", "d", "e"],
        [[0], [0, 39], [39], [39], [0]],
        ["train", "train", "train", "test", "train"],
        [(64, 64), (128, 32), (64, 64), (1, 1), (30000, 30000)],
        [50, 40, 30, 20, 10],
        [("JPEG", "RGB"), ("PNG", "P"), ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "RGB")],
    )
    stats = stats_of(accepted, rejects_of({"x": "empty", "y": "corrupt", "z": "empty"}))
    assert (stats.num_rows, stats.num_refused) == (5, 3)
    assert stats.splits["train"].class_counts[[0, 1, 39]].tolist() == [3, 0, 2]
    assert stats.splits["test"].class_counts.sum() == 1
    assert stats.splits["test"].num_bytes == 1
    assert stats.labels_per_image[:4].tolist() == [0, 4, 1, 0]
    assert stats.kinds == {"JPEG RGB": 3, "PNG P": 1, "JPEG L": 1}
    sides = dict(zip(SIDE_PX.edges, stats.side_px, strict=False))
    assert {edge: n for edge, n in sides.items() if n} == {1.0: 1, 64.0: 3, SIDE_PX.edges[89]: 1}
    assert stats.aspect_ratio[len(stats.aspect_ratio) // 2] == 4  # squares have a bin around 1
    # the smallest order keys first; an image of two classes is listed in both
    assert [row.example_id for row in stats.sheet[0]] == ["e", "b", "a"]
    assert [row.example_id for row in stats.sheet[39]] == ["d", "c", "b"]
    assert stats.refused["empty"].count == 2
    assert {each.image.key for each in stats.refused["empty"].first} == {"x", "z"}


def test_duplicates_and_leaks_are_counted_by_kind_and_split():
    pairs = pairs_of(
        [
            ("a", "same_file", True, None, "train", False),
            ("b", "near", False, None, "test", True),
            ("c", "near", True, "pets/1", "test", False),
            ("d", "same_pixels", False, "pets/1", "test", False),
            ("d", "near", False, "pets/1", "test", False),  # an image that matches two others counts once as leaked
        ]
    )
    stats = stats_of(
        *(table.slice(0, 0) for table in drawn(0, 1)[:2]), pairs, [("pets/1", "test"), ("birds/2", "test")]
    )
    found = {kind: (each.count, each.num_left_out) for kind, each in stats.duplicates.items()}
    assert found == {"same_file": (1, 1), "near": (1, 0), "conflicting_labels": (1, 0), "across_splits": (1, 0)}
    leak = stats.leakage[Leak("pets/1", "test", "train")]
    assert (leak.count, leak.num_left_out, len(leak.first)) == (2, 1, 3)
    assert {each.other.example_id for each in leak.first} == {"other of c", "other of d"}
    assert len(stats.compared) == 2


def test_pairs_without_locations_keep_their_ids():
    pairs = pa.Table.from_pylist([{"example_id": "a", "kind": "near", "other_id": "b"}], schema=PAIRS_SCHEMA)
    stats = stats_of(*(table.slice(0, 0) for table in drawn(0, 1)[:2]), pairs)
    assert stats.duplicates.keys() == {"near"}
    assert stats.duplicates["near"].first[0].other.base == ""


def test_statistics_have_a_bounded_size():
    small, large = (len(pickle.dumps(stats_of(*drawn(2, n)))) for n in (300, 3000))
    assert large < 1.1 * small


def test_histogram_bins_have_the_documented_edges():
    assert SIDE_PX.count(np.array([0.1, 1.0, 1e9]))[[0, -1]].tolist() == [2, 1]
    assert ASPECT_RATIO.count(np.array([1.0, 1.04, 0.96])).max() == 3
    values = np.repeat([100.0, 1000.0], [90, 10])
    assert SIDE_PX.quantile(SIDE_PX.count(values), 0.5) == pytest.approx(100, rel=0.07)
    assert SIDE_PX.quantile(SIDE_PX.count(values), 0.95) == pytest.approx(1000, rel=0.07)


def test_incompatible_statistics_are_refused():
    accepted, rejects, _ = drawn(3, 20)
    with pytest.raises(ValueError, match="class map has 5 classes"):
        CorpusStats.of(accepted, rejects, 5, RULE)
    with pytest.raises(ValueError, match="cannot merge statistics"):
        merged(stats_of(accepted, rejects), CorpusStats.of(accepted, rejects, NUM_CLASSES, SampleRule()))
