"""Preparation of 14 million and of 300 million images, with records only: sizes, planning time, requests, bytes, cost.

    .venv/bin/python tests/benchmarks/corpora_at_scale.py

One planning task of each kind is run for real on as many made-up records as it would have, with the real number of
buckets and files, and its time multiplied by the number of tasks. The driver's plan (layouts, segments, shard tasks,
manifest) is made for real at full size. Requests and bytes follow from what the code does: stated below, line by line.
Prices are those of AWS S3 Standard in us-east-1: 0.005 USD per 1,000 writes, 0.0004 USD per 1,000 reads.
"""

import argparse
import json
import pickle
import time

import numpy as np
import psutil
import pyarrow as pa

from vitline.data_prep.config import CorpusConfig, ImageNet21k, LabelTable, PrepareExecution, ShardingConfig
from vitline.data_prep.labels.classes import ClassInfo, ClassMap
from vitline.data_prep.plan.corpus_stats import CorpusStats, SampleRule
from vitline.data_prep.plan.plan_shards import Selection, plan_corpus
from vitline.data_prep.plan.sort_records import (
    CLASSES_FILE,
    LOCATED_REJECTS,
    ROW_SCHEMA,
    VAL_FILE,
    Selected,
    SortTask,
    find_duplicates,
    partition_records,
    rows_key,
    select,
)
from vitline.data_prep.prepare.publish import SHARDS_SCHEMA
from vitline.data_prep.records import PLAN, RECORD_SCHEMA, REQUEST_KEY, Chunks
from vitline.data_prep.shards.verify_shards import ShardSpec
from vitline.data_prep.shards.write_shards import ShardTask
from vitline.data_prep.sources.splits import order_key
from vitline.infra.storage import Store, open_store

MEAN_BYTES = 110_000
READ_WINDOW_BYTES = 4 << 20  # of a tar that is streamed
PART_BYTES = 32 << 20  # of an upload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    jft = LabelTable(path="s3://raw/jft/labels", labels_column="labels")
    cases = {
        "ImageNet-21k": (14_197_122, 21_841, 1, ImageNet21k(path="s3://raw/fall11_whole.tar"), PrepareExecution()),
        "JFT-300M": (303_000_000, 18_291, 1.26, jft, PrepareExecution(examples_per_chunk=4096, sort_bytes=256 << 20)),
    }
    for name, (num_images, num_classes, labels, source, execution) in cases.items():
        print(f"\n{name}: {num_images:,} images of {MEAN_BYTES / 1e3:.0f} KB, {num_classes:,} classes")
        config = CorpusConfig(name=name.lower(), source=source, execution=execution)
        for what, value in simulate(config, num_images, num_classes, labels).items():
            print(f"  {what:58s} {value}")


