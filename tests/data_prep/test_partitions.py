"""Partition files: partitioned rows come back exactly once, in the right bucket."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from vitline.data_prep.partitions import bucket_of, hash_prefixes, in_groups, read_partition, write_partitions
from vitline.infra.storage import open_store

SCHEMA = pa.schema([("key", pa.uint64()), ("text", pa.string())])
keys_of_files = st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=8), min_size=1, max_size=3)


@settings(deadline=None)
@given(files=keys_of_files, num_buckets=st.integers(1, 5))
def test_every_row_is_in_one_bucket_and_buckets_are_ordered_by_key(files, num_buckets):
    store, names = open_store("memory://partitions"), []
    for i, keys in enumerate(files):
        table = pa.table([pa.array(keys, pa.uint64()), pa.array([f"{i} {key}" for key in keys], pa.string())], SCHEMA)
        names.append(f"file-{i}")
        write_partitions(store, names[-1], table, bucket_of(table["key"].to_numpy(), num_buckets), num_buckets)
    parts = [read_partition(store, names, bucket, SCHEMA).sort_by("key") for bucket in range(num_buckets)]
    found = [row["key"] for part in parts for row in part.to_pylist()]
    assert found == sorted(key for keys in files for key in keys)
    texts = {row["text"] for part in parts for row in part.to_pylist()}
    assert texts == {f"{i} {key}" for i, keys in enumerate(files) for key in keys}


def test_hash_prefix_is_the_first_eight_bytes_as_a_big_endian_number():
    hashes = pa.chunked_array([pa.array([bytes([1] + [0] * 31), bytes([0] * 7 + [2] + [9] * 24)])])
    assert hash_prefixes(hashes).tolist() == [2**56, 2]
    assert bucket_of(np.array([0, 2**63, 2**64 - 1], np.uint64), 4).tolist() == [0, 2, 3]


@given(sizes=st.lists(st.integers(0, 20), max_size=12), limit=st.integers(1, 25))
def test_groups_are_consecutive_and_within_the_limit(sizes, limit):
    groups = in_groups(sizes, limit)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    assert all(len(group) == 1 or sum(sizes[i] for i in group) <= limit for group in groups)
