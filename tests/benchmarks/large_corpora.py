"""Planning and seeking in corpora of 14 and 300 million images, memory over 100 epochs of a small one, and what an abort leaves. Command:
python tests/benchmarks/large_corpora.py

Plan and seek: manifests without shards, at the shape of ImageNet-21k (256 lanes, window 4, B = 4,096, 8 ranks). A rank opens the order,
plans it (`vitline pretrain run --plan`), and computes its share of the first step, of one in the middle of the 90th epoch, and of the 100
steps that follow each other there. Memory is the growth of the peak of the process after its imports; each size has a process of its own.
Epochs: 64 icons as PNG, row groups of 8, 100 epochs, once with and once without the decoded cache; resident memory after every tenth epoch.
Abort: a training from a store with latency is closed in the middle of its first, tenth and fortieth batch, and at once; threads and open
files are counted before and after.
"""

import argparse
import gc
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from input import icon_corpus, photograph
from steady_stream import DistantStore, small_picture, write_corpus

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.shard_format import Counts, Manifest, SegmentInfo, SplitInfo
from vitline.infra.stores.file_store import FileStore
from vitline.vit.input.batches import LoaderResources, train_batches
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.order import Order
from vitline.vit.input.plan import plan_order
from vitline.vit.input.schedule import Schedule

MB = 1e6
ROWS, GROUPS_PER_SHARD = 64, 128
RECIPE = InputConfig(global_batch_size=4096, num_lanes=256, shuffle_window=4)


def manifest_of(num_rows: int) -> Manifest:
    """The manifest of a corpus that does not exist."""
    segment = SegmentInfo(
        split="train", name="s000", num_rows=num_rows, num_shards=-(-num_rows // (ROWS * GROUPS_PER_SHARD))
    )
    split = SplitInfo(
        num_rows=num_rows,
        rows_per_row_group=ROWS,
        row_groups_per_shard=GROUPS_PER_SHARD,
        segments=(segment,),
        digest="large",
    )
    counts = Counts(num_found=num_rows, num_accepted=num_rows, num_refused=0, num_bytes=num_rows * 100_000, refused={})
    return Manifest(
        name="large",
        version="0",
        digest="large",
        class_map_digest="",
        num_classes=21_841,
        single_label=True,
        order_seed=0,
        splits={"train": split},
        decode_policy=DecodePolicy(),
        counts=counts,
        provenance={},
    )


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def plan_and_seek(num_rows: int) -> None:
    manifest, before = manifest_of(num_rows), peak()
    far = int(89.5 * num_rows / RECIPE.global_batch_size)
    made: list[Order] = []

    def share(start: int, steps: int) -> None:
        schedule = Schedule(made, None, rank=3, world_size=8, most_examples=512)
        assert sum(len(each.slots) for each in schedule.shares(start, start + steps)) > 0

    seconds = {
        "order": timed(lambda: made.append(Order.of(manifest, "train", RECIPE, 0))),
        "plan": timed(lambda: plan_order(made[0], world_size=8, mean_row_group_bytes=ROWS * 100_000)),
        "first step": timed(lambda: share(0, 1)),
        f"step {far:,}": timed(lambda: share(far, 1)),
        "100 steps from there": timed(lambda: share(far, 100)),
    }
    shown = ", ".join(f"{what} {s:.3f} s" for what, s in seconds.items())
    print(f"{num_rows / 1e6:,.0f} M images: {shown}; memory {(peak() - before) / MB:.1f} MB", flush=True)


def peak() -> int:
    """Most bytes that were resident. Not from `getrusage`, which counts the process before `exec`, too."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def epochs(cache_bytes: int) -> None:
    config = InputConfig(global_batch_size=16, num_lanes=4, shuffle_window=2, augment=AugmentConfig(image_size_px=64))
    with tempfile.TemporaryDirectory() as folder:
        store, manifest = icon_corpus(Path(folder), [photograph(i, 72, 72) for i in range(64)])
        loading = LoaderResources(decoded_cache_bytes=cache_bytes)
        sizes = []
        with train_batches(
            store, manifest, "train", config, seed=0, micro_batch_size=16, num_steps=400, loading=loading
        ) as batches:
            for step, _ in enumerate(batches, start=1):
                if step % 40 == 0:
                    gc.collect()
                    sizes.append(resident() / MB)
    cached = "with" if cache_bytes else "without"
    print(f"100 epochs {cached} the decoded cache: " + ", ".join(f"{size:.1f}" for size in sizes) + " MB", flush=True)


def aborts() -> None:
    DistantStore.latency_s = 0.05
    config = InputConfig(global_batch_size=256, num_lanes=16, shuffle_window=2, augment=AugmentConfig(image_size_px=16))
    with tempfile.TemporaryDirectory() as folder:
        manifest = write_corpus(FileStore.at(f"file://{folder}"), 4096, small_picture())
        store = DistantStore.at(f"file://{folder}")
        for after in (0, 1, 10, 40):
            before = threads_and_files()
            batches = train_batches(store, manifest, "train", config, seed=0, micro_batch_size=256)
            for _ in range(after):
                next(batches)
            during = threads_and_files()
            seconds = timed(batches.close)
            print(
                f"aborted after {after} batches: threads and files {before} before, {during} during, {threads_and_files()} after; closed "
                f"in {seconds:.2f} s",
                flush=True,
            )


def threads_and_files() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    spawn = multiprocessing.get_context("spawn")
    for call, argument in ((plan_and_seek, 14_000_000), (plan_and_seek, 300_000_000), (epochs, 0), (epochs, 2**30)):
        process = spawn.Process(target=call, args=(argument,))
        process.start()
        process.join()
    process = spawn.Process(target=aborts)
    process.start()
    process.join()


if __name__ == "__main__":
    main()
