"""Records: one small row per example with its location, labels, hashes and verdict. They never hold image bytes.

A source is listed as parts. Each part is one chunk, examined by one task, which writes one file of records. That file is
the unit of restart; all later stages work on records.
"""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from vitline.data_prep.config import CorpusConfig
from vitline.data_prep.decode import DecodeReason
from vitline.data_prep.parquet_files import read_table, table_writer, write_table
from vitline.data_prep.partitions import read_partition, write_partitions
from vitline.data_prep.sources.raw import EXAMPLE_SCHEMA, SourcePart, WorkFolder
from vitline.infra.runs.watchdog import note_progress
from vitline.infra.storage import Store

log = logging.getLogger(__name__)

RejectReason = (
    DecodeReason
    | Literal[
        "unreadable", "damaged_archive", "uncounted_loss", "unsafe_path", "repeated_name", "ignored_file", "no_label"
    ]
    | Literal["duplicate", "near_duplicate", "leakage", "small_class", "unknown_class"]
    | Literal["low_score", "class_full"]
)
"""All reasons in rejects.parquet, for files that cannot be used and for valid images that are left out."""

UNCOUNTED = "uncounted_loss"
"""Reason for the unreadable rest of an archive, a file or a folder rather than for one image: the number of missing images
and classes is unknown."""

NOT_COUNTED = frozenset(
    {"ignored_file", "duplicate", "near_duplicate", "leakage"}
    | {"small_class", "unknown_class", "low_score", "class_full"}
)
"""Reasons that do not indicate a defect of the source and do not count against `max_refused_fraction`."""

WORK = "_work"
"""Folder of a corpus with intermediate data: records, progress, shard plans, spill."""
PLAN = f"{WORK}/plan"
"""Folder with the results of planning."""
REQUEST_KEY = f"{WORK}/request.json"
"""The request, read by tasks."""
DENIED = "no access"
"""Prefix of the detail of an `unreadable` example to which the store denied access (credentials, permission or bucket)."""

