"""The examine stage: lists a source into parts, then reads and decodes every example of a part once."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.decode import ImageRejected
from vitline.data_prep.examine.images import Examined
from vitline.data_prep.examine.local_range import LocalRange
from vitline.data_prep.examine.range_reads import ByteRange, Data, Read, read_ahead
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder
from vitline.data_prep.records import DENIED, RECORD_SCHEMA, REQUEST_KEY, Chunks, read_request
from vitline.data_prep.sources.open_source import open_source
from vitline.data_prep.sources.raw import ExampleRow, RawExample, row_of
from vitline.data_prep.sources.splits import hashed_split, order_key, unit_key
from vitline.infra.config import FrozenConfig
from vitline.infra.runs.watchdog import note_progress
from vitline.infra.storage import Store, StoreRefused, open_store

log = logging.getLogger(__name__)

_ROWS_PER_WRITE = 4096
_MAX_WHY = 300  # characters of a store's error message


class Record(ExampleRow, Examined, total=False):
    """A row of RECORD_SCHEMA. A refused example lacks the properties of its image."""

    num_bytes: int


class ChunkTask(FrozenConfig):
    """One part to examine; the same task gives the same records on every machine. It reads the request from the corpus."""

    corpus: str
    root: str
    chunk: int
    any_merged: bool = False
    """Whether examples of the corpus repeat others and are skipped; they may be in other chunks."""

    @property
    def title(self) -> str:
        """Names the task in messages and files."""
        return f"examine-{self.corpus.split('/')[-2]}-{self.chunk}"


class ChunkDone(FrozenConfig):
    """What an examined chunk adds to the progress."""

    corpus: str
    num_examples: int
    num_refused: int
    num_bytes: int
    lacking: tuple[str, ...] = ()
    """Protections that the decoding process could not set up on its machine, in words."""


def list_source(config: CorpusConfig, root: Store, corpus: Store) -> int:
    """List the parts of a source, unless an earlier attempt has done it, and return their number.

    Raises ValueError if the source is empty, and FetchUnavailable from the source.
    """
    corpus.write_json(REQUEST_KEY, config.model_dump(mode="json"))
    chunks = Chunks(corpus, config)
    if num_chunks := chunks.num_listed():
        return num_chunks
    source = open_source(config)
    num_chunks = chunks.save_listing(source.parts(chunks.work_folder(root)))
    if not num_chunks:
        raise ValueError(
            f"{config.name}: {source.origin} holds no examples. "
            "A source must hold labelled images; a table, rows below its header."
        )
    if structure := source.structure(chunks.work_folder(root)):
        log.info("%s is read as: %s", config.name, structure)
    return num_chunks


def examine_chunk(task: ChunkTask) -> ChunkDone:
    """Read, decode and hash every example of a part, and write its record file. Raises OSError from the store.

    A part that has records is not read again, because Ray repeats a finished task if its result was lost with a node.
    """
    corpus = open_store(task.corpus)
    config = read_request(corpus)
    chunks = Chunks(corpus, config)
    if (records := chunks.found_records(task.chunk, ["reason", "num_bytes"])) is not None:
        return ChunkDone(
            corpus=task.corpus,
            num_examples=len(records),
            num_refused=len(records) - records["reason"].null_count,
            num_bytes=pc.sum(records["num_bytes"]).as_py() or 0,
        )
    examples = open_source(config).examples(chunks.part(task.chunk), chunks.work_folder(open_store(task.root)))
    if task.any_merged and (merged := chunks.merged_positions(task.chunk)):
        examples = (example for position, example in enumerate(examples) if position not in merged)
    with chunks.records_writer(task.chunk) as writer:
        written = _Records(writer)
        lacking = examine_examples(examples, config, written.add)
        if written.num_denied:
            chunks.mark_denied(task.chunk)
        written.flush()
    return ChunkDone(
        corpus=task.corpus,
        num_examples=written.num_examples,
        num_refused=written.num_refused,
        num_bytes=written.num_bytes,
        lacking=lacking,
    )


class _Records:
    """Counts records and writes them in batches of some thousand."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer, self._rows = writer, list[Record]()
        self.num_examples = self.num_refused = self.num_bytes = self.num_denied = 0

    def add(self, row: Record) -> None:
        note_progress()
        self.num_examples += 1
        self.num_refused += row["reason"] is not None
        self.num_bytes += row.get("num_bytes") or 0
        self.num_denied += row["reason"] == "unreadable" and (row["detail"] or "").startswith(
            (DENIED, PermissionError.__name__)
        )
        self._rows.append(row)
        if len(self._rows) == _ROWS_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=RECORD_SCHEMA))
            self._rows = []


