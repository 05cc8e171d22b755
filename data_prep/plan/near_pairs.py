"""Confirms near duplicates within a corpus on thumbnails, and decides which image of each pair is dropped.

Dropping an image makes comparisons with it unnecessary, so pairs that share an image go to one task, together with others.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.executors import Executor, for_pictures
from vitline.data_prep.partitions import in_groups, read_partition, write_partitions
from vitline.data_prep.plan.locate_pictures import PictureReader, PictureRow, picture_row
from vitline.data_prep.plan.near_records import PAIR_SCHEMA, NearPairs, NearTask, once, ranked
from vitline.data_prep.plan.similarity.dedup import LOCATOR_SCHEMA, drops_table
from vitline.data_prep.plan.similarity.near_duplicates import resolve
from vitline.data_prep.plan.sort_records import Dropped, save_drops, survivors
from vitline.data_prep.progress import Show
from vitline.data_prep.records import PLAN, read_request, read_table, write_table
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store, open_store

NEAREST = 16
"""Largest number of images with near hashes that an image is compared with on thumbnails: those with the nearest hashes."""
PAIRS_PER_TASK = 512
_PAIRS_KEY, _ROWS_KEY = f"{PLAN}/near-pairs.bin", f"{PLAN}/near-rows.parquet"
_LOCATED_SCHEMA = pa.schema(
    [
        pa.field("sha256", pa.binary()),  # prefixed by the rank of its split, as in PAIR_SCHEMA
        pa.field("other_sha256", pa.binary()),
        *LOCATOR_SCHEMA,
        *(field.with_name(f"other_{field.name}") for field in LOCATOR_SCHEMA),
    ]
)


class Judged(FrozenConfig):
    """The dropped images, and the number of pairs with near hashes that were not compared on thumbnails."""

    drops: Dropped
    num_left: int


class _ListTask(NearTask):
    pairs: tuple[str, ...]
    """Keys of the files of pairs."""


class _Listed(FrozenConfig):
    sizes: tuple[int, ...]
    """Number of pairs of every task."""
    num_left: int


class _CompareTask(FrozenConfig):
    corpus: str
    number: int


class _Compared(FrozenConfig):
    num_pairs: int
    dropped: tuple[tuple[bytes, bytes], ...]
    """Dropped image and the image that it resembles, each as sha256 prefixed by the rank of its split."""


class _DropTask(FrozenConfig):
    corpus: str
    num_buckets: int
    dropped: tuple[tuple[bytes, bytes], ...]


def judge_near(task: NearTask, found: Sequence[NearPairs], run: Executor, executor: Executor, show: Show) -> Judged:
    """Confirm all pairs that were found on thumbnails, and list the dropped images. `run` executes work on records, `executor`
    work on images."""
    keys = tuple(sorted(near.key for near in found))
    (listed,) = run(_list_pairs, [_ListTask(**(task.model_dump() | {"pairs": keys}))])
    show.begin(task.corpus, sum(listed.sizes), "pairs compared")
    dropped = list[tuple[bytes, bytes]]()
    tasks = [_CompareTask(corpus=task.corpus, number=number) for number in range(len(listed.sizes))]
    for compared in for_pictures(executor, sum(listed.sizes))(_compare_pairs, tasks) if tasks else ():
        dropped += compared.dropped
        show.add(task.corpus, compared.num_pairs)
    drop = _DropTask(corpus=task.corpus, num_buckets=task.num_buckets, dropped=tuple(sorted(dropped)))
    (drops,) = run(_drop, [drop])
    return Judged(drops=drops, num_left=listed.num_left + sum(near.num_left for near in found))


def _list_pairs(task: _ListTask) -> _Listed:
    """Assign the pairs to tasks. Holds all pairs and the records of their images."""
    corpus = open_store(task.corpus)
    every = once(pa.concat_tables([read_table(corpus, key) for key in task.pairs]))
    pairs = _nearest(every)
    keys = pa.chunked_array([*pairs["order_key"].chunks, *pairs["other_order_key"].chunks], pa.uint64())
    rows = _records(corpus, task, pc.unique(keys))
    rows = rows.append_column("ranked", pa.array(ranked(rows), pa.binary()))
    write_table(corpus, _ROWS_KEY, rows)
    own, other = (pc.index_in(pairs[name], rows["ranked"].combine_chunks()) for name in ("sha256", "other_sha256"))
    columns = [pairs["sha256"], pairs["other_sha256"]]
    columns += [rows[name].take(side) for side in (own, other) for name in LOCATOR_SCHEMA.names]
    group = _joined(own.to_numpy(), other.to_numpy(), len(rows))
    _, index, sizes = np.unique(group, return_inverse=True, return_counts=True)
    together = in_groups(sizes.tolist(), PAIRS_PER_TASK)
    number = np.repeat(np.arange(len(together)), [len(groups) for groups in together])[index]
    write_partitions(corpus, _PAIRS_KEY, pa.table(columns, schema=_LOCATED_SCHEMA), number, len(together))
    return _Listed(sizes=tuple(np.bincount(number).tolist()), num_left=len(every) - len(pairs))


def _joined(a: np.ndarray, b: np.ndarray, num_pictures: int) -> np.ndarray:
    """Connected component of every pair (a, b) of positions: pairs that share an image, directly or through others, get the
    same number."""
    least = np.arange(num_pictures)
    while True:
        before, smaller = least, np.minimum(least[a], least[b])
        least = before.copy()
        for side in (a, b):
            np.minimum.at(
                least, before[side], smaller
            )  # lower the roots too: otherwise a chain takes one pass per image
        least = least[least]
        if (least == before).all():
            joined: np.ndarray = least[a]
            return joined


def _compare_pairs(task: _CompareTask) -> _Compared:
    """The dropped images among the pairs of one task, compared on thumbnails."""
    corpus = open_store(task.corpus)
    config = read_request(corpus)
    rows = read_partition(corpus, [_PAIRS_KEY], task.number, _LOCATED_SCHEMA).to_pylist()
    places = dict[bytes, PictureRow]()
    for row in rows:
        places[row["sha256"]] = picture_row(row)
        places[row["other_sha256"]] = picture_row(row, "other_")
    pairs = [(row["sha256"], row["other_sha256"]) for row in rows]
    with PictureReader(config.recipe.decode) as pictures:
        dropped = resolve(pairs, lambda a, b: pictures.same(places[a], places[b]))
    return _Compared(num_pairs=len(rows), dropped=tuple(dropped.items()))


def _drop(task: _DropTask) -> Dropped:
    """List the dropped images, each with the image that it resembles."""
    corpus = open_store(task.corpus)
    rows = read_table(corpus, _ROWS_KEY)
    positions = {key: i for i, key in enumerate(rows["ranked"].to_pylist())}
    dropped, kept = (rows.take(pa.array([positions[pair[i]] for pair in task.dropped], pa.int64())) for i in range(2))
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
        rows = survivors(corpus, task.model_copy(update={"number": bucket}))
        tables.append(rows.filter(pc.is_in(rows["order_key"], order_keys)))
    return pa.concat_tables(tables)