RECORD_SCHEMA = pa.schema(
    [
        *EXAMPLE_SCHEMA,
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
MERGED_SCHEMA = pa.schema([pa.field("chunk", pa.int32()), pa.field("position", pa.int32())])
"""Examples that equal an earlier one in every field, as chunk and position in it."""
_PARTS_SCHEMA = pa.schema([pa.field("part", pa.string(), nullable=False)])
_PARTS_PER_FILE = 4096


def read_request(corpus: Store) -> CorpusConfig:
    """The request of a corpus in preparation, as its tasks read it."""
    return CorpusConfig.model_validate(corpus.read_json(REQUEST_KEY))


class Chunks:
    """The chunk files of one corpus. Each chunk size has a prefix of its own, so a changed size cannot mix chunks."""

    def __init__(self, corpus: Store, config: CorpusConfig) -> None:
        self._corpus = corpus
        self._prefix = f"{WORK}/chunks-of-{config.execution.examples_per_chunk}"
        self._size = config.execution.examples_per_chunk
        self._spill = f"{self._prefix}/source/spill/"

    def work_folder(self, root: Store) -> WorkFolder:
        """The work folder of the source."""
        return WorkFolder(root, self._corpus.child(f"{self._prefix}/source"), self._size)

    def records_key(self, chunk: int) -> str:
        return f"{self._prefix}/records-{chunk:07d}.parquet"

    def num_listed(self) -> int:
        """Number of chunks that an earlier attempt listed; 0 if it did not complete the list, which is then made anew."""
        found = self._corpus.read_json_or_none(f"{self._prefix}/listing.json")
        return int(found["num_chunks"]) if found else 0

    def save_listing(self, parts: Iterable[SourcePart]) -> int:
        """Save the parts of a source and return their number. Holds a few thousand of them at a time."""
        num_chunks, batch = 0, []
        for part in parts:
            note_progress()
            batch.append(part.model_dump_json())
            num_chunks += 1
            if len(batch) == _PARTS_PER_FILE:
                self._save_parts(num_chunks - len(batch), batch)
                batch = []
        self._save_parts(num_chunks - len(batch), batch)
        self._corpus.write_json(f"{self._prefix}/listing.json", {"num_chunks": num_chunks})
        return num_chunks

    def _save_parts(self, first: int, batch: list[str]) -> None:
        if batch:
            write_table(self._corpus, self._parts_key(first), pa.table({"part": batch}, schema=_PARTS_SCHEMA))

    def _parts_key(self, chunk: int) -> str:
        return f"{self._prefix}/parts-{chunk // _PARTS_PER_FILE:04d}.parquet"

    def part(self, chunk: int) -> SourcePart:
        """The part that belongs to a chunk."""
        parts = read_table(self._corpus, self._parts_key(chunk))["part"]
        return SourcePart.model_validate_json(parts[chunk % _PARTS_PER_FILE].as_py())

    def parts(self) -> Iterator[SourcePart]:
        """All parts, in order."""
        for first in range(0, self.num_listed(), _PARTS_PER_FILE):
            for text in read_table(self._corpus, self._parts_key(first))["part"].to_pylist():
                yield SourcePart.model_validate_json(text)

    def save_merged(self, merged: pa.Table, num_chunks: int) -> None:
        """Save which examples (MERGED_SCHEMA) repeat others, and that the search was completed."""
        if len(merged):
            key = f"{self._prefix}/merged.bin"
            write_partitions(self._corpus, key, merged, merged["chunk"].to_numpy(), num_chunks)
        self._corpus.write_json(f"{self._prefix}/merged.json", {"num_merged": len(merged)})

    def num_merged(self) -> int | None:
        """Number of examples that repeat others; None if this was not checked."""
        try:
            return int(self._corpus.read_json(f"{self._prefix}/merged.json")["num_merged"])
        except FileNotFoundError:
            return None

    def merged_positions(self, chunk: int) -> frozenset[int]:
        """Positions of the examples of a chunk that repeat others. Call it only if the corpus has any."""
        found = read_partition(self._corpus, [f"{self._prefix}/merged.bin"], chunk, MERGED_SCHEMA)
        return frozenset(found["position"].to_pylist())

    def finished(self) -> dict[int, int]:
        """The chunks that have records, with the size of each record file."""
        found = {}
        for listed in self._corpus.scan(f"{self._prefix}/records-"):
            if number := re.search(r"records-(\d+)\.parquet$", listed.key):
                found[int(number[1])] = listed.size
        return dict(sorted(found.items()))

    def records_writer(self, chunk: int) -> contextlib.AbstractContextManager[pq.ParquetWriter]:
        """A writer for the records of a chunk, as `table_writer`."""
        return table_writer(self._corpus, self.records_key(chunk), RECORD_SCHEMA)

    def found_records(self, chunk: int, columns: list[str]) -> pa.Table | None:
        """Some columns of the records of a chunk; None if it has no records."""
        try:
            return read_table(self._corpus, self.records_key(chunk), columns)
        except FileNotFoundError:
            return None

    def mark_denied(self, chunk: int) -> None:
        """Mark a chunk with examples to which the store denied access: the next attempt reads the chunk again."""
        self._corpus.write(self._denied_key(chunk), b"")

    def forget_denied(self) -> None:
        """Remove the records of chunks with denied examples, because access may have been granted since."""
        for listed in self._corpus.list(f"{self._prefix}/denied-"):
            chunk = int(listed.rpartition("-")[2])
            self._corpus.discard(self.records_key(chunk))
            self._corpus.discard(self._denied_key(chunk))

    def _denied_key(self, chunk: int) -> str:
        return f"{self._prefix}/denied-{chunk:07d}"

    def load_records(self, chunks: Iterable[int]) -> pa.Table:
        """The records of some chunks, columns of RECORD_SCHEMA."""
        tables = (read_table(self._corpus, self.records_key(chunk)) for chunk in chunks)
        return pa.concat_tables([RECORD_SCHEMA.empty_table(), *tables])

    def delete_spill(self) -> None:
        """Remove the bytes that sources spilled, now that every shard is written, and the records of these parts: if a shard
        must be written again, the parts are examined again."""
        names = {listed.key.partition("/source/spill/")[2] for listed in self._corpus.scan(self._spill)}
        for chunk, part in enumerate(self.parts() if names else ()):
            if part.name in names:
                self._corpus.delete(self.records_key(chunk))
        for name in names:
            self._corpus.delete(f"{self._spill}{name}")
