"""The write stage: writes each shard from range reads of the source, R rows per row group. Finished shards are kept."""

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vitline.data_prep.examine.range_reads import READ_THREADS, ByteRange, JointRead, joint_reads, read_jointly
from vitline.data_prep.parquet_files import open_parquet
from vitline.data_prep.plan.sort_records import rows_key
from vitline.data_prep.records import WORK
from vitline.data_prep.shard_format import ListedShard, ShardError, ShardIdentity, open_shard
from vitline.data_prep.shards.content_digest import table_content_digest
from vitline.data_prep.shards.verify_shards import ShardSpec
from vitline.infra.config import FrozenConfig
from vitline.infra.runs.watchdog import note_progress
from vitline.infra.storage import Store, open_store

_MIN_ROWS_AT_ONCE, _MAX_ROWS_AT_ONCE, _BYTES_AT_ONCE = 32, 1024, 4 * 2**20
# Larger pages, such as a whole row group of photographs, are assembled in memory that the kernel must provide anew each time, which
# takes a tenth of the time. Pages below 1 MiB are copied through the cache, which takes longer as well.
_PAGE_BYTES, _MAX_BATCH_ROWS = 1_500_000, 1024
_HASHED_AT_ONCE_BYTES, _HASHED_AHEAD = 256 * 1024, 4
_PLACE = ["example_id", "base", "key", "offset", "sha256"]
_STATISTICS = ["example_id", "label", "width_px", "height_px"]


class ShardTask(FrozenConfig):
    """Everything needed to write one shard; the same task writes the same shard on every machine."""

    corpus: str
    spec: ShardSpec
    pieces: tuple[tuple[int, int, int], ...]
    """(bucket, start, stop): rows of the planned files, in this order."""
    origin: str

    @property
    def title(self) -> str:
        """Names the task in messages and files."""
        return f"write-{self.spec.corpus_name}-{self.spec.key.replace('/', '-')}"


class ShardInfo(FrozenConfig):
    """A finished shard with its size and digests."""

    corpus: str
    key: str
    num_rows: int
    rows_per_row_group: int
    num_bytes: int
    sha256: str
    content_digest: str


def ensure_shard(task: ShardTask) -> ShardInfo:
    """The finished shard of a task. It is written unless it exists already, with the expected size, rows and identity."""
    corpus = open_store(task.corpus)
    rows = _planned_rows(corpus, task)
    digest = table_content_digest(rows)
    return _finished_info(corpus, task, digest) or write_shard(task, rows, digest)


def _finished_info(corpus: Store, task: ShardTask, digest: str) -> ShardInfo | None:
    try:
        info = ShardInfo.model_validate(corpus.read_json(_info_key(task.spec.key)))
        same = (info.content_digest, info.rows_per_row_group) == (digest, task.spec.rows_per_row_group)
        if not same or corpus.size(task.spec.key) != info.num_bytes:
            return None
        open_shard(corpus, ListedShard(task.spec.corpus_name, info.key, digest, info.num_bytes)).close()
        return info
    except (FileNotFoundError, ShardError):
        return None


def _planned_rows(corpus: Store, task: ShardTask) -> pa.Table:
    """The rows of a shard, columns of ROW_SCHEMA. Only those parts of the planned files that hold them are read."""
    split = task.spec.key.partition("/")[0]
    tables = []
    for bucket, start, stop in task.pieces:
        with corpus.open(rows_key(split, bucket)) as file:
            planned = open_parquet(file)
            size = planned.metadata.row_group(0).num_rows
            first, last = start // size, -(-stop // size)
            table = planned.read_row_groups(range(first, last), use_threads=False)
            tables.append(table.slice(start - first * size, stop - start))
    return pa.concat_tables(tables)


