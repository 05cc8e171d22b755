"""Pairs of training and evaluation images with near hashes, and the check whether they show the same picture.

A task compares some hundred pairs, in the order of the evaluation images in their shards: reading an image of a shard means
reading its row group, which all pairs of that group then share.
"""

import threading
from collections import Counter
from typing import NamedTuple

import pyarrow as pa

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.parquet_files import open_parquet
from vitline.data_prep.plan.locate_pictures import SHARD_TYPE, PictureReader, PictureRow, picture_row
from vitline.data_prep.plan.similarity.dedup import LOCATOR_SCHEMA
from vitline.data_prep.plan.similarity.near_duplicates import HashIndex, as_words
from vitline.data_prep.records import write_table
from vitline.infra.storage import Store

NEAREST = 16
"""Largest number of evaluation images that a training image is compared with: those with the nearest hashes."""
MAX_PAIRS = 1 << 16
"""Largest number of pairs compared per file of planned rows (about 100,000 rows): those with the nearest hashes."""
PAIRS_PER_TASK = 512
PAIRS_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64()),  # of the training rows
        pa.field("evaluation", pa.int64()),  # of the evaluation images
        *LOCATOR_SCHEMA,
        *(field.with_name(f"other_{field.name}") for field in LOCATOR_SCHEMA),
        pa.field("other_row", pa.int64()),
        pa.field("other_shard", SHARD_TYPE),
    ]
)
_ORDER = ("other_base", "other_key", "other_row", "other_offset", "row")


class Same(NamedTuple):
    """A pair that shows the same picture, by the positions of both, with the byte range of the evaluation image."""

    row: int
    evaluation: int
    offset: int | None
    length: int | None


def candidates(rows: pa.Table, index: pa.Table, max_pairs: int | None = None) -> tuple[pa.Table, int]:
    """The pairs to compare, as PAIRS_SCHEMA, and the number of pairs beyond `max_pairs`, which are left out."""
    found = nearest_hashes(rows, index)
    kept = sorted(found, key=lambda pair: (pair[2], pair[:2]))[:max_pairs]
    a, b = (pa.array([pair[i] for pair in kept], pa.int64()) for i in range(2))
    here, there = rows.take(a), index.take(b)
    columns = {"row": a, "evaluation": b, **{name: here[name] for name in LOCATOR_SCHEMA.names}}
    columns |= {f"other_{name}": there[name] for name in (*LOCATOR_SCHEMA.names, "row", "shard")}
    pairs = pa.table(columns).select(PAIRS_SCHEMA.names).cast(PAIRS_SCHEMA)
    return pairs.sort_by([(name, "ascending") for name in _ORDER]), len(found) - len(kept)


def same_pictures(pairs: pa.Table, pictures: PictureReader) -> list[Same]:
    """Those of the pairs (PAIRS_SCHEMA) that show the same picture."""
    found = list[Same]()
    for start in range(0, len(pairs), PAIRS_PER_TASK):
        rows = pairs.slice(start, PAIRS_PER_TASK).to_pylist()
        here = [picture_row(row) for row in rows]
        there: list[PictureRow] = [
            {**picture_row(row, "other_"), "row": row["other_row"], "shard": row["other_shard"]} for row in rows
        ]
        same = pictures.same_pairs(list(zip(here, there, strict=True)))
        for row, place, is_same in zip(rows, there, same, strict=True):
            if is_same:
                found.append(Same(row["row"], row["evaluation"], *pictures.range_of(place)))
    return found


class _OfThread(threading.local):
    corpus = ""
    reader: PictureReader


_OF_THREAD = _OfThread()


def reader_of_thread(corpus: Store, policy: DecodePolicy) -> PictureReader:
    """The reader of this thread for the tasks of a preparation: where images look alike, an image is in pairs of many tasks. The
    version in the URI of the corpus covers the state of its source, so no other image comes to a place that is known."""
    if _OF_THREAD.corpus != corpus.uri:
        _OF_THREAD.corpus, _OF_THREAD.reader = corpus.uri, PictureReader(policy)
    return _OF_THREAD.reader


def save_pairs(store: Store, key: str, pairs: pa.Table) -> None:
    """Save pairs so that each task can read its own."""
    write_table(store, key, pairs, PAIRS_PER_TASK)


def load_pairs(store: Store, key: str, number: int) -> pa.Table:
    """The pairs of task `number`."""
    with store.open(key) as file:
        return open_parquet(file).read_row_group(number, use_threads=False)


def nearest_hashes(rows: pa.Table, index: pa.Table) -> list[tuple[int, int, int]]:
    """(row, evaluation image, distance) of near hashes, at most the NEAREST nearest ones per row."""
    if not len(rows) or not len(index):
        return []
    table = HashIndex.of(index["phash"])
    nearest: dict[tuple[int, int], int] = {}
    for column in ("phash", "phash_mirror"):
        for i, j, distance in zip(*(a.tolist() for a in table.search(as_words(rows[column].to_pylist()))), strict=True):
            nearest[i, j] = min(distance, nearest.get((i, j), distance))
    kept, seen = [], Counter[int]()
    for (i, j), distance in sorted(nearest.items(), key=lambda found: (found[0][0], found[1], found[0][1])):
        seen[i] += 1
        if seen[i] <= NEAREST:
            kept.append((i, j, distance))
    return kept
