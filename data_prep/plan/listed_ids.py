"""Checks for repeated ids in the listing alone, before an image is read; dry runs use it as well.

Table rows that are equal in every field are merged: the first one stays, the others are counted and skipped by the task that
examines their part. Different rows with one id are an error, and so is an id that the base corpus of a segment has already, unless
`recipe.known_ids` is `skip`: then it is skipped like a merged one. Every example takes 40 bytes, partitioned by the hash of its id,
so no process holds all of them.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.executors import Executor
from vitline.data_prep.partitions import hash_prefixes, in_groups
from vitline.data_prep.plan.buckets import Buckets
from vitline.data_prep.plan.check_refused import SHOWN, ids_there_error, repeated_ids_error
from vitline.data_prep.records import MERGED_SCHEMA, Chunks, read_request
from vitline.data_prep.shard_format import KnownShard, open_shard
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.raw import ExampleRow, ImageSource, SourcePart, WorkFolder
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store, open_store

_ROWS_PER_TASK, _SHARDS_PER_TASK = 1 << 18, 64
_BYTES_PER_ROW = 64  # estimate for parts of unknown length
_KNOWN = -1  # instead of a chunk number: an id of the base corpus
Shards: TypeAlias = tuple[KnownShard, ...]
_CONTENT = ("labels", "weights", "split", "group", "base", "key", "offset", "length", "order_key")
_KEYS_SCHEMA = pa.schema(
    [
        pa.field("id", pa.binary()),  # hash of the id; content: hash of all other listed fields
        pa.field("content", pa.binary()),
        pa.field("chunk", pa.int32()),
        pa.field("position", pa.int32()),
    ]
)


class IdTask(FrozenConfig):
    """Some chunks, or shards of the base corpus, whose ids are partitioned; and the bucket of the same number."""

    corpus: str
    root: str
    number: int
    num_tasks: int
    chunks: tuple[int, int] = (0, 0)
    known: Shards = ()
    skip_known: bool = False

    def buckets(self, corpus: Store) -> Buckets:
        return Buckets(corpus, "ids", self.num_tasks, self.num_tasks)


class Repeats(NamedTuple):
    """Repeated ids, with examples as (chunk, position)."""

    merged: pa.Table
    """Examples that equal an earlier one in every field."""
    num_clashing: int
    """Number of ids that different examples share."""
    first: list[tuple[int, int]]
    """All examples of the first such id."""
    num_there: int
    """Number of ids that the base corpus has already."""
    there: tuple[int, int] | None
    """The first example with such an id."""


def check_ids(
    config: CorpusConfig, corpus: Store, root: Store, known: Sequence[KnownShard], executor: Executor
) -> None:
    """Check for repeated ids and save the list of merged examples. Does nothing if the source cannot list ids without reading
    images, or if an earlier attempt or a concurrent preparation has done it. Raises ValueError if different examples have one id."""
    chunks, source = Chunks(corpus, config), open_source(config)
    if known and config.recipe.known_ids == "skip" and not source.lists_ids:
        raise ValueError(
            f"not supported: recipe.known_ids=skip for {source.origin}, whose ids are known only once its images are read. Give class "
            "folders without archives, a table, or Parquet with an id column."
        )
    if not source.lists_ids or chunks.num_merged() is not None:
        return
    sizes = [part.num_examples or part.num_bytes // _BYTES_PER_ROW for part in chunks.parts()]
    given: list[tuple[tuple[int, int], Shards]] = [
        ((group[0], group[-1] + 1), ()) for group in in_groups(sizes, _ROWS_PER_TASK)
    ]
    num_shards, skip = _SHARDS_PER_TASK, config.recipe.known_ids == "skip"
    given += [((0, 0), tuple(known[i : i + num_shards])) for i in range(0, len(known), num_shards)]
    tasks = [
        IdTask(
            corpus=corpus.uri,
            root=root.uri,
            number=i,
            num_tasks=len(given),
            chunks=group,
            known=shards,
            skip_known=skip,
        )
        for i, (group, shards) in enumerate(given)
    ]
    few = len(tasks) <= 2
    for _ in executor.run(partition_ids, tasks, few=few):
        pass
    found = [each for each in executor.run(find_repeats, tasks, few=few) if each]
    if len(found) < len(tasks):
        return
    check_repeats(source, found, chunks.part, chunks.work_folder(root))
    chunks.save_merged(pa.concat_tables([each.merged for each in found]), len(sizes))
    tasks[0].buckets(corpus).delete()


def check_repeats(
    source: ImageSource, found: Sequence[Repeats], part: Callable[[int], SourcePart], work: WorkFolder
) -> None:
    """Raises ValueError if different examples have one id, or if the base corpus has an id already; shows the first one."""
    if first := min((each.first for each in found if each.first), default=None):
        rows = [_row_at(source, part(chunk), work, position) for chunk, position in first[: SHOWN + 1]]
        raise repeated_ids_error(source, rows, len(first), sum(each.num_clashing for each in found))
    if there := min((each.there for each in found if each.there), default=None):
        row = _row_at(source, part(there[0]), work, there[1])
        raise ids_there_error(row["example_id"], sum(each.num_there for each in found))


def partition_ids(task: IdTask) -> None:
    """Partition the ids of some chunks into buckets."""
    corpus = open_store(task.corpus)
    config = read_request(corpus)
    chunks, source = Chunks(corpus, config), open_source(config)
    work, tables = chunks.work_folder(open_store(task.root)), [_KEYS_SCHEMA.empty_table()]
    for chunk in range(*task.chunks):
        tables.append(keys_of(source.listed(chunks.part(chunk), work), chunk))
    tables += known_keys(task.known)
    keys = pa.concat_tables(tables)
    task.buckets(corpus).write(task.number, keys, hash_prefixes(keys["id"]))


def known_keys(shards: Iterable[KnownShard]) -> Iterator[pa.Table]:
    """The hashes of the ids in shards of the base corpus. Raises ShardError for one that is not the listed shard."""
    for shard in shards:
        with open_shard(open_store(shard.home), shard.listed) as file:
            ids = file.read(["example_id"])["example_id"].to_pylist()
        yield _keys(ids, [b""] * len(ids), _KNOWN, np.arange(len(ids)))


def find_repeats(task: IdTask) -> Repeats | None:
    """Repeated ids of one bucket; None if another preparation of the same corpus has saved its result and deleted the files."""
    corpus = open_store(task.corpus)
    try:
        return repeats(task.buckets(corpus).read(task.number, _KEYS_SCHEMA), skip_known=task.skip_known)
    except FileNotFoundError:
        if Chunks(corpus, read_request(corpus)).num_merged() is None:
            raise
        return None


def keys_of(rows: pa.Table, chunk: int) -> pa.Table:
    """The hashes of all examples of a listed part that are not refused."""
    positions = np.flatnonzero(pc.is_null(rows["reason"]).to_numpy())
    rows = rows.take(pa.array(positions))
    contents = zip(*(rows[name].to_pylist() for name in _CONTENT), strict=True)
    return _keys(rows["example_id"].to_pylist(), (repr(content).encode() for content in contents), chunk, positions)


def _keys(ids: Sequence[str], contents: Iterable[bytes], chunk: int, positions: np.ndarray) -> pa.Table:
    columns = {
        "id": pa.array([_hash(each.encode()) for each in ids], pa.binary()),
        "content": pa.array([_hash(each) for each in contents], pa.binary()),
        "chunk": pa.repeat(chunk, len(ids)),
        "position": pa.array(positions),
    }
    return pa.table(columns).cast(_KEYS_SCHEMA)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def repeats(keys: pa.Table, *, skip_known: bool = False) -> Repeats:
    """Repeated ids among all examples of one bucket. With `skip_known`, examples of the base corpus are merged."""
    counts = pc.value_counts(keys["id"].combine_chunks())
    several = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    merged, clashing, there = list[tuple[int, int]](), list[list[tuple[int, int]]](), list[tuple[int, int]]()
    rows = keys.filter(pc.is_in(keys["id"], several))
    rows = rows.sort_by([(name, "ascending") for name in ("id", "chunk", "position")])
    sets: dict[bytes, list[tuple[bytes, tuple[int, int]]]] = {}
    for example_id, content, *work in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        sets.setdefault(example_id, []).append((content, (work[0], work[1])))
    for members in sets.values():
        new = [(content, work) for content, work in members if work[0] != _KNOWN]
        if len(new) < len(members) and new:
            if skip_known:
                merged += [work for _, work in new]
                continue
            there.append(new[0][1])
        if len({content for content, _ in new}) > 1:
            clashing.append([work for _, work in new])
        else:
            merged += [work for _, work in new[1:]]
    columns = [pa.array([work[i] for work in sorted(merged)], pa.int32()) for i in range(2)]
    return Repeats(
        merged=pa.table(columns, schema=MERGED_SCHEMA),
        num_clashing=len(clashing),
        first=min(clashing, default=[]),
        num_there=len(there),
        there=min(there, default=None),
    )


def _row_at(source: ImageSource, part: SourcePart, work: WorkFolder, position: int) -> ExampleRow:
    """A listed example, as a row of EXAMPLE_SCHEMA."""
    row: ExampleRow = source.listed(part, work).slice(position, 1).to_pylist()[0]
    return row
