"""The second pass: write each shard from range reads of the source, R rows to a row group. Finished shards stay."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.examine import read_example
from data_prep.plan_shards import ShardPlan
from data_prep.records import WORK, read_table, write_table
from data_prep.verify_shards import ShardSpec, read_back
from infra.config import FrozenConfig
from infra.storage import Store, open_store

_READ_THREADS = 8
_MIN_ROWS_AT_ONCE = 32
_STATISTICS = ["example_id", "label", "width_px", "height_px"]


class ShardTask(FrozenConfig):
    """Everything that writing one shard needs; the same task gives the same shard wherever it runs."""

    corpus: str
    spec: ShardSpec
    content_digest: str
    origin: str


class ShardInfo(FrozenConfig):
    """A finished shard, read back and found right."""

    corpus: str
    key: str
    num_rows: int
    rows_per_row_group: int
    num_bytes: int
    sha256: str
    content_digest: str


def finished_info(task: ShardTask) -> ShardInfo | None:
    """What is known of the shard of a task if it is finished and lies there in full size."""
    corpus = open_store(task.corpus)
    try:
        info = ShardInfo.model_validate(corpus.read_json(_info_key(task.spec.key)))
        same = info.content_digest == task.content_digest and info.rows_per_row_group == task.spec.rows_per_row_group
        return info if same and corpus.size(task.spec.key) == info.num_bytes else None
    except FileNotFoundError:
        return None


def save_plan(task: ShardTask, plan: ShardPlan) -> None:
    """Put the rows of a shard where `ensure_shard` finds them."""
    write_table(open_store(task.corpus), _plan_key(task.spec.key), plan.rows)


def ensure_shard(task: ShardTask) -> ShardInfo:
    """The finished shard of a task, written unless it is there already."""
    return finished_info(task) or write_shard(task)


def write_shard(task: ShardTask) -> ShardInfo:
    """Write a shard, read it back from the store, then note that it is finished.

    Raises RuntimeError where the source changed since it was examined, or the shard does not read back.
    """
    corpus = open_store(task.corpus)
    schema = task.spec.arrow_schema()
    rows = read_table(corpus, _plan_key(task.spec.key)).to_pylist()
    with corpus.writer(task.spec.key) as file:
        sink = _HashingSink(file)
        # Parquet's own writer keeps the image bytes as they are: no compression, dictionary or statistics on them.
        with pq.ParquetWriter(
            sink,
            schema,
            compression={path: "NONE" if path == "image.bytes" else "ZSTD" for path in _leaf_paths(schema)},
            use_dictionary=False,
            write_statistics=[name for name in _STATISTICS if name in schema.names],
            write_page_checksum=True,
        ) as writer:
            for table in _tables(rows, schema, task):
                writer.write_table(table, row_group_size=task.spec.rows_per_row_group)
    info = ShardInfo(
        corpus=corpus.uri,
        key=task.spec.key,
        num_rows=len(rows),
        rows_per_row_group=task.spec.rows_per_row_group,
        num_bytes=sink.num_bytes,
        sha256=sink.sha256.hexdigest(),
        content_digest=task.content_digest,
    )
    found = read_back(corpus, task.spec)
    if (found.sha256, found.content_digest) != (info.sha256, info.content_digest):
        raise RuntimeError(
            f"{corpus.uri_of(task.spec.key)} does not read back as it was written (sha256 {found.sha256[:12]}, written "
            f"{info.sha256[:12]}): the store or the disk alters data. Check it before preparing again."
        )
    corpus.write_json(_info_key(task.spec.key), info.model_dump(mode="json"))
    return info


def _tables(rows: list[dict[str, Any]], schema: pa.Schema, task: ShardTask) -> Iterator[pa.Table]:
    """The shard in parts of whole row groups; only one part's images are in memory."""
    size = task.spec.rows_per_row_group * -(-_MIN_ROWS_AT_ONCE // task.spec.rows_per_row_group)
    stores = {base: open_store(base) for base in {row["base"] for row in rows}}
    with ThreadPoolExecutor(_READ_THREADS) as threads:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            images = list(threads.map(lambda row: _unchanged(row, stores[row["base"]]), part))
            yield pa.Table.from_pylist(
                [_shard_row(row, image, task) for row, image in zip(part, images, strict=True)], schema=schema
            )


def _unchanged(row: dict[str, Any], store: Store) -> bytes:
    data = read_example(row, store)
    if hashlib.sha256(data).digest() != row["sha256"]:
        raise RuntimeError(
            f"{store.uri}/{row['key']} ({row['example_id']}) changed after it was examined. Let the source rest and "
            "prepare again: a changed source is another version."
        )
    return data


def _shard_row(row: dict[str, Any], image: bytes, task: ShardTask) -> dict[str, Any]:
    # from_pylist takes the columns of the schema and leaves what else is in the row.
    path = PurePosixPath(row["example_id"]).name
    return {**row, "image": {"bytes": image, "path": path}, "label": row["labels"][0], "source": task.origin}


def _leaf_paths(schema: pa.Schema) -> list[str]:
    lists = {field.name for field in schema if pa.types.is_list(field.type)}
    names = [f"{name}.list.element" if name in lists else name for name in schema.names if name != "image"]
    return ["image.bytes", "image.path", *names]


def _plan_key(shard_key: str) -> str:
    return f"{WORK}/gather/{shard_key.removesuffix('.parquet')}.plan.parquet"


def _info_key(shard_key: str) -> str:
    return f"{WORK}/gather/{shard_key.removesuffix('.parquet')}.json"


class _HashingSink:
    """A file for pyarrow that counts and hashes what passes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.num_bytes, self.sha256, self.closed = file, 0, hashlib.sha256(), False

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.sha256.update(data)
        self.num_bytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True  # the store closes the file, and makes it visible