def write_shard(task: ShardTask, planned: pa.Table, digest: str) -> ShardInfo:
    """Write a shard, then record that it is finished. S3 verifies the upload by a checksum; `vitline data verify` reads
    everything back.

    Raises RuntimeError if the source changed since it was examined, or if the stored shard has another size than was written.
    """
    corpus = open_store(task.corpus)
    with corpus.writer(task.spec.key) as file:
        sink = HashingSink(file)
        mean_bytes = pc.mean(planned["num_bytes"]).as_py() or 0
        with shard_writer(sink, task.spec.arrow_schema(), mean_bytes) as writer:
            for table in _tables(planned, task):
                writer.write_table(table, row_group_size=task.spec.rows_per_row_group)
                note_progress()
            identity = ShardIdentity(
                corpus=task.spec.corpus_name, key=task.spec.key, content_digest=digest, data_bytes=sink.num_bytes
            )
            writer.add_key_value_metadata(identity.as_metadata())
    info = ShardInfo(
        corpus=corpus.uri,
        key=task.spec.key,
        num_rows=len(planned),
        rows_per_row_group=task.spec.rows_per_row_group,
        num_bytes=sink.num_bytes,
        sha256=sink.sha256,
        content_digest=digest,
    )
    found = corpus.size(task.spec.key)
    if found != info.num_bytes:
        raise RuntimeError(
            f"{corpus.uri_of(task.spec.key)} has {found:,} bytes, but {info.num_bytes:,} were written: the store or the "
            "disk loses data. Check it before preparing again."
        )
    corpus.write_json(_info_key(task.spec.key), info.model_dump(mode="json"))
    return info


def shard_writer(sink: "HashingSink", schema: pa.Schema, mean_image_bytes: float) -> pq.ParquetWriter:
    """pyarrow's writer, configured to store image bytes as they are: no compression, dictionary or statistics for them."""
    batch_rows = math.ceil(_PAGE_BYTES / max(1, mean_image_bytes))  # a page can end only between two batches
    return pq.ParquetWriter(
        sink,
        schema,
        compression={path: "NONE" if path == "image.bytes" else "ZSTD" for path in _leaf_paths(schema)},
        use_dictionary=False,
        write_statistics=[name for name in _STATISTICS if name in schema.names],
        write_page_checksum=True,
        write_batch_size=min(batch_rows, _MAX_BATCH_ROWS),
    )


def _tables(planned: pa.Table, task: ShardTask) -> Iterator[pa.Table]:
    """The shard in batches of whole row groups; only the images of one batch are in memory."""
    mean_bytes = max(1, pc.mean(planned["num_bytes"]).as_py() or 0)
    at_once = max(_MIN_ROWS_AT_ONCE, min(_MAX_ROWS_AT_ONCE, int(_BYTES_AT_ONCE / mean_bytes)))
    size = task.spec.rows_per_row_group * math.ceil(at_once / task.spec.rows_per_row_group)
    images = _Images(planned, size)
    for start in range(0, len(planned), size):
        part = planned.slice(start, size)
        yield shard_table(part, images.read(part), task.origin, task.spec.arrow_schema())


class _PlacedRow(TypedDict):
    """The columns _PLACE of a planned row."""

    example_id: str
    base: str
    key: str
    offset: int
    sha256: bytes


