"""Planning tasks that find pairs of images with near hashes within a corpus, if the request asks for it."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.plan.similarity.dedup import split_ranks
from vitline.data_prep.plan.similarity.near_duplicates import as_words, band_keys, distances, num_beyond, pairs_within
from vitline.data_prep.plan.sort_records import SortTask, survivors
from vitline.data_prep.records import PLAN, write_table
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import open_store

CAP = 1000
"""Largest number of hashes of the same band that a hash is compared with; thousands may share one, such as empty pages."""
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


def deal_bands(task: NearTask) -> None:
    """Partition the remaining images of one bucket, and their mirror images, by the bands of their hashes."""
    corpus = open_store(task.corpus)
    rows = survivors(corpus, task)
    names, tables = pa.array(ranked(rows), pa.binary()), [_BAND_SCHEMA.empty_table()]
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


def ranked(rows: pa.Table) -> list[bytes]:
    """The sha256 of every record, prefixed by a byte for its split, so that of two similar images the one that the source
    names as test or val sorts first and stays."""
    ranks = split_ranks(rows).tolist()
    return [bytes([rank]) + sha256 for rank, sha256 in zip(ranks, rows["sha256"].to_pylist(), strict=True)]


class NearPairs(FrozenConfig):
    """Key of the file that lists pairs with near hashes, and the number of pairs that share a band but were not compared."""

    key: str
    num_left: int


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
    write_table(corpus, key, once(pairs))
    return NearPairs(key=key, num_left=num_beyond(bands, CAP))


def once(pairs: pa.Table) -> pa.Table:
    """Every pair once, with its smallest distance."""
    nearest = pairs.group_by(PAIR_SCHEMA.names[:-1]).aggregate([("distance", "min")])
    return nearest.rename_columns(PAIR_SCHEMA.names)
