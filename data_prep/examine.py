"""The first pass: list a source into chunks, then read and decode every example of a chunk once."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from data_prep.config import CorpusConfig
from data_prep.corpora.open_source import open_source
from data_prep.corpora.raw import RawExample
from data_prep.decode import DecodePolicy, ImageRejected
from data_prep.images import examine_image
from data_prep.records import RECORD_SCHEMA, WORK, Chunks, SourcePlan, batched, plan_table, read_table, write_table
from data_prep.splits import order_key
from infra.config import FrozenConfig
from infra.storage import Store, open_store

_READ_THREADS = 8


class ChunkTask(FrozenConfig):
    """Everything that examining one chunk needs; the same task gives the same records wherever it runs."""

    corpus: str
    chunk: int
    examples_per_chunk: int
    order_seed: int
    policy: DecodePolicy


class ChunkDone(FrozenConfig):
    """What one examined chunk adds to the progress."""

    corpus: str
    num_examples: int
    num_refused: int
    num_bytes: int
    seconds: float


def list_source(config: CorpusConfig, root: Store, corpus: Store) -> SourcePlan:
    """The plan of a corpus: from its work folder, else made by listing the source and written there.

    Raises ValueError where two examples have one id, or there is none; FetchUnavailable from the source.
    """
    size = config.execution.examples_per_chunk
    chunks = Chunks(corpus, size)
    if plan := chunks.load_plan():
        return plan
    source = open_source(config)
    labels: set[str] = set()
    num_examples = num_chunks = 0
    examples = _checked(source.examples(root, corpus.child(f"{WORK}/spill")), source.single_label)
    for batch in batched(examples, size):
        labels.update(label for example in batch if not example.refused for label in example.labels)
        write_table(corpus, chunks.plan_key(num_chunks), plan_table(batch))
        num_examples, num_chunks = num_examples + len(batch), num_chunks + 1
    if not labels:
        raise ValueError(
            f"{config.name}: no labelled picture among the {num_examples:,} files of {source.origin}. Expected are "
            "pictures in one folder per class, as in cats/1.jpg and dogs/1.jpg."
        )
    plan = SourcePlan(
        num_examples=num_examples,
        num_chunks=num_chunks,
        classes=tuple(source.class_info(label) for label in sorted(labels)),
        single_label=source.single_label,
        views=dict(source.views),
        origin=source.origin,
        credit=source.credit,
    )
    chunks.save_plan(plan)
    return plan


def _checked(examples: Iterator[RawExample], single_label: bool) -> Iterator[RawExample]:
    """The examples as they come. Raises ValueError at the first that breaks a promise of sources."""
    seen: set[str] = set()
    weighted: set[bool] = set()
    for example in examples:
        example_id, num_labels = example.example_id, len(example.labels)
        if example_id in seen:
            raise ValueError(
                f"two examples have the id {example_id!r} (ids are paths in Unicode NFC). Rename one of the files."
            )
        seen.add(example_id)
        if not example.refused:
            weighted.add(example.weights is not None)
            right_number = num_labels == 1 if single_label else num_labels > 0
            if not right_number or len(weighted) > 1 or len(example.weights or example.labels) != num_labels:
                raise ValueError(
                    f"{example_id!r} has {num_labels} labels and weights {example.weights}; the source promises "
                    f"{'one label' if single_label else 'one or more labels'} for each example, and a weight for "
                    "every label of every example or for none. Correct the source reader."
                )
        yield example


def examine_chunk(task: ChunkTask) -> ChunkDone:
    """Read, decode and hash every example of a chunk, and write its record file. Raises OSError from the store."""
    start = time.monotonic()
    corpus = open_store(task.corpus)
    chunks = Chunks(corpus, task.examples_per_chunk)
    planned = read_table(corpus, chunks.plan_key(task.chunk)).to_pylist()
    rows = []
    for row, data in _read_ahead(planned, task.policy.max_bytes):
        row["order_key"] = order_key(task.order_seed, row["example_id"])
        rows.append({**row, **_found(row, data, task.policy)})
    write_table(corpus, chunks.records_key(task.chunk), pa.Table.from_pylist(rows, schema=RECORD_SCHEMA))
    return ChunkDone(
        corpus=task.corpus,
        num_examples=len(rows),
        num_refused=sum(row["reason"] is not None for row in rows),
        num_bytes=sum(row.get("num_bytes") or 0 for row in rows),
        seconds=time.monotonic() - start,
    )


def _read_ahead(rows: Sequence[dict[str, Any]], max_bytes: int) -> Iterator[tuple[dict[str, Any], Callable[[], bytes]]]:
    """Each row with what gives its bytes, or raises what reading raised. An object store answers a read in some 8 ms,
    a fifth of that when several are under way; as many as are under way are in memory."""
    stores = {base: open_store(base) for base in {row["base"] for row in rows}}
    with ThreadPoolExecutor(_READ_THREADS) as threads:
        waiting: deque[tuple[dict[str, Any], Future[bytes]]] = deque()
        for row in rows:
            if len(waiting) == _READ_THREADS:
                first, read = waiting.popleft()
                yield first, read.result
            waiting.append((row, threads.submit(_read, row, stores[row["base"]], max_bytes)))
        for row, read in waiting:
            yield row, read.result


def _read(row: dict[str, Any], store: Store, max_bytes: int) -> bytes:
    return b"" if row["reason"] is not None else read_example(row, store, max_bytes)


def _found(row: dict[str, Any], read: Callable[[], bytes], policy: DecodePolicy) -> dict[str, Any]:
    if row["reason"] is not None:
        return {}
    try:
        data = read()
    except (FileNotFoundError, PermissionError) as error:
        # Other failures of the store are not the example's fault: they end the job, which can be started again.
        return {"reason": "unreadable", "detail": f"{type(error).__name__}: {error.strerror or error}"}
    try:
        return {"num_bytes": len(data), **asdict(examine_image(data, policy))}
    except ImageRejected as rejected:
        return {"num_bytes": len(data), "reason": rejected.reason, "detail": rejected.detail}


def read_example(row: dict[str, Any], store: Store, max_bytes: int | None = None) -> bytes:
    """Bytes of an example by its locator. A file larger than `max_bytes` is cut one byte behind, to be refused."""
    end = None if row["length"] is None else row["offset"] + row["length"]
    if max_bytes is not None:
        limit = row["offset"] + max_bytes + 1
        end = limit if end is None else min(end, limit)
    return store.read(row["key"], row["offset"], end)
