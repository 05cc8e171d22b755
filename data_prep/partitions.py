"""Tables partitioned into buckets on storage: brings together any number of records without holding all of them.

A partition file holds one table split into K buckets: K + 1 offsets of 8 bytes, then K Arrow streams. Reading a bucket takes
two range requests. Every writer writes one file; every reader reads its bucket from all files.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from vitline.infra.storage import Store

_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


def bucket_of(keys: np.ndarray, num_buckets: int) -> np.ndarray:
    """Bucket of every uniform uint64 key, by key range: buckets in order hold keys in order."""
    high = keys.astype(np.uint64) >> np.uint64(32)
    return ((high * np.uint64(num_buckets)) >> np.uint64(32)).astype(np.int64)


def hash_prefixes(hashes: pa.ChunkedArray) -> np.ndarray:
    """The first 8 bytes of every hash as uint64."""
    joined = b"".join(value[:8] for value in hashes.to_pylist())
    return np.frombuffer(joined, dtype=">u8").astype(np.uint64)


def write_partitions(store: Store, key: str, table: pa.Table, buckets: np.ndarray, num_buckets: int) -> None:
    """Write the rows of a table partitioned by `buckets`; the order within a bucket is kept."""
    order = np.argsort(buckets, kind="stable")
    starts = np.searchsorted(buckets[order], np.arange(num_buckets + 1))
    partitioned = table.take(pa.array(order)).combine_chunks()
    streams = [_stream(partitioned.slice(a, b - a)) for a, b in itertools.pairwise(starts)]
    header = 8 * (num_buckets + 1)
    offsets = header + np.concatenate([[0], np.cumsum([len(stream) for stream in streams])])
    store.write(key, offsets.astype("<u8").tobytes() + b"".join(streams))


def write_by_key(store: Store, key: str, table: pa.Table, keys: np.ndarray, num_buckets: int) -> None:
    """Write the rows of a table partitioned by the range of their uniform uint64 keys."""
    write_partitions(store, key, table, bucket_of(keys, num_buckets), num_buckets)


def _stream(table: pa.Table) -> bytes:
    if not table.num_rows:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=_OPTIONS) as writer:
        writer.write_table(table)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def read_partition(store: Store, keys: Sequence[str], bucket: int, schema: pa.Schema) -> pa.Table:
    """Bucket `bucket` of every file, concatenated; an empty table of `schema` if it is empty."""
    return pa.concat_tables([schema.empty_table(), *(t for key in keys if (t := _bucket(store, key, bucket)))])


def _bucket(store: Store, key: str, bucket: int) -> pa.Table | None:
    start, end = np.frombuffer(store.read_all_of(key, 8 * bucket, 8 * bucket + 16), dtype="<u8").tolist()
    return pa.ipc.open_stream(store.read_all_of(key, start, end)).read_all() if end > start else None


def in_groups(sizes: Sequence[int], limit: int) -> list[range]:
    """Split positions into consecutive groups whose sizes sum to at most `limit`; a larger single size is its own group."""
    groups, first, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > limit:
            groups.append(range(first, i))
            first, total = i, 0
        total += size
    if len(sizes) > first:
        groups.append(range(first, len(sizes)))
    return groups