class _Images:
    """Reads the images of one batch after another into the same memory, because allocating takes as long as reading."""

    def __init__(self, planned: pa.Table, size: int) -> None:
        self._stores = {base: open_store(base) for base in planned["base"].unique().to_pylist()}
        self._wait = any(store.high_latency for store in self._stores.values())
        num_bytes = planned["num_bytes"].to_numpy()
        largest = max((int(num_bytes[i : i + size].sum()) for i in range(0, len(planned), size)), default=0)
        self._memory = np.empty(largest, np.uint8)

    def read(self, part: pa.Table) -> pa.BinaryArray:
        """The images of a batch, valid until the next call. Raises RuntimeError if one has changed since it was examined."""
        ends = np.concatenate([[0], np.cumsum(part["num_bytes"].to_numpy())]).tolist()
        memory, rows = self._memory.data, part.select(_PLACE).to_pylist()
        spaces = [memory[start:stop] for start, stop in itertools.pairwise(ends)]
        placed = list(zip(rows, spaces, strict=True))
        if self._wait:
            ranges = [ByteRange(r["base"], r["key"], r["offset"], r["offset"] + len(space)) for r, space in placed]
            ordered = sorted(zip(placed, ranges, strict=True), key=lambda each: each[1])
            with ThreadPoolExecutor(READ_THREADS) as threads:
                list(threads.map(self._read_jointly, joint_reads(ordered)))
        else:
            for row, space in placed:
                self._read_one(row, space)
        buffers = [None, pa.array(ends, pa.int32()).buffers()[1], pa.py_buffer(self._memory)]
        return pa.Array.from_buffers(pa.binary(), len(part), buffers)

    def _read_jointly(self, joint: JointRead[tuple[_PlacedRow, memoryview]]) -> None:
        """Several images with one request."""
        if len(joint) == 1:
            self._read_one(*joint[0][0])
            return
        base, _, start, _ = joint[0][1]
        data = memoryview(read_jointly(self._stores[base], joint))
        for (row, space), wanted in joint:
            part = data[wanted.start - start :][: len(space)]
            space[: len(part)] = part
            self._check(row, space, len(part))

    def _read_one(self, row: _PlacedRow, space: memoryview) -> None:
        self._check(row, space, self._stores[row["base"]].read_into(row["key"], row["offset"], space))

    def _check(self, row: _PlacedRow, space: memoryview, length: int) -> None:
        if length < len(space) or hashlib.sha256(space).digest() != row["sha256"]:
            raise RuntimeError(
                f"{self._stores[row['base']].uri_of(row['key'])} ({row['example_id']}) changed after it was examined. Stop changing "
                "the source and prepare again: the changed source becomes another version."
            )


def shard_table(rows: pa.Table, images: pa.BinaryArray, origin: str, schema: pa.Schema) -> pa.Table:
    """Planned rows (columns of ROW_SCHEMA) and their images as rows of a shard."""
    paths = [example_id.rpartition("/")[2] for example_id in rows["example_id"].to_pylist()]
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    columns["image"] = pa.StructArray.from_arrays([images, pa.array(paths)], ["bytes", "path"])
    columns["source"] = pa.repeat(origin, len(rows))
    if "label" in schema.names:
        columns["label"] = pc.list_element(rows["labels"], 0)
    names = schema.names
    return pa.table([columns[name] for name in names], names=names).cast(schema)


def _leaf_paths(schema: pa.Schema) -> list[str]:
    lists = {field.name for field in schema if pa.types.is_list(field.type)}
    names = [f"{name}.list.element" if name in lists else name for name in schema.names if name != "image"]
    return ["image.bytes", "image.path", *names]


def _info_key(shard_key: str) -> str:
    return f"{WORK}/gather/{shard_key.removesuffix('.parquet')}.json"


class HashingSink:
    """A file for pyarrow that counts and hashes what is written, in a thread while the caller continues to encode and write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.num_bytes, self.closed = file, 0, False
        self._digest, self._hasher = hashlib.sha256(), ThreadPoolExecutor(1, thread_name_prefix="shard-hash")
        self._pieces, self._piece_bytes = list[bytes](), 0
        self._ahead: deque[Future[None]] = deque()

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._pieces.append(bytes(data))  # no copy: pyarrow passes bytes
        self._piece_bytes += len(data)
        self.num_bytes += len(data)
        if self._piece_bytes >= _HASHED_AT_ONCE_BYTES:
            self._hash_pieces()
        return len(data)

    @property
    def sha256(self) -> str:
        """sha256 of everything written, in hexadecimal."""
        self._hash_pieces()
        while self._ahead:
            self._ahead.popleft().result()
        return self._digest.hexdigest()

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True  # the store closes the file and makes it visible

    def _hash_pieces(self) -> None:
        self._ahead.append(self._hasher.submit(_update, self._digest, self._pieces))
        self._pieces, self._piece_bytes = [], 0
        if len(self._ahead) > _HASHED_AHEAD:
            self._ahead.popleft().result()


def _update(digest: Any, pieces: list[bytes]) -> None:
    for piece in pieces:
        digest.update(piece)
