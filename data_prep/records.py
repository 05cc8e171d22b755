"""One small record per example: where its bytes are, where it belongs, what was found. Images are never in here.

A chunk of examples is one file of the plan (written when the source is listed) and one file of records (written when
the chunk has been examined). The record file is the unit of restart, and what later questions are asked of.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.corpora.raw import RawExample
from data_prep.decode import DecodeReason
from data_prep.labels import ClassInfo
from infra.config import FrozenConfig
from infra.storage import Store

RejectReason = (
    DecodeReason
    | Literal["unreadable", "damaged_archive", "unsafe_path", "ignored_file", "no_label", "decoder_crash"]
    | Literal["duplicate", "near_duplicate", "leakage", "small_class", "unknown_class"]
)
"""Every reason in rejects.parquet: of a file, and of an example whose picture is good."""

NOT_COUNTED = frozenset({"ignored_file", "duplicate", "near_duplicate", "leakage", "small_class", "unknown_class"})
"""Reasons that say nothing about the health of a source, and do not count against `max_refused_fraction`."""

WORK = "_work"
"""Folder of a corpus for what preparation keeps: records, progress, shard plans, spill."""

PLAN_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.string()), nullable=False),
        pa.field("weights", pa.list_(pa.float32())),
        pa.field("split", pa.string(), nullable=False),
        pa.field("group", pa.string()),
        pa.field("base", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
    ]
)
RECORD_SCHEMA = pa.schema(
    [
        *PLAN_SCHEMA,
        pa.field("order_key", pa.uint64(), nullable=False),
        pa.field("num_bytes", pa.int64()),
        pa.field("sha256", pa.binary()),
        pa.field("pixel_sha256", pa.binary()),
        pa.field("phash", pa.binary()),
        pa.field("phash_mirror", pa.binary()),
        pa.field("width_px", pa.int32()),
        pa.field("height_px", pa.int32()),
        pa.field("format", pa.string()),
        pa.field("mode", pa.string()),
    ]
)


class SourcePlan(FrozenConfig):
    """What listing a source gave; written after its chunks, so that a restart lists nothing again."""

    num_examples: int
    num_chunks: int
    classes: tuple[ClassInfo, ...]
    single_label: bool
    views: dict[str, tuple[str, ...]]
    origin: str
    credit: str


class Chunks:
    """The chunk files of one corpus. Chunks of another size lie elsewhere, so a changed size mixes nothing."""

    def __init__(self, corpus: Store, examples_per_chunk: int) -> None:
        self._corpus = corpus
        self._prefix = f"{WORK}/chunks-of-{examples_per_chunk}"

    def plan_key(self, chunk: int) -> str:
        return f"{self._prefix}/plan-{chunk:06d}.parquet"

    def records_key(self, chunk: int) -> str:
        return f"{self._prefix}/records-{chunk:06d}.parquet"

    def load_plan(self) -> SourcePlan | None:
        """What was listed before, if that was finished."""
        try:
            return SourcePlan.model_validate(self._corpus.read_json(f"{self._prefix}/plan.json"))
        except FileNotFoundError:
            return None

    def save_plan(self, plan: SourcePlan) -> None:
        self._corpus.write_json(f"{self._prefix}/plan.json", plan.model_dump(mode="json"))

    def unfinished(self, plan: SourcePlan) -> list[int]:
        """Numbers of the chunks that have no record file."""
        finished = set(self._corpus.list(f"{self._prefix}/records-"))
        return [chunk for chunk in range(plan.num_chunks) if self.records_key(chunk) not in finished]

    def load_records(self, plan: SourcePlan) -> pa.Table:
        """All records of the corpus, columns of RECORD_SCHEMA."""
        keys = (self.records_key(chunk) for chunk in range(plan.num_chunks))
        return pa.concat_tables([read_table(self._corpus, key) for key in keys])


def plan_table(examples: Sequence[RawExample]) -> pa.Table:
    """Examples as rows of PLAN_SCHEMA."""
    rows = []
    for example in examples:
        row: dict[str, Any] = asdict(example)
        row["reason"], row["detail"] = row.pop("refused") or (None, None)
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=PLAN_SCHEMA)


def batched(examples: Iterator[RawExample], size: int) -> Iterator[list[RawExample]]:
    """Lists of `size` examples, the last one shorter."""
    batch: list[RawExample] = []
    for example in examples:
        batch.append(example)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def read_table(store: Store, key: str) -> pa.Table:
    """A small Parquet file of ours, whole."""
    return pq.read_table(pa.BufferReader(store.read(key)))


def write_table(store: Store, key: str, table: pa.Table) -> None:
    """A small Parquet file of ours, whole or not at all."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    store.write(key, sink.getvalue().to_pybytes())
