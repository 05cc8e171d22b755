"""Equal images: a property test against the simplest possible loop."""

import hashlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitline.data_prep.plan.similarity.dedup import LOCATOR_SCHEMA, PIXELS_SCHEMA, exact_duplicates, merged_labels

pictures = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 2),
        st.sampled_from(["train", "val", "test"]),
        st.booleans(),
        st.sampled_from([None, "a", "b"]),
        st.booleans(),
    ),
    max_size=30,
)


def digest(text):
    return hashlib.sha256(text.encode()).digest()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["drop", "keep"])
@given(rows=pictures)
def test_one_of_each_set_of_equal_images_is_kept_and_splits_share_none(policy, rows):
    records = pa.table(
        {
            "example_id": pa.array([f"{i:03d}" for i in range(len(rows))], pa.string()),
            "pixel_sha256": pa.array([digest(f"pixels {row[0]}") for row in rows], pa.binary()),
            "sha256": pa.array([digest(f"pixels {row[0]} file {row[1]}") for row in rows], pa.binary()),
            "split": pa.array([row[2] for row in rows], pa.string()),
            "val_fraction": pa.array([0.1 if row[3] else None for row in rows], pa.float64()),
            "group": pa.array([row[4] for row in rows], pa.string()),
            "order_key": pa.array(range(len(rows)), pa.uint64()),
            "labels": pa.array([["a"]] * len(rows), pa.list_(pa.string())),
            "weights": pa.nulls(len(rows), pa.list_(pa.float32())),
            "is_link": pa.array([row[5] for row in rows], pa.bool_()),
            "known": pa.array([False] * len(rows), pa.bool_()),
        }
    )
    for field in LOCATOR_SCHEMA:
        records = records.append_column(field, pa.nulls(len(rows), field.type))
    rank = {"test": 0, "val": 1, "train": 2}
    expected = {}

    def preference(i):
        picture, file, split, drawn, group, is_link = rows[i]
        return (2 if drawn else rank[split], is_link, group or "c", digest(f"pixels {picture} file {file}"), i)

    for picture in {row[0] for row in rows}:
        members = [i for i, row in enumerate(rows) if row[0] == picture]
        stays = min(members, key=preference)
        for i in members:
            if i != stays and (policy == "drop" or rows[i][2] != rows[stays][2]):
                expected[i] = stays
    found = exact_duplicates(records.select(PIXELS_SCHEMA.names), policy).to_pydict()
    assert {int(i): int(kept) for i, kept in zip(found["example_id"], found["other_id"], strict=True)} == expected
    left = {}
    for i, (picture, _, split, *_) in enumerate(rows):
        if i not in expected:
            assert left.setdefault(picture, split) == split


def test_existing_examples_get_no_labels_of_new_copies():
    for known, gained in ((False, [["b"]]), (True, [])):
        rows = [
            {
                "pixel_sha256": b"p",
                "sha256": b"s",
                "split": "train",
                "val_fraction": None,
                "group": None,
                "example_id": example_id,
                "order_key": 1,
                "is_link": False,
                "known": here,
            }
            | {"labels": [label], "weights": None}
            for example_id, label, here in (("1", "a", known), ("2", "b", False), ("3", "a", False))
        ]
        found = merged_labels(pa.Table.from_pylist(rows, schema=PIXELS_SCHEMA), "drop").to_pylist()
        assert [row["gained"] for row in found] == gained
        assert all((row["labels"], row["weights"]) == (["a", "b"], None) for row in found)