def examine_examples(
    examples: Iterator[RawExample], config: CorpusConfig, add: Callable[[Record], None]
) -> tuple[str, ...]:
    """Pass a record of every example to `add`. Records have no order: refused examples skip the decoding queue.

    Returns the protections that the decoding process lacks on this machine, in words.
    """
    recipe, execution = config.recipe, config.execution

    def readable() -> Iterator[tuple[Record, Data]]:
        max_bytes = recipe.decode.max_bytes
        for example, read in read_ahead((example, _range_of(example, max_bytes)) for example in examples):
            row = cast(Record, row_of(example))
            if row["order_key"] is None:
                row["order_key"] = order_key(recipe.order_seed, example.example_id)
            data = _bytes_or_refusal(row, read) if example.data is None else example.data
            if data is None:
                add(row)
            elif len(data) > max_bytes:  # reading stopped after the limit
                size, limit = _size_of(example), f"{max_bytes:,}"
                detail = f"{size:,} bytes, limit {limit}" if size else f"more than {limit} bytes"
                add({**row, "reason": "too_many_bytes", "detail": detail})
                if isinstance(data, LocalRange):
                    data.close()
            else:
                row["num_bytes"] = len(data)
                yield row, data

    with SandboxedDecoder(
        recipe.decode, timeout_s=execution.image_timeout_s, memory_bytes=execution.decode_memory_bytes
    ) as decoder:
        for row, outcome in decoder.run(readable()):
            add(_with_drawn_split(cast(Record, {**row, **_found(outcome)})))
    return decoder.lacking


def _bytes_or_refusal(row: Record, read: Read) -> Data | None:
    """The bytes of an example, or None after writing the reason of the refusal into its row."""
    if row["reason"] is not None:
        return None
    try:
        return read()
    except (FileNotFoundError, PermissionError) as error:
        # Other errors of the store are not specific to the example: they end the job, which can be restarted.
        row["reason"], row["detail"] = "unreadable", f"{type(error).__name__}: {error.strerror or error}"
        return None
    except StoreRefused as error:
        why = " ".join(error.why.split())[:_MAX_WHY]
        row["reason"], row["detail"] = "unreadable", f"{DENIED} to {row['base']}/{row['key']}: {why}"
        return None


def _size_of(example: RawExample) -> int | None:
    """Size of an example in its source; None for a member of an archive whose reader does not report it, and for an object that
    can no longer be read."""
    if example.length is not None:
        return example.length
    if example.data is not None:
        return example.num_bytes or None
    try:
        return open_store(example.base).size(example.key) - example.offset
    except (FileNotFoundError, PermissionError, StoreRefused):
        return None


def _with_drawn_split(row: Record) -> Record:
    """The record with the split of its unit, once its pixels are known."""
    val, test = row["val_fraction"], row["test_fraction"]
    if row["reason"] is None and val is not None and test is not None:
        row["split"] = hashed_split(unit_key(row["group"], row["pixel_sha256"]), val, test)
    return row


def _found(outcome: Examined | ImageRejected) -> Mapping[str, object]:
    if isinstance(outcome, ImageRejected):
        return {"reason": outcome.reason, "detail": outcome.detail}
    return outcome


def _range_of(example: RawExample, max_bytes: int) -> ByteRange | None:
    """What is to be read of an example: up to one byte after `max_bytes`, because larger images are refused. None: nothing."""
    if example.refused is not None or example.data is not None:
        return None
    length = max_bytes + 1 if example.length is None else min(example.length, max_bytes + 1)
    return ByteRange(example.base, example.key, example.offset, example.offset + length)
