"""Near duplicates within a corpus, if the request asks for it: finds pairs of images with near hashes, confirms them on thumbnails,
and decides which image of each pair is dropped."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.executors import Executor
from vitline.data_prep.parquet_files import read_table, write_table
from vitline.data_prep.plan.confirm import PairFile, confirm, located_pairs, save_pairs
from vitline.data_prep.plan.similarity.dedup import drops_table, split_ranks
from vitline.data_prep.plan.similarity.near_duplicates import as_words, band_keys, distances, num_beyond, pairs_within
from vitline.data_prep.plan.sort_records import Dropped, SortTask, kept_records, save_drops
from vitline.data_prep.progress import StageProgress
from vitline.data_prep.records import PLAN
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store, open_store

CAP = 1000
"""Largest number of hashes of the same band that a hash is compared with; thousands may share one, such as empty pages."""
NEAREST = 16
"""Largest number of images with near hashes that an image is compared with on thumbnails: those with the nearest hashes."""
_PAIRS_KEY, _ROWS_KEY = f"{PLAN}/near-pairs.bin", f"{PLAN}/near-rows.parquet"
_BAND_SCHEMA = pa.schema(
    [
        pa.field("band", pa.uint64()),
        pa.field("sha256", pa.binary()),  # prefixed by the rank of its split: the smaller of a pair stays
        pa.field("order_key", pa.uint64()),
        pa.field("hash", pa.binary()),
        pa.field("mirrored", pa.bool_()),
    ]
)
PAIR_SCHEMA = pa.schema(
    [
        pa.field("sha256", pa.binary()),
        pa.field("order_key", pa.uint64()),
        pa.field("other_sha256", pa.binary()),
        pa.field("other_order_key", pa.uint64()),
        pa.field("distance", pa.int16()),
    ]
)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads bands of any width over all buckets


class NearTask(SortTask):
    """A step of the search for near duplicates, with the width of the bands."""

    band_bits: int = 16
    pairs: tuple[str, ...] = ()
    """For `list_pairs`: keys of the files of pairs."""


class NearPairs(FrozenConfig):
    """Key of the file that lists pairs with near hashes, and the number of pairs that share a band but were not compared."""

    key: str
    num_left: int


class NearDuplicates(NamedTuple):
    """The dropped images, and the number of pairs with near hashes that were not compared on thumbnails."""

    drops: Dropped
    num_left: int


class _DropTask(FrozenConfig):
    corpus: str
    num_buckets: int
    dropped: tuple[tuple[int, int], ...]
    """Dropped image and the image that it resembles, by their positions in the listed records."""


def drop_near_duplicates(tasks: Sequence[NearTask], executor: Executor, show: StageProgress) -> NearDuplicates:
    """Find the near duplicates of a corpus, one task a bucket, and list the dropped images."""
    run = partial(executor.run, few=len(tasks) == 1, heavy=True)
    for _ in run(partition_bands, tasks):
        pass
    found = sorted(run(find_near, tasks), key=lambda near: near.key)
    (listed,) = run(list_pairs, [tasks[0].model_copy(update={"pairs": tuple(near.key for near in found)})])
    (same,) = confirm([listed], executor, show, greedy=True).values()
    dropped = tuple(sorted((each.image, each.other) for each in same))
    (drops,) = run(_drop, [_DropTask(corpus=listed.corpus, num_buckets=tasks[0].num_buckets, dropped=dropped)])
    return NearDuplicates(drops, listed.num_left + sum(near.num_left for near in found))


def partition_bands(task: NearTask) -> None:
    """Partition the remaining images of one bucket, and their mirror images, by the bands of their hashes."""
    corpus = open_store(task.corpus)
    rows = kept_records(corpus, task)
    names, tables = pa.array(priority_keys(rows), pa.binary()), [_BAND_SCHEMA.empty_table()]
    for column, mirrored in (("phash", False), ("phash_mirror", True)):
        keys = band_keys(as_words(rows[column].to_pylist()), task.band_bits)
        owner = pa.array(np.repeat(np.arange(len(rows)), keys.shape[1]))
        columns = {
            "band": pa.array(keys.ravel()),
            "sha256": names.take(owner),
            "order_key": rows["order_key"].take(owner),
            "hash": rows[column].take(owner),
            "mirrored": pa.repeat(mirrored, len(owner)),
        }
        tables.append(pa.table(columns).cast(_BAND_SCHEMA))
    table = pa.concat_tables(tables)
    task.buckets(corpus, "by-band").write(task.number, table, table["band"].to_numpy() * _SPREAD)


def priority_keys(rows: pa.Table) -> list[bytes]:
    """The sha256 of every record, prefixed by a byte for its split, so that of two similar images the one that the source
    names as test or val sorts first and stays."""
    ranks = split_ranks(rows).tolist()
    return [bytes([rank]) + sha256 for rank, sha256 in zip(ranks, rows["sha256"].to_pylist(), strict=True)]


def find_near(task: NearTask) -> NearPairs:
    """Pairs of one bucket of bands with near hashes."""
    corpus = open_store(task.corpus)
    rows = task.buckets(corpus, "by-band").read(task.number, _BAND_SCHEMA)
    rows = rows.sort_by([("band", "ascending"), ("sha256", "ascending"), ("mirrored", "ascending")])
    mirrored, words = rows["mirrored"].to_numpy(), as_words(rows["hash"].to_pylist())
    found = [PAIR_SCHEMA.empty_table()]
    bands = rows["band"].to_numpy()
    for a, b in pairs_within(bands, words, CAP):
        useful = ~(mirrored[a] & mirrored[b])  # two mirror images are near if the images are
        a, b = a[useful], b[useful]
        first, second = rows.take(pa.array(a)), rows.take(pa.array(b))
        columns = [first["sha256"], first["order_key"], second["sha256"], second["order_key"]]
        found.append(pa.table([*columns, pa.array(distances(words[a], words[b]), pa.int16())], schema=PAIR_SCHEMA))
    pairs = pa.concat_tables(found)
    pairs = pairs.filter(pc.not_equal(pairs["sha256"], pairs["other_sha256"]))
    key = f"{PLAN}/near/{task.number:05d}.parquet"
    write_table(corpus, key, unique_pairs(pairs))
    return NearPairs(key=key, num_left=num_beyond(bands, CAP))


def unique_pairs(pairs: pa.Table) -> pa.Table:
    """Every pair once, with its smallest distance."""
    nearest = pairs.group_by(PAIR_SCHEMA.names[:-1]).aggregate([("distance", "min")])
    return nearest.rename_columns(PAIR_SCHEMA.names)


def list_pairs(task: NearTask) -> PairFile:
    """Assign the pairs to tasks. Holds all pairs and the records of their images."""
    corpus = open_store(task.corpus)
    every = unique_pairs(pa.concat_tables([read_table(corpus, key) for key in task.pairs]))
    pairs = _nearest(every)
    keys = pa.chunked_array([*pairs["order_key"].chunks, *pairs["other_order_key"].chunks], pa.uint64())
    rows = _records(corpus, task, pc.unique(keys))
    # In the order in which images stay, which `confirm` expects.
    rows = rows.append_column("ranked", pa.array(priority_keys(rows), pa.binary())).sort_by("ranked")
    write_table(corpus, _ROWS_KEY, rows)
    last_first = rows["ranked"].combine_chunks()[::-1]  # of images with equal files the last one counts
    image, other = (
        len(rows) - 1 - pc.index_in(pairs[name], last_first).to_numpy() for name in ("sha256", "other_sha256")
    )
    located = located_pairs(rows, image, rows, other)
    return save_pairs(corpus, _PAIRS_KEY, located, len(every) - len(pairs), greedy=True)


def _drop(task: _DropTask) -> Dropped:
    """List the dropped images, each with the image that it resembles."""
    corpus = open_store(task.corpus)
    rows = read_table(corpus, _ROWS_KEY)
    dropped, kept = (rows.take(pa.array([pair[i] for pair in task.dropped], pa.int64())) for i in range(2))
    differ = [a != b for a, b in zip(dropped["labels"].to_pylist(), kept["labels"].to_pylist(), strict=True)]
    details = [
        f"looks like {original['example_id']}" + (f", labelled {original['labels']}" if labels_differ else "")
        for original, labels_differ in zip(kept.to_pylist(), differ, strict=True)
    ]
    drops = drops_table(
        dropped, kept, reason="near_duplicate", kinds=["near"] * len(dropped), details=details, labels_differ=differ
    )
    return save_drops(corpus, "near.bin", drops, task.num_buckets)


def _nearest(pairs: pa.Table) -> pa.Table:
    """Keep the pairs with the nearest hashes for every image that is the larger sha256 of a pair."""
    swapped = pc.greater(pairs["other_sha256"], pairs["sha256"])
    larger = pc.if_else(swapped, pairs["other_sha256"], pairs["sha256"])
    smaller = pc.if_else(swapped, pairs["sha256"], pairs["other_sha256"])
    ordered = pairs.append_column("larger", larger).append_column("smaller", smaller)
    ordered = ordered.sort_by([("larger", "ascending"), ("distance", "ascending"), ("smaller", "ascending")])
    codes = ordered["larger"].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    rank = np.arange(len(codes)) - np.searchsorted(codes, codes)
    return ordered.filter(pa.array(rank < NEAREST)).select(PAIR_SCHEMA.names)


def _records(corpus: Store, task: NearTask, order_keys: pa.Array) -> pa.Table:
    """The records with these order keys, bucket by bucket."""
    tables = []
    for bucket in range(task.num_buckets):
        rows = kept_records(corpus, task.model_copy(update={"number": bucket}))
        tables.append(rows.filter(pc.is_in(rows["order_key"], order_keys)))
    return pa.concat_tables(tables)
