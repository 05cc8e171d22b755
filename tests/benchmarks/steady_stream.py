"""The gaps between batches of one rank at ImageNet-21k shape, from a store with latency. Command:
python tests/benchmarks/steady_stream.py [--latency-ms 200] [--images-per-s 4700]

256 lanes of 4 row groups of 64 rows, B = 4,096, rank 0 of 8; two blocks per lane and epoch, three epochs. A row group takes
the latency and its 6.4 MB at the bandwidth, which all requests share; its images are small, so that two cores decode them. The
consumer takes a batch as often as a GPU would. Prints the waits for batches after the first.
"""

import argparse
import io
import statistics
import sys
import tempfile
import threading
import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.shard_format import Counts, Manifest, SegmentInfo, SplitInfo, shard_key
from vitline.infra.storage import Store
from vitline.infra.stores.file_store import FileStore
from vitline.vit.input.batches import LoaderResources, Source, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from shard_lists import with_shard_list

LANES, WINDOW, ROWS, GROUPS_PER_SHARD, BATCH, RANKS = 256, 4, 64, 32, 4096, 8
ROW_GROUP_BYTES = 64 * 100_000


class DistantStore(FileStore):
    """Files whose reads take as long as from an object store: a latency, and bytes at a bandwidth that all reads share."""

    high_latency = True
    latency_s, bytes_per_s = 0.0, 1e9
    _link = threading.Lock()
    num_reads = 0
    open = Store.open  # by ranges, as from an object store

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        time.sleep(self.latency_s)
        if end is not None and end - start > ROWS * 100:
            with self._link:
                time.sleep(ROW_GROUP_BYTES / self.bytes_per_s)
        DistantStore.num_reads += 1
        return super().read(key, start, end)


def small_picture() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), 128, np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def write_corpus(store: Store, num_rows: int, *pictures: bytes) -> Manifest:
    """A corpus of these pictures again and again."""
    per_shard = ROWS * GROUPS_PER_SHARD
    segment = SegmentInfo(split="train", name="s000", num_rows=num_rows, num_shards=num_rows // per_shard)
    split = SplitInfo(
        num_rows=num_rows,
        rows_per_row_group=ROWS,
        row_groups_per_shard=GROUPS_PER_SHARD,
        segments=(segment,),
        digest="stream",
    )
    manifest = Manifest(
        name="stream",
        version="0",
        digest="stream",
        class_map_digest="",
        num_classes=10,
        single_label=True,
        order_seed=0,
        splits={"train": split},
        decode_policy=DecodePolicy(),
        counts=Counts(num_found=num_rows, num_accepted=num_rows, num_refused=0, num_bytes=0, refused={}),
        provenance={},
    )
    schema = manifest.arrow_schema()
    row = {
        "labels": [1],
        "label": 1,
        "example_id": "a",
        "source": "a",
    }
    row |= {"width_px": 16, "height_px": 16} | {f.name: b"a" for f in schema if pa.types.is_binary(f.type)}
    images = [{"bytes": picture, "path": ""} for picture in pictures]
    rows = [row | {"image": image} for image in islice(cycle(images), per_shard)]
    table = pa.Table.from_pylist(rows, schema=schema)
    for shard in range(segment.num_shards):
        with store.writer(shard_key("train", "s000", shard, segment.num_shards)) as file:
            pq.write_table(table, file, row_group_size=ROWS, write_page_checksum=True, compression="none")
    return with_shard_list(store, manifest)


def waits(store: DistantStore, manifest: Manifest, images_per_s: float) -> tuple[float, list[float]]:
    """Seconds until the first batch, and seconds that the consumer waited for each further one."""
    recipe = InputConfig(
        global_batch_size=BATCH, num_lanes=LANES, shuffle_window=WINDOW, augment=AugmentConfig(image_size_px=16)
    )
    num_steps = 3 * manifest.splits["train"].num_rows // BATCH
    loading, share = LoaderResources(rank=0, world_size=RANKS), BATCH // RANKS
    waited: list[float] = []
    with source_batches(
        [Source(store, manifest, "train")], recipe, seed=0, micro_batch_size=share, num_steps=num_steps, loading=loading
    ) as batches:
        for _ in range(num_steps):
            asked = time.perf_counter()
            next(batches)
            waited.append(time.perf_counter() - asked)
            time.sleep(share / images_per_s)
    return waited[0], waited[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency-ms", type=float, default=200)
    parser.add_argument("--images-per-s", type=float, default=4700)
    parser.add_argument("--blocks", type=int, default=2, help="blocks of each lane in an epoch")
    given = parser.parse_args()
    DistantStore.latency_s = given.latency_ms / 1e3
    with tempfile.TemporaryDirectory() as folder:
        manifest = write_corpus(FileStore.at(f"file://{folder}"), LANES * WINDOW * ROWS * given.blocks, small_picture())
        first, further = waits(DistantStore.at(f"file://{folder}"), manifest, given.images_per_s)
    step_s = BATCH / RANKS / given.images_per_s
    gaps = [step_s + wait for wait in further]
    print(f"latency {given.latency_ms:.0f} ms, a step of {step_s * 1e3:.0f} ms, {DistantStore.num_reads:,} reads")
    print(f"first batch after {first:.2f} s; steps that waited more than a tenth of a step: ", end="")
    print(f"{sum(wait > step_s / 10 for wait in further)} of {len(further)}")
    print(f"largest gap {max(gaps):.3f} s = {max(gaps) / statistics.median(gaps):.2f} x the median")
    worst = sorted(range(len(further)), key=lambda step: -further[step])[:5]
    print("longest waits: " + ", ".join(f"{further[step]:.2f} s before step {step + 1}" for step in worst))
    print(f"share of the time that was waited: {sum(further) / sum(gaps):.1%}")


if __name__ == "__main__":
    main()
