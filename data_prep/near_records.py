"""Near duplicates within a corpus: the tasks of planning that find, confirm and judge them, when a request asks for it."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.config import CorpusConfig
from data_prep.dedup import drops_table, split_ranks
from data_prep.locate_pictures import PictureReader
from data_prep.near_duplicates import as_words, band_keys, distances, num_beyond, pairs_within, resolve
from data_prep.partitions import bucket_of, read_partition, write_partitions
from data_prep.records import PLAN, REQUEST_KEY, read_table, write_table
from data_prep.sort_records import Dropped, SortTask, save_drops, survivors
from infra.config import FrozenConfig
from infra.storage import Store, open_store

CAP = 1000
"""Hashes with one band that each hash is compared with; of thousands that share one, as of empty pages, no more are."""
NEAREST = 16
"""Pictures with near hashes that each picture is compared with on thumbnails: those with the nearest hashes."""
_BAND_SCHEMA = pa.schema(
    [
        pa.field("band", pa.uint64()),
        pa.field("sha256", pa.binary()),  # behind the rank of its split: the smaller one of a pair stays
        pa.field("order_key", pa.uint64()),
        pa.field("hash", pa.binary()),
        pa.field("mirrored", pa.bool_()),
    ]
)
_PAIR_SCHEMA = pa.schema(
    [
        pa.field("sha256", pa.binary()),
        pa.field("order_key", pa.uint64()),
        pa.field("other_sha256", pa.binary()),
        pa.field("other_order_key", pa.uint64()),
        pa.field("distance", pa.int16()),
    ]
)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: bands of all sizes fill all buckets


class NearTask(SortTask):
    """A step of finding near duplicates, with the width of the bands."""

    band_bits: int = 16
    pairs: tuple[str, ...] = ()
    """Of judging: the files of pairs."""


def deal_bands(task: NearTask) -> None:
    """Deal the pictures that stay in one bucket, and their mirror images, out by the bands of their hashes."""
    corpus = open_store(task.corpus)
    rows = survivors(corpus, task)
    ranked, tables = pa.array(_ranked(rows), pa.binary()), [_BAND_SCHEMA.empty_table()]
    for column, mirrored in (("phash", False), ("phash_mirror", True)):
        keys = band_keys(as_words(rows[column].to_pylist()), task.band_bits)
        owner = pa.array(np.repeat(np.arange(len(rows)), keys.shape[1]))
        columns = {
            "band": pa.array(keys.ravel()),
            "sha256": ranked.take(owner),
            "order_key": rows["order_key"].take(owner),
            "hash": rows[column].take(owner),
            "mirrored": pa.repeat(mirrored, len(owner)),
        }
        tables.append(pa.table(columns).cast(_BAND_SCHEMA))
    table = pa.concat_tables(tables)
    buckets = bucket_of(table["band"].to_numpy() * _SPREAD, task.num_buckets)
    write_partitions(corpus, f"{PLAN}/by-band/{task.own}", table, buckets, task.num_buckets)


def _ranked(rows: pa.Table) -> list[bytes]:
    """The sha256 of every record behind a byte for its split, so that of two that look alike the one that is named test
    or val sorts first, and stays."""
    ranks = split_ranks(rows).tolist()
    return [bytes([rank]) + sha256 for rank, sha256 in zip(ranks, rows["sha256"].to_pylist(), strict=True)]


class NearPairs(FrozenConfig):
    """Pairs with near hashes: the file that lists them, and how many pairs of one band were not looked at."""

    key: str
    num_left: int


class Judged(FrozenConfig):
    """What goes, and how many pairs with near hashes were not compared on thumbnails."""

    drops: Dropped
    num_left: int


def find_near(task: NearTask) -> NearPairs:
    """Pairs of one bucket of bands whose hashes are near."""
    corpus = open_store(task.corpus)
    rows = read_partition(corpus, task.files("by-band"), task.number, _BAND_SCHEMA)
    rows = rows.sort_by([("band", "ascending"), ("sha256", "ascending"), ("mirrored", "ascending")])
    mirrored, words = rows["mirrored"].to_numpy(), as_words(rows["hash"].to_pylist())
    found = [_PAIR_SCHEMA.empty_table()]
    bands = rows["band"].to_numpy()
    for a, b in pairs_within(bands, words, CAP):
        useful = ~(mirrored[a] & mirrored[b])  # two mirror images are near where the pictures are
        a, b = a[useful], b[useful]
        first, second = rows.take(pa.array(a)), rows.take(pa.array(b))
        columns = [first["sha256"], first["order_key"], second["sha256"], second["order_key"]]
        found.append(pa.table([*columns, pa.array(distances(words[a], words[b]), pa.int16())], schema=_PAIR_SCHEMA))
    pairs = pa.concat_tables(found)
    pairs = pairs.filter(pc.not_equal(pairs["sha256"], pairs["other_sha256"]))
    key = f"{PLAN}/near/{task.number:05d}.parquet"
    write_table(corpus, key, _once(pairs))
    return NearPairs(key=key, num_left=num_beyond(bands, CAP))


def _once(pairs: pa.Table) -> pa.Table:
    """Every pair at its smallest distance."""
    nearest = pairs.group_by(_PAIR_SCHEMA.names[:-1]).aggregate([("distance", "min")])
    return nearest.rename_columns(_PAIR_SCHEMA.names)


def judge_near(task: NearTask) -> Judged:
    """What goes of all pairs, confirmed on thumbnails. Holds the pairs, and the records of the pictures in them."""
    corpus = open_store(task.corpus)
    config = CorpusConfig.model_validate(corpus.read_json(REQUEST_KEY))
    every = _once(pa.concat_tables([read_table(corpus, key) for key in task.pairs]))
    pairs = _nearest(every)
    keys = pa.chunked_array([*pairs["order_key"].chunks, *pairs["other_order_key"].chunks], pa.uint64())
    rows = _records(corpus, task, pc.unique(keys))
    positions = {key: i for i, key in enumerate(_ranked(rows))}
    by_sha = dict(zip(positions, rows.to_pylist(), strict=True))
    found = zip(pairs["sha256"].to_pylist(), pairs["other_sha256"].to_pylist(), strict=True)
    with PictureReader(config.recipe.decode) as pictures:
        goes = resolve(found, lambda a, b: pictures.same(by_sha[a], by_sha[b]))
    left, stays = (rows.take(pa.array([positions[sha] for sha in side], pa.int64())) for side in (goes, goes.values()))
    details = [
        f"looks like {kept['example_id']}"
        + ("" if gone["labels"] == kept["labels"] else f", labelled {kept['labels']}")
        for gone, kept in zip(left.to_pylist(), stays.to_pylist(), strict=True)
    ]
    differ = [a != b for a, b in zip(left["labels"].to_pylist(), stays["labels"].to_pylist(), strict=True)]
    drops = drops_table(
        left, stays, reason="near_duplicate", kinds=["near"] * len(left), details=details, labels_differ=differ
    )
    saved = save_drops(corpus, "near.bin", drops, task.num_buckets)
    return Judged(drops=saved, num_left=len(every) - len(pairs))


def _nearest(pairs: pa.Table) -> pa.Table:
    """Of every picture, the larger sha256 of a pair, the pairs with the nearest hashes."""
    swapped = pc.greater(pairs["other_sha256"], pairs["sha256"])
    larger = pc.if_else(swapped, pairs["other_sha256"], pairs["sha256"])
    smaller = pc.if_else(swapped, pairs["sha256"], pairs["other_sha256"])
    ordered = pairs.append_column("larger", larger).append_column("smaller", smaller)
    ordered = ordered.sort_by([("larger", "ascending"), ("distance", "ascending"), ("smaller", "ascending")])
    codes = ordered["larger"].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    rank = np.arange(len(codes)) - np.searchsorted(codes, codes)
    return ordered.filter(pa.array(rank < NEAREST)).select(_PAIR_SCHEMA.names)


def _records(corpus: Store, task: NearTask, order_keys: pa.Array) -> pa.Table:
    """The records with these order keys, one for each sha256, bucket by bucket."""
    tables = []
    for bucket in range(task.num_buckets):
        rows = survivors(corpus, task.model_copy(update={"number": bucket}))
        tables.append(rows.filter(pc.is_in(rows["order_key"], order_keys)))
    return pa.concat_tables(tables)
