"""Confirms on thumbnails which pairs of images with near hashes look the same.

A task compares some hundred pairs. Reading an image of a shard means reading its row group, so pairs with images of shards come in
the order of these shards, and all pairs of a row group share its reading.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from vitline.data_prep.executors import FEW_PAIRS, Executor
from vitline.data_prep.partitions import in_groups, read_partition, write_partitions
from vitline.data_prep.plan.locate_images import PLACE_SCHEMA, ImageReader, Place
from vitline.data_prep.plan.similarity.near_duplicates import resolve
from vitline.data_prep.progress import StageProgress
from vitline.data_prep.records import read_request
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store, open_store

PAIRS_PER_TASK = 512
PAIRS_SCHEMA = pa.schema(
    [
        pa.field("image", pa.int64()),  # positions in the tables of images
        pa.field("other", pa.int64()),
        *PLACE_SCHEMA,
        *(field.with_name(f"other_{field.name}") for field in PLACE_SCHEMA),
    ]
)


class Same(NamedTuple):
    """A pair that looks the same, by the positions of both. The byte range of the other image is within its file, also if
    that is a shard."""

    image: int
    other: int
    offset: int | None
    length: int | None


class PairFile(FrozenConfig):
    """A file of pairs, and the number of pairs of each task."""

    corpus: str
    key: str
    sizes: tuple[int, ...]
    num_left: int
    """Pairs with near hashes that exceeded a limit and are not compared."""


class PairTask(FrozenConfig):
    """Some hundred pairs to compare."""

    corpus: str
    key: str
    number: int
    greedy: bool


class PairsCompared(FrozenConfig):
    """Result of one PairTask."""

    corpus: str
    key: str
    num_pairs: int
    same: tuple[Same, ...]


def located_pairs(rows: pa.Table, image: np.ndarray, others: pa.Table, other: np.ndarray) -> pa.Table:
    """Pairs of positions in two tables of images, as PAIRS_SCHEMA."""
    columns = {"image": pa.array(image, pa.int64()), "other": pa.array(other, pa.int64())}
    for prefix, table, position in (("", rows, columns["image"]), ("other_", others, columns["other"])):
        for field in PLACE_SCHEMA:
            known = field.name in table.column_names
            column = table[field.name].take(position) if known else pa.nulls(len(position), field.type)
            columns[f"{prefix}{field.name}"] = column
    return pa.table(columns).cast(PAIRS_SCHEMA)


def save_pairs(corpus: Store, key: str, pairs: pa.Table, num_left: int, *, greedy: bool = False) -> PairFile:
    """Save pairs (PAIRS_SCHEMA) so that each task can read its own. `greedy`: as for `confirm`; pairs that share an image, directly
    or through others, go to one task, together with others."""
    number = np.arange(len(pairs)) // PAIRS_PER_TASK
    if greedy:
        groups = joined_groups(pairs["image"].to_numpy(), pairs["other"].to_numpy())
        _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        together = in_groups(sizes.tolist(), PAIRS_PER_TASK)
        number = np.repeat(np.arange(len(together)), [len(each) for each in together])[index]
    per_task = np.bincount(number).tolist()
    write_partitions(corpus, key, pairs, number, len(per_task))
    return PairFile(corpus=corpus.uri, key=key, sizes=tuple(per_task), num_left=num_left)


def confirm(
    files: Sequence[PairFile], executor: Executor, show: StageProgress, *, greedy: bool = False
) -> dict[tuple[str, str], list[Same]]:
    """For every file, by corpus and key, the pairs that look the same.

    `greedy`: only the pairs (dropped image, image that stays) of `resolve`, which compares no more than the result depends on. The
    smaller position stays.
    """
    num_pairs = Counter[str]()
    for file in files:
        num_pairs[file.corpus] += sum(file.sizes)
    for corpus, number in num_pairs.items():
        show.begin(corpus, number, "pairs compared")
    tasks = [
        PairTask(corpus=file.corpus, key=file.key, number=number, greedy=greedy)
        for file in files
        for number in range(len(file.sizes))
    ]
    same: dict[tuple[str, str], list[Same]] = {(file.corpus, file.key): [] for file in files}
    for done in executor.run(compare_pairs, tasks, few=num_pairs.total() <= FEW_PAIRS):
        same[done.corpus, done.key] += done.same
        show.add(done.corpus, done.num_pairs)
    return same


def compare_pairs(task: PairTask) -> PairsCompared:
    """Compare the thumbnails of some hundred pairs."""
    corpus = open_store(task.corpus)
    pairs = read_partition(corpus, [task.key], task.number, PAIRS_SCHEMA)
    compare: Callable[[pa.Table, ImageReader], list[Same]] = _dropped if task.greedy else same_images
    same = tuple(compare(pairs, _reader_of_thread(corpus)))
    return PairsCompared(corpus=task.corpus, key=task.key, num_pairs=len(pairs), same=same)


def same_images(pairs: pa.Table, images: ImageReader) -> list[Same]:
    """Those of the pairs (PAIRS_SCHEMA) that look the same."""
    found = list[Same]()
    for start in range(0, len(pairs), PAIRS_PER_TASK):
        rows = pairs.slice(start, PAIRS_PER_TASK).to_pylist()
        places = [(Place.of(row), Place.of(row, "other_")) for row in rows]
        for row, (_, other), is_same in zip(rows, places, images.same_pairs(places), strict=True):
            if is_same:
                found.append(Same(row["image"], row["other"], *images.range_of(other)))
    return found


def _dropped(pairs: pa.Table, images: ImageReader) -> list[Same]:
    """Every dropped image with the one that stays."""
    rows, places = pairs.to_pylist(), dict[int, Place]()
    for row in rows:
        places[row["image"]], places[row["other"]] = Place.of(row), Place.of(row, "other_")
    dropped = resolve(((row["image"], row["other"]) for row in rows), lambda a, b: images.same(places[a], places[b]))
    return [Same(image, kept, *images.range_of(places[kept])) for image, kept in dropped.items()]


class _OfThread(threading.local):
    corpus = ""
    reader: ImageReader


_OF_THREAD = _OfThread()


def _reader_of_thread(corpus: Store) -> ImageReader:
    """The reader of this thread for the tasks of a preparation: where images look alike, an image is in pairs of many tasks. The
    version in the URI of the corpus covers the state of its source, so no other image comes to a place that is known."""
    if _OF_THREAD.corpus != corpus.uri:
        _OF_THREAD.corpus, _OF_THREAD.reader = corpus.uri, ImageReader(read_request(corpus).recipe.decode)
    return _OF_THREAD.reader


def joined_groups(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Connected component of every pair (a, b) of positions: pairs that share an image, directly or through others, get the
    same number."""
    least = np.arange(max(a.max(initial=-1), b.max(initial=-1)) + 1)
    while True:
        before, smaller = least, np.minimum(least[a], least[b])
        least = before.copy()
        for side in (a, b):
            # Lower the roots too: otherwise a chain takes one pass per image.
            np.minimum.at(least, before[side], smaller)
        least = least[least]
        if (least == before).all():
            joined: np.ndarray = least[a]
            return joined
