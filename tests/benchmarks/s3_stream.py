"""Batches from a real S3 service behind a proxy with latency, against batches of the same corpus in files. Command:
python tests/benchmarks/s3_stream.py [--latency-ms 20] [--rounds 5] [--faults 503] [--every 10]

A SeaweedFS of its own, and the proxy in a process of its own. 16 lanes of 2 row groups of 64 photographs of 93 KB, B = 256, 224 px, one
decoding thread; 4,096 images an epoch. Each round reads the same batches from files and from S3, in turns; the consumer takes every batch
at once, so that the rates are those of the loader. Prints rates, ratios, and the largest gap between two batches over the median.
`--faults`: every N-th request to S3 fails in these ways, in turn: 503 (as a throttled request gets it), reset, reply lost, reply cut,
slow (0.2 s late), slow bytes (half of the body 5 s late).
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from distant_s3 import distant_s3
from input import interval, jpeg, photograph
from steady_stream import ROWS, write_corpus

from vitline.data_prep.shard_format import Manifest
from vitline.infra.storage import Store, open_store
from vitline.vit.input.batches import LoaderResources, Source, source_batches
from vitline.vit.input.config import AugmentConfig, InputConfig

LANES, WINDOW, BATCH, NUM_ROWS = 16, 2, 256, 4096
RECIPE = InputConfig(
    global_batch_size=BATCH, num_lanes=LANES, shuffle_window=WINDOW, augment=AugmentConfig(image_size_px=224)
)


def gaps_of(store: Store, manifest: Manifest, num_steps: int) -> tuple[float, list[float]]:
    """Seconds until the first batch, and between each batch and the next."""
    times = [time.perf_counter()]
    with source_batches(
        [Source(store, manifest, "train")],
        RECIPE,
        seed=0,
        micro_batch_size=BATCH,
        num_steps=num_steps,
        loading=LoaderResources(threads=1),
    ) as batches:
        for _ in batches:
            times.append(time.perf_counter())
    first, *gaps = (after - before for before, after in pairwise(times))
    return first, gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--faults", nargs="*", default=[])
    parser.add_argument("--every", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, distant_s3(0.0) as (root, proxy):
        picture = jpeg(photograph(1))
        sides = {"files": open_store(f"file://{Path(folder)}"), "s3": open_store(f"{root}/stream")}
        manifests = {name: write_corpus(store, NUM_ROWS, picture) for name, store in sides.items()}
        print(
            f"row groups of {ROWS * len(picture) / 1e6:.1f} MB, latency {given.latency_ms:.0f} ms, faults {given.faults}"
        )
        faults = {"faults": tuple(given.faults), "every": given.every} if given.faults else {}
        proxy.change(latency_s=given.latency_ms / 1e3, **faults)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(given.rounds):
            for name in sorted(sides, reverse=number % 2 == 1):
                cpu_s = time.process_time()
                first, gaps = gaps_of(sides[name], manifests[name], given.steps)
                cpu_ms = 1e3 * (time.process_time() - cpu_s) / (BATCH * given.steps)
                rates[name].append(BATCH * len(gaps) / sum(gaps))
                worst = max(gaps) / statistics.median(gaps)
                print(
                    f"round {number}, {name}: first batch after {first:.2f} s, then {rates[name][-1]:.0f} images/s, largest gap "
                    f"{worst:.2f} x the median, {cpu_ms:.2f} ms of CPU an image",
                    flush=True,
                )
        ratios = [s3 / files for s3, files in zip(rates["s3"], rates["files"], strict=True)]
        print("S3 over files: " + ", ".join(f"{ratio:.3f}" for ratio in ratios))
        print("median and interval: {:.3f} [{:.3f}, {:.3f}]".format(*interval(ratios)))
        print(f"requests by fault: {proxy.change()}")


if __name__ == "__main__":
    main()