def simulate(config: CorpusConfig, num_images: int, num_classes: int, labels: float) -> dict[str, str]:
    corpus = open_store(f"memory://scale/corpora/{config.name}/v")
    corpus.write_json(REQUEST_KEY, config.model_dump(mode="json"))
    chunks = Chunks(corpus, config)
    probe = records(20_000, num_classes, labels)
    per_record = write_records(chunks, corpus, probe) / len(probe)
    rows_at_once = int(config.execution.sort_bytes / per_record)
    num_tasks = -(-num_images // rows_at_once)
    write_records(chunks, corpus, records(rows_at_once, num_classes, labels))
    class_map = ClassMap.of(ClassInfo(name=f"c{i:05d}", source_id=f"c{i:05d}") for i in range(num_classes))
    outside = {"outside": {"reason": "small_class", "detail": ""}, "single_label": labels == 1}
    corpus.write_json(CLASSES_FILE, class_map.as_file() | outside)
    corpus.write_json(VAL_FILE, {})
    seconds = {}
    # Into the real number of buckets, which costs most; then into one, so that a bucket is as large as a real one.
    task = SortTask(corpus=corpus.uri, number=0, num_files=1, num_buckets=num_tasks, chunks=(0,))
    seconds["deal out"] = timed(lambda: partition_records(task))
    task = task.model_copy(update={"num_buckets": 1})
    partition_records(task)
    seconds["find duplicates"] = timed(lambda: find_duplicates(task))
    task = task.model_copy(update={"drops": (f"{PLAN}/drops/pixels-00000.bin",)})
    seconds["select"] = timed(lambda: select(task))
    peak = psutil.Process().memory_info().rss
    per_row = corpus.size(rows_key("train", 0)) / rows_at_once
    plan, plan_s = planned(config, class_map, num_images, num_tasks)
    shards = plan.shards
    tasks_bytes = len(pickle.dumps(shard_task(corpus, shards[0], num_classes))) * len(shards)
    rows_per_chunk = (
        config.execution.examples_per_chunk if isinstance(config.source, LabelTable) else num_images / 21_841
    )
    num_chunks = int(-(-num_images // rows_per_chunk))
    total = num_images * MEAN_BYTES
    examine_reads = total / READ_WINDOW_BYTES if isinstance(config.source, ImageNet21k) else num_images
    shuffle_reads = 2 * num_tasks**2 * 3  # two ranges of each bucket of each file: by order, by pixels and what goes
    reads = examine_reads + 3 * num_chunks + shuffle_reads + num_images + len(shards) * (4 + 256 / 4)
    writes = 2 * num_chunks + 9 * num_tasks + len(shards) * (256 * 2**20 / PART_BYTES + 3)
    core_s = sum(seconds.values()) * num_tasks
    line = shards_line_bytes(len(shards))
    return {
        "records (one file a part)": f"{num_chunks:,} files, {per_record:.0f} bytes an image, {gb(per_record * num_images)}",
        "planning tasks of each kind": f"{num_tasks:,} of {rows_at_once:,} records",
        "planning, core time": f"{core_s / 60:.0f} min ({', '.join(f'{k} {v:.1f} s' for k, v in seconds.items())} a task)",
        "planning on 64 cores": f"{core_s / 64 + plan_s:.0f} s",
        "memory of this process after such a task, store included": gb(peak),
        "planned rows": f"{per_row:.0f} bytes an image, {gb(per_row * num_images)}",
        "driver: plan of shards": f"{plan_s:.1f} s, {len(shards):,} shards, tasks {tasks_bytes / 1e6:.0f} MB",
        "manifest.json, shards.parquet": f"{manifest_bytes(plan) / 1e3:.1f} kB, {line / 1e6:.1f} MB",
        "bytes read, bytes written": f"{gb(2 * total)} of images (once to examine, once to gather), {gb(total)}",
        "object-store requests": f"{reads / 1e6:.1f} M reads, {writes / 1e6:.2f} M writes",
        "cost of requests": f"{reads / 1e3 * 0.0004 + writes / 1e3 * 0.005:,.0f} USD",
        "gather alone, reads": f"{num_images / 1e6:.0f} M, one of every image",
    }


def timed(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def records(number: int, num_classes: int, labels: float) -> pa.Table:
    """Synthetic records: random hashes, and names of the usual length."""
    rng = np.random.default_rng(number)
    ids = [f"n{i % num_classes:08d}.tar!n{i % num_classes:08d}_{i}.JPEG" for i in range(number)]

    def hashes() -> list[bytes]:
        return [bytes(row) for row in rng.integers(0, 256, (number, 32), dtype=np.uint8)]

    counts = np.where(rng.random(number) < labels - 1, 2, 1)
    names = [[f"c{(i + j) % num_classes:05d}" for j in range(count)] for i, count in enumerate(counts.tolist())]
    columns = {
        "example_id": ids,
        "labels": names,
        "weights": pa.nulls(number, pa.list_(pa.float32())),
        "split": ["val" if i % 100 == 0 else "train" for i in range(number)],
        **{name: pa.nulls(number, pa.float64()) for name in ("val_fraction", "test_fraction")},
        "group": pa.nulls(number, pa.string()),
        "base": ["s3://raw/imagenet21k"] * number,
        "key": ["fall11_whole.tar"] * number,
        "offset": pa.array(np.arange(number) * MEAN_BYTES),
        "length": pa.array(rng.integers(20_000, 200_000, number)),
        "is_link": [False] * number,
        "reason": pa.nulls(number, pa.string()),
        "detail": pa.nulls(number, pa.string()),
        "order_key": pa.array([order_key(0, name) for name in ids], pa.uint64()),
        "num_bytes": pa.array(rng.integers(20_000, 200_000, number)),
        **{name: hashes() for name in ("sha256", "pixel_sha256", "phash", "phash_mirror")},
        "width_px": pa.array(rng.integers(200, 900, number), pa.int32()),
        "height_px": pa.array(rng.integers(200, 900, number), pa.int32()),
        "format": ["JPEG"] * number,
        "mode": ["RGB"] * number,
    }
    return pa.table(columns).select(RECORD_SCHEMA.names).cast(RECORD_SCHEMA)


def write_records(chunks: Chunks, corpus: Store, table: pa.Table) -> int:
    with chunks.records_writer(0) as writer:
        writer.write_table(table)
    return corpus.size(chunks.records_key(0))


def planned(config: CorpusConfig, class_map: ClassMap, num_images: int, num_tasks: int):
    """The driver's part at full size, from counts."""
    train = num_images * 99 // 100
    split = {"train": train // num_tasks, "val": (num_images - train) // num_tasks}
    buckets = tuple(
        Selected(
            bucket=i,
            num_rows=split,
            num_bytes={name: rows * MEAN_BYTES for name, rows in split.items()},
            num_rejects=0,
            stats={},
        )
        for i in range(num_tasks)
    )
    nothing = CorpusStats.of(ROW_SCHEMA.empty_table(), LOCATED_REJECTS.empty_table(), 1, SampleRule())
    selection = Selection(class_map, True, False, nothing, buckets)
    started = time.perf_counter()
    plan = plan_corpus(selection, {}, ShardingConfig(), None)
    return plan, time.perf_counter() - started


def shard_task(corpus: Store, shard, num_classes: int) -> ShardTask:
    spec = ShardSpec(
        corpus_name=corpus.uri.split("/")[-2],
        key=shard.key,
        num_rows=shard.num_rows,
        rows_per_row_group=76,
        num_classes=num_classes,
        single_label=True,
        has_weights=False,
    )
    return ShardTask(corpus=corpus.uri, spec=spec, pieces=shard.pieces, origin="s3://raw/fall11_whole.tar")


def shards_line_bytes(number: int) -> int:
    rng = np.random.default_rng(0)
    sample = min(number, 2000)
    lines = [
        {
            "key": f"train/s000/part-{i:05d}-of-{number:05d}.parquet",
            "version": "",
            "num_rows": 2432,
            "num_bytes": 267_000_000 + i,
            "sha256": rng.bytes(32).hex(),
            "content_digest": rng.bytes(32).hex(),
        }
        for i in range(sample)
    ]
    from vitline.data_prep.parquet_files import write_table

    store = open_store("memory://scale/lines")
    write_table(store, "shards.parquet", pa.Table.from_pylist(lines, schema=SHARDS_SCHEMA))
    return store.size("shards.parquet") * number // sample


def manifest_bytes(plan) -> int:
    segments = {name: [s.model_dump(mode="json") for s in parts] for name, parts in plan.segments.items()}
    return len(json.dumps(segments, indent=1)) + 3000  # beside the segments: request, counts, provenance


def gb(number: float) -> str:
    return f"{number / 1e12:.1f} TB" if number >= 1e12 else f"{number / 1e9:.1f} GB"


if __name__ == "__main__":
    main()
